"""How likely one drafted token is accepted, from the laws p of the target and q of the draft.

Laws are sequences of probabilities over one vocabulary, plain numbers: this package needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from truedraft.errors import OptionError
from truedraft.theory.arguments import check_share


def acceptance_rate(p: Sequence[float], q: Sequence[float], lenience: float = 1.0) -> float:
    """sum_x min(p(x) / l, q(x)): the probability that a token drawn from q is accepted.

    At l = 1 this is alpha = 1 - TV(p, q) (Leviathan et al. 2211.17192, definition 3.1 to theorem 3.5); below it,
    lenient and lossy (same paper, appendix on lenience). Alpha of a pair of models is its mean over positions.

    Args:
        p: target law `[vocab]`, a fraction each.
        q: draft law `[vocab]`, a fraction each.
        lenience: l in (0, 1]; 1 is lossless.

    Returns:
        A fraction.

    Raises:
        OptionError: laws of different lengths, a probability outside [0, 1], or a lenience outside (0, 1].
    """
    _check_laws(p, q)
    check_share("lenience", lenience)
    if lenience == 0.0:
        raise OptionError("lenience must lie in (0, 1], got 0; at 0 every guess would be accepted")
    return math.fsum(min(target / lenience, draft) for target, draft in zip(p, q, strict=True))


def total_variation(p: Sequence[float], q: Sequence[float]) -> float:
    """Half the L1 distance of two laws `[vocab]`, a fraction; 1 - alpha.

    Raises:
        OptionError: laws of different lengths, or a probability outside [0, 1].
    """
    _check_laws(p, q)
    return 0.5 * math.fsum(abs(target - draft) for target, draft in zip(p, q, strict=True))


def least_coupled_acceptance(tv: float) -> float:
    """(1 - TV) / (1 + TV): coupled sampling accepts at least this often (arXiv 2408.07978).

    Target and draft take the argmax of log-probability plus the same Gumbel noise; this is the least probability
    that both name one token. Speculative sampling accepts 1 - TV, so coupling costs at most the factor 1 / (1 + TV).

    Args:
        tv: total variation of the two laws, a fraction.

    Raises:
        OptionError: tv lies outside [0, 1].
    """
    check_share("tv", tv)
    return (1.0 - tv) / (1.0 + tv)


def _check_laws(p: Sequence[float], q: Sequence[float]) -> None:
    if len(p) != len(q):
        raise OptionError(f"both laws must be over one vocabulary, got {len(p)} and {len(q)} probabilities")
    for name, law in (("p", p), ("q", q)):
        for probability in law:
            check_share(f"each probability of {name}", probability)
