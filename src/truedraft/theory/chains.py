"""How likely a drafted token is accepted, and what chains of drafted tokens bring: closed forms.

Leviathan et al. 2211.17192, section 3: gamma drafted tokens, each accepted with probability alpha, independently. Here
a forward over gamma + 1 tokens costs as much as one over a single token; `predicted_speedup` and `goodput` drop that
assumption and take measured costs. Probabilities are sequences of plain numbers over one vocabulary: this package needs
no torch.

Trace replay (docs/planning.md): the first k drafted tokens are accepted with probability sum over x_1..x_k of
prod min(p, q) = E over the target's own texts of prod min(1, q / p). So along a trace drawn from the target the factor
of a token is min(1, q(x) / p(x)); the overlap sum_x min(p, q) is right on average for one token, but its product is
not for several. At temperature 0 the factor is 1 or 0 and replay is exact.

Measured costs must come from curves measured before, without the engine: a prediction that reads the run it predicts
predicts nothing. What they say is called "predicted" everywhere. Goodput is what a whole batch emits per second (Liu et
al., arXiv 2406.14066). A batch that keeps the machine busy leaves no free rows for guesses, so the best length falls as
the batch grows, down to 0, which is plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from truedraft.errors import OptionError
from truedraft.options import check_not_negative, check_positive, check_share, check_whole


def acceptance_rate(p: Sequence[float], q: Sequence[float], lenience: float = 1.0) -> float:
    """sum_x min(p(x) / l, q(x)): the probability that a token drawn from q is accepted.

    At l = 1 this is alpha = 1 - TV(p, q) (Leviathan et al. 2211.17192, definition 3.1 to theorem 3.5); below it,
    lenient and lossy (same paper, appendix on lenience). Alpha of a pair of models is its mean over positions.

    Args:
        p: target probabilities `[vocab]`, a fraction each.
        q: draft probabilities `[vocab]`, a fraction each.
        lenience: l in (0, 1]; 1 is lossless.

    Returns:
        A fraction.

    Raises:
        OptionError: distributions of different lengths, a probability outside [0, 1], or a lenience outside (0, 1].
    """
    _check_probs(p, q)
    check_share("lenience", lenience)
    if lenience == 0.0:
        raise OptionError("lenience must lie in (0, 1], got 0; at 0 every guess would be accepted")
    return math.fsum(min(target / lenience, draft) for target, draft in zip(p, q, strict=True))


def total_variation(p: Sequence[float], q: Sequence[float]) -> float:
    """Half the L1 distance of two distributions `[vocab]`, a fraction; 1 - alpha.

    Raises:
        OptionError: distributions of different lengths, or a probability outside [0, 1].
    """
    _check_probs(p, q)
    return 0.5 * math.fsum(abs(target - draft) for target, draft in zip(p, q, strict=True))


def least_coupled_acceptance(tv: float) -> float:
    """(1 - TV) / (1 + TV): coupled sampling accepts at least this often (arXiv 2408.07978).

    Target and draft take the argmax of log-probability plus the same Gumbel noise; this is the least probability
    that both name one token. Speculative sampling accepts 1 - TV, so coupling costs at most the factor 1 / (1 + TV).

    Args:
        tv: total variation of the two distributions, a fraction.

    Raises:
        OptionError: tv lies outside [0, 1].
    """
    check_share("tv", tv)
    return (1.0 - tv) / (1.0 + tv)


def replay_factor(p: float, q: float) -> float:
    """min(1, q / p) for one token of the trace.

    Args:
        p: its probability under the target, above 0, for the target drew it.
        q: its probability under the draft.

    Raises:
        OptionError: a probability is out of range.
    """
    check_positive("p", p)
    check_share("p", p)
    check_share("q", q)
    return min(1.0, q / p)


def replayed_tokens(factors: Sequence[float]) -> float:
    """1 + f_1 + f_1 f_2 + ...: expected tokens of one target call that starts at a place of the trace.

    An unbiased estimate of the tokens per target call of a chain of len(factors) drafted tokens; average it over
    the places of the trace.

    Args:
        factors: `replay_factor` of the tokens that follow, in order.

    Raises:
        OptionError: a factor lies outside [0, 1].
    """
    return expected_tokens_by_position(factors)


def expected_tokens(alpha: float, gamma: int) -> float:
    """(1 - alpha^(gamma+1)) / (1 - alpha): tokens emitted per target call, the recovered or bonus token included.

    Equation 1 of the paper. It lies between 1 (nothing accepted) and gamma + 1 (all accepted).

    Worked example: alpha = 0.6 and gamma = 2 give 1 + 0.6 + 0.36 = 1.96.

    Args:
        alpha: acceptance rate, a fraction.
        gamma: drafted tokens, 0 or more.

    Raises:
        OptionError: an argument is out of range.
    """
    check_share("alpha", alpha)
    check_whole("gamma", gamma, least=0)
    # The sum itself, not the quotient: near alpha = 1 the quotient loses its digits.
    return expected_tokens_by_position([alpha] * gamma)


def expected_tokens_by_position(rates: Sequence[float]) -> float:
    """1 + r_1 + r_1 r_2 + ...: tokens per target call when the k-th drafted token has its own acceptance rate.

    Args:
        rates: acceptance of the k-th token given that all before it were accepted, a fraction each, as
            `accepted_per_position[k] / tried_per_position[k]` of the counters.

    Raises:
        OptionError: a rate is out of range.
    """
    total = reached = 1.0
    for rate in rates:
        check_share("each acceptance rate", rate)
        reached *= rate
        total += reached
    return total


def speedup(alpha: float, gamma: int, c: float) -> float:
    """(1 - alpha^(gamma+1)) / ((1 - alpha)(gamma c + 1)): expected factor in wall time over plain decoding.

    Theorem 3.8 of the paper.

    Args:
        alpha: acceptance rate, a fraction.
        gamma: drafted tokens, 0 or more.
        c: time of one draft step over time of one target step.

    Raises:
        OptionError: an argument is out of range.
    """
    check_not_negative("c", c)
    return expected_tokens(alpha, gamma) / (gamma * c + 1.0)


def pays(alpha: float, c: float) -> bool:
    """Whether some gamma above 0 is faster than plain decoding: exactly if alpha > c (corollary 3.9 of the paper).

    Raises:
        OptionError: an argument is out of range.
    """
    check_share("alpha", alpha)
    check_not_negative("c", c)
    return alpha > c


def least_speedup(alpha: float, c: float) -> float:
    """(1 + alpha) / (1 + c): where it pays, the best gamma gains at least this factor (corollary 3.9 of the paper).

    It is the speed-up of gamma = 1. Where it does not pay, the answer is 1: plain decoding.

    Raises:
        OptionError: an argument is out of range.
    """
    return (1.0 + alpha) / (1.0 + c) if pays(alpha, c) else 1.0


def operations_factor(alpha: float, gamma: int, c_ops: float) -> float:
    """(1 - alpha)(gamma c_ops + gamma + 1) / (1 - alpha^(gamma+1)): arithmetic per emitted token over plain decoding's.

    Theorem 3.11 of the paper.

    Args:
        alpha: acceptance rate, a fraction.
        gamma: drafted tokens, 0 or more.
        c_ops: operations of the draft per token over those of the target.

    Raises:
        OptionError: an argument is out of range.
    """
    check_not_negative("c_ops", c_ops)
    return (gamma * c_ops + gamma + 1.0) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, c: float, limit: int = 64) -> int:
    """The gamma of 0 to `limit` with the largest `speedup`, the smallest of several; 0 where it does not pay.

    Args:
        alpha: acceptance rate, a fraction.
        c: time of one draft step over time of one target step.
        limit: largest gamma to consider; with c = 0 every further token helps, so there must be one.

    Raises:
        OptionError: an argument is out of range.
    """
    check_whole("limit", limit, least=0)
    return max(range(limit + 1), key=lambda gamma: speedup(alpha, gamma, c))


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
    check_whole("limit", limit, least=0)
    choices = [GoodputChoice(length, goodput(alphas, length, step_s(length))) for length in range(limit + 1)]
    return max(choices, key=lambda choice: choice.tokens_per_s)


def _check_probs(p: Sequence[float], q: Sequence[float]) -> None:
    if len(p) != len(q):
        raise OptionError(f"both distributions must be over one vocabulary, got {len(p)} and {len(q)} probabilities")
    for name, probs in (("p", p), ("q", q)):
        for probability in probs:
            check_share(f"each probability of {name}", probability)
