"""What a drafter would have saved along a trace of the target's own tokens.

DESIGN section 4, trace replay. The first k drafted tokens are accepted with probability sum over x_1..x_k of
prod min(p, q) = E over the target's own texts of prod min(1, q / p). So along a trace drawn from the target the factor
of a token is min(1, q(x) / p(x)); the overlap sum_x min(p, q) is right on average for one token, but its product is
not for several. At temperature 0 the factor is 1 or 0 and replay is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from truedraft.theory.arguments import check_positive, check_share
from truedraft.theory.chains import expected_tokens_by_position


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
