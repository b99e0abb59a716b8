"""How likely a drafted token is to be accepted where its parent was: a head's probability, calibrated.

A head's own probability is no such thing: at temperature 0 the target takes its likeliest token, so where its
distributions are flat the head's first guess is accepted far more often than the head gives it, and others far less.
Trees that are chosen by raw probabilities are then too wide and too shallow. So the log odds of acceptance are fitted
to text of the target, for each depth, as a linear function of the head's own log odds, x = log q / (1 - q):

    of the head's first guess              best + own x(first)
    of its guess of rank r = 1, 2, ...     other + rank log r + own x(guess) + top x(first)

With own = 1 and the rest 0 this is the head's own probability. A guess is never held likelier than one of lower rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from truedraft.core import transfers
from truedraft.errors import OptionError

_LARGEST = 1000.0
_LEAST = 1e-7  # probabilities as near to 0 or 1 are not told apart


class Odds(NamedTuple):
    """What the log odds of acceptance at one depth are made of; see the module."""

    best: float
    other: float
    rank: float
    own: float
    top: float


RAW = Odds(0.0, 0.0, 0.0, 1.0, 0.0)
"""The head's own probability."""


@dataclass(frozen=True, slots=True)
class AcceptanceOdds:
    """Log probabilities that guesses are accepted, given that what they continue is.

    Attributes:
        depths: for tokens at depth 1, 2, ...; the last serves for deeper ones.

    Raises:
        OptionError: there is no depth; a number is not finite, or above 1,000; or one of lower rank or larger
            probability would survive less.
    """

    depths: tuple[Odds, ...]

    def __post_init__(self) -> None:
        """Refuse what has no order."""
        for odds in self.depths:
            usable = len(odds) == 5 and all(math.isfinite(each) and abs(each) <= _LARGEST for each in odds)
            if not usable or odds.own < 0.0 or odds.rank > 0.0:
                raise OptionError(f"odds of acceptance are five numbers that fall with the rank, got {tuple(odds)}")
        if not self.depths:
            raise OptionError("odds of acceptance are given for one depth or more, got none")

    @classmethod
    def of(cls, depths: Sequence[Sequence[float]]) -> AcceptanceOdds:
        """From lists of numbers.

        Raises:
            OptionError: they are none, or too many or too few.
        """
        try:
            return cls(tuple(Odds(*map(float, odds)) for odds in depths))
        except (TypeError, ValueError) as error:
            raise OptionError(f"odds of acceptance are five numbers for each depth, got {depths!r}") from error

    def between(self, other: AcceptanceOdds, share: float) -> AcceptanceOdds:
        """Odds `share` of the way to another's of as many depths; their order stays."""
        pairs = zip(self.depths, other.depths, strict=True)
        return AcceptanceOdds(
            tuple(Odds(*(a + share * (b - a) for a, b in zip(one, two, strict=True))) for one, two in pairs)
        )

    def __call__(self, log_probs: Tensor, depth: int) -> Tensor:
        """Log probabilities of survival: not above 0, not rising along ranks.

        A row depends on itself alone; nothing waits for a device.

        Args:
            log_probs: `[..., ranks]`, float32: logs of the probabilities that a head gives to its guesses, falling.
            depth: of the guesses, 1 or more.
        """
        odds = self.depths[min(depth, len(self.depths)) - 1]
        fixed, top = _by_rank(odds, log_probs.shape[-1], log_probs.device)
        own = log_odds(log_probs)
        found = torch.addcmul(torch.add(fixed, own, alpha=odds.own), own[..., :1], top)
        return logsigmoid(torch.minimum(found, found[..., :1]))


def log_odds(log_probs: Tensor) -> Tensor:
    """log q / (1 - q) of probabilities q that are given by their logs."""
    return torch.logit(log_probs.exp(), eps=_LEAST)


@lru_cache(maxsize=256)
def _by_rank(odds: Odds, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What each rank adds, and how much the first guess counts for it: `[ranks]` each; they recur at every step."""
    numbers = range(1, ranks)
    fixed = [odds.best, *(odds.other + odds.rank * math.log(number) for number in numbers)]
    both = torch.tensor([fixed, [0.0, *(odds.top for _ in numbers)]], dtype=torch.float32).to(device)
    return both[0], both[1]


Scores: TypeAlias = Callable[[Tensor, int], Tensor]
"""From log probabilities `[requests, ..., ranks]` of guesses and their depth to what paths are chosen by."""


def scores_for(requests: Sequence[AcceptanceOdds | None], device: torch.device) -> Scores:
    """What the paths of some requests are chosen by: each one's survival, or the log probabilities where it has none.

    Args:
        requests: what serves for each.
        device: of the log probabilities.
    """
    different = list(dict.fromkeys(requests))
    if len(different) == 1:
        return different[0] or as_they_are
    which = transfers.upload([different.index(each) for each in requests], device)
    rows = torch.arange(len(requests), device=device)

    def score(log_probs: Tensor, depth: int) -> Tensor:
        return torch.stack([(each or as_they_are)(log_probs, depth) for each in different])[which, rows]

    return score


def as_they_are(log_probs: Tensor, depth: int) -> Tensor:
    """What paths are chosen by where nothing was calibrated."""
    return log_probs
