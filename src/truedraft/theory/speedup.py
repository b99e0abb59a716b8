"""Speed-up and goodput from measured costs. What they say is called "predicted" everywhere (DESIGN section 4).

The costs must come from curves measured before, without the engine: a prediction that reads the run it predicts
predicts nothing.

Goodput is what a whole batch emits per second (Liu et al., arXiv 2406.14066). A batch that keeps the machine busy
leaves no free rows for guesses, so the best length falls as the batch grows, down to 0, which is plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from truedraft.errors import OptionError
from truedraft.theory.arguments import check_not_negative, check_positive, check_whole
from truedraft.theory.chains import expected_tokens


def predicted_speedup(tau: float, plain_s: float, verify_s: float, draft_s: float) -> float:
    """tau V(1) / (V(nodes + 1) + draft cost): the factor over plain decoding that the costs allow.

    Args:
        tau: mean acceptance length: tokens emitted per target call, the recovered or bonus token included.
        plain_s: V(1), seconds of the target's forward over one token of each request.
        verify_s: V(nodes + 1), seconds of its forward over the root and all nodes.
        draft_s: seconds of drafting one proposal, catch-up included.

    Raises:
        OptionError: an argument is out of range.
    """
    check_not_negative("tau", tau)
    check_positive("plain_s", plain_s)
    check_positive("verify_s", verify_s)
    check_not_negative("draft_s", draft_s)
    return tau * plain_s / (verify_s + draft_s)


@dataclass(frozen=True, slots=True)
class GoodputChoice:
    """How many tokens to draft for each request of a batch.

    Attributes:
        length: drafted tokens of each request; 0 is plain decoding.
        tokens_per_s: expected goodput.
    """

    length: int
    tokens_per_s: float


def goodput(alphas: Sequence[float], length: int, step_s: float) -> float:
    """Tokens per second that a batch emits: the sum of its requests' expected tokens over the step's seconds.

    Args:
        alphas: acceptance rate of each request, a fraction.
        length: tokens drafted for each; 0 emits one token for each request.
        step_s: seconds of one step: drafting and the target's forward over len(alphas) * (length + 1) rows.

    Raises:
        OptionError: an empty batch, or an argument out of range.
    """
    if not alphas:
        raise OptionError("goodput needs the acceptance rate of at least one request, got none")
    check_positive("step_s", step_s)
    return sum(expected_tokens(alpha, length) for alpha in alphas) / step_s


def best_length_under_load(alphas: Sequence[float], step_s: Callable[[int], float], limit: int = 16) -> GoodputChoice:
    """The length of 0 to `limit` with the largest goodput, the shortest of several.

    Args:
        alphas: acceptance rate of each request of the batch, a fraction.
        step_s: seconds of one step of this batch by the length, 0 included.
        limit: longest draft to consider.

    Raises:
        OptionError: an empty batch, or an argument or a cost out of range.
    """
    check_whole("limit", limit, lowest=0)
    choices = [GoodputChoice(length, goodput(alphas, length, step_s(length))) for length in range(limit + 1)]
    return max(choices, key=lambda choice: choice.tokens_per_s)
