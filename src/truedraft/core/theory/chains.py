"""Closed forms for chains and trees of drafted tokens.

Leviathan et al. 2211.17192, section 3: gamma drafted tokens, each accepted with probability alpha, independently. Here
a forward over gamma + 1 tokens costs as much as one over a single token; `predicted_speedup` uses measured costs.

Trace replay (docs/planning.md): the first k drafted tokens are accepted with probability sum over x_1..x_k of prod
min(p, q) = E over the target's own texts of prod min(1, q / p). So along a trace drawn from the target the factor of a
token is min(1, q(x) / p(x)); the overlap sum_x min(p, q) is right on average for one token, but its product is not for
several. At temperature 0 the factor is 1 or 0 and replay is exact.

Costs must come from curves measured before, without the engine: a prediction that reads the run it predicts predicts
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from truedraft.errors import OptionError
from truedraft.options import check_not_negative, check_positive, check_share, check_whole


def replay_factor(p: float, q: float) -> float:
    """min(1, q / p) for one token of the trace, with p above 0; OptionError if a probability is out of range."""
    check_positive("p", p)
    check_share("p", p)
    check_share("q", q)
    return min(1.0, q / p)


def expected_tokens(alpha: float, gamma: int) -> float:
    """(1 - alpha^(gamma+1)) / (1 - alpha): tokens emitted per target call, the recovered or bonus token included.

    Equation 1 of the paper, for acceptance rate alpha and gamma drafted tokens.

    Worked example: alpha = 0.6 and gamma = 2 give 1 + 0.6 + 0.36 = 1.96.

    Raises:
        OptionError: an argument is out of range.
    """
    check_share("alpha", alpha)
    check_whole("gamma", gamma, least=0)
    total = reached = 1.0
    for _ in range(gamma):  # the sum itself, not the quotient: near alpha = 1 the quotient loses digits
        reached *= alpha
        total += reached
    return total


def speedup(alpha: float, gamma: int, c: float) -> float:
    """(1 - alpha^(gamma+1)) / ((1 - alpha)(gamma c + 1)): expected factor in wall time over plain decoding.

    Theorem 3.8 of the paper; c is the time of one draft step over that of one target step. Raises OptionError for an
    argument out of range.
    """
    check_not_negative("c", c)
    return expected_tokens(alpha, gamma) / (gamma * c + 1.0)


def pays(alpha: float, c: float) -> bool:
    """Whether some gamma above 0 is faster than plain decoding: if alpha > c (corollary 3.9); raises as `speedup`."""
    check_share("alpha", alpha)
    check_not_negative("c", c)
    return alpha > c


def least_speedup(alpha: float, c: float) -> float:
    """(1 + alpha) / (1 + c): where it pays, the best gamma gains at least this factor (corollary 3.9 of the paper).

    It is the speed-up of gamma = 1; 1 where it does not pay. Raises OptionError as `speedup`.
    """
    return (1.0 + alpha) / (1.0 + c) if pays(alpha, c) else 1.0


def operations_factor(alpha: float, gamma: int, c_ops: float) -> float:
    """(1 - alpha)(gamma c_ops + gamma + 1) / (1 - alpha^(gamma+1)): arithmetic per emitted token over plain decoding's.

    Theorem 3.11; c_ops is the draft's operations per token over the target's. Raises OptionError as `speedup`.
    """
    check_not_negative("c_ops", c_ops)
    return (gamma * c_ops + gamma + 1.0) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, c: float, limit: int = 64) -> int:
    """The gamma of 0 to `limit` with the largest `speedup`, the smallest of several; 0 where it does not pay.

    A limit is needed because with c = 0 every further token helps. Raises OptionError as `speedup`.
    """
    check_whole("limit", limit, least=0)
    return max(range(limit + 1), key=lambda gamma: speedup(alpha, gamma, c))


def predicted_speedup(tau: float, plain_s: float, verify_s: float, draft_s: float) -> float:
    """tau V(1) / (V(nodes + 1) + draft cost): the predicted factor over plain decoding.

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


def expected_tokens_if_independent(paths: Iterable[Sequence[int]], accuracy: Sequence[Sequence[float]]) -> float:
    """1 + the sum over paths of the product of accuracies: tokens per target call if heads erred independently.

    A node of a tree of candidates is a path of ranks from the root. Heads err together, which measured counts include
    and the product of accuracies does not; reports show both.

    Worked example: with accuracies 0.6 and 0.2 of the first head's first two ranks and 0.5 of the second head's first
    one, the paths (0), (1) and (0, 0) come to 1 + 0.6 + 0.2 + 0.6 * 0.5 = 2.1.

    Args:
        paths: of ranks from 0, one for each node.
        accuracy: `[heads][ranks]`: how often the true token had which rank among each head's guesses, a fraction.

    Raises:
        OptionError: an accuracy is outside [0, 1], or a path needs one that does not exist.
    """
    for row in accuracy:
        for share in row:
            check_share("each accuracy", share)
    products = []
    for path in paths:
        if len(path) > len(accuracy) or any(not 0 <= rank < len(accuracy[head]) for head, rank in enumerate(path)):
            raise OptionError(f"the path {list(path)} needs accuracies of heads and ranks that were not counted")
        products.append(math.prod(accuracy[head][rank] for head, rank in enumerate(path)))
    return 1.0 + math.fsum(products)
