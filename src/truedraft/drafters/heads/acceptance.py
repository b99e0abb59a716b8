"""Calibrated probability that a drafted token is accepted, given that its parent was.

A head's own probability is not that: at temperature 0 the target takes its likeliest token, so a head's first guess is
accepted more often than its probability, and others less. So the log odds of acceptance are fitted to text of the
target, for each depth, as a linear function of the head's own log odds, x = log q / (1 - q):

    of the head's first guess              best + own x(first)
    of its guess of rank r = 1, 2, ...     other + rank log r + own x(guess) + top x(first)

With own = 1 and the rest 0 this is the head's own probability. No guess has a higher value than one of lower rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from truedraft.core import transfers
from truedraft.errors import OptionError

_LARGEST = 1000.0
_HOST = torch.device("cpu")
_LEAST = 1e-7  # probabilities closer to 0 or 1 are clamped


class Odds(NamedTuple):
    """Coefficients of the log odds of acceptance at one depth."""

    best: float
    other: float
    rank: float
    own: float
    top: float


RAW = Odds(0.0, 0.0, 0.0, 1.0, 0.0)
"""The head's own probability."""


@dataclass(frozen=True, slots=True)
class AcceptanceOdds:
    """Log probabilities that guesses are accepted, given that their parents are; the last depth is for deeper ones too.

    Raises:
        OptionError: there is no depth; a number is not finite, or above 1,000; or the result would not be monotonic in
            rank and probability.
    """

    depths: tuple[Odds, ...]

    def __post_init__(self) -> None:
        for odds in self.depths:
            usable = len(odds) == 5 and all(math.isfinite(each) and abs(each) <= _LARGEST for each in odds)
            if not usable or odds.own < 0.0 or odds.rank > 0.0:
                raise OptionError(f"odds of acceptance are five numbers that fall with the rank, got {tuple(odds)}")
        if not self.depths:
            raise OptionError("odds of acceptance are given for one depth or more, got none")

    @classmethod
    def of(cls, depths: Sequence[Sequence[float]]) -> AcceptanceOdds:
        """From lists of five numbers; raises `OptionError` if they are invalid."""
        try:
            return cls(tuple(Odds(*map(float, odds)) for odds in depths))
        except (TypeError, ValueError) as error:
            raise OptionError(f"odds of acceptance are five numbers for each depth, got {depths!r}") from error

    def between(self, other: AcceptanceOdds, share: float) -> AcceptanceOdds:
        """Odds interpolated by `share` with another's of as many depths; they stay monotonic."""
        pairs = zip(self.depths, other.depths, strict=True)
        return AcceptanceOdds(
            tuple(Odds(*(a + share * (b - a) for a, b in zip(one, two, strict=True))) for one, two in pairs)
        )

    def __call__(self, log_probs: Tensor, depth: int) -> Tensor:
        """Log probabilities of survival: at most 0, and not rising along ranks; a row depends only on itself.

        Args:
            log_probs: `[..., ranks]`, float32: a head's log probabilities of its guesses at `depth`, descending.
        """
        depths = len(self.depths)
        numbers = _numbers(self, depths, log_probs.shape[-1], log_probs.device)
        return _survival(log_probs, numbers[min(depth, depths) - 1])

    def of_depths(self, log_probs: Tensor) -> Tensor:
        """The same for guesses at depth 1, 2, ...: `[depths, rows, ranks]`."""
        numbers = _numbers(self, len(log_probs), log_probs.shape[-1], log_probs.device)
        return _survival(log_probs, numbers[:, None])


def _survival(log_probs: Tensor, numbers: Tensor) -> Tensor:
    """Of guesses `[..., ranks]`, from the numbers `[..., 1 + 2 ranks]` of `_numbers`."""
    ranks = log_probs.shape[-1]
    own, fixed, top = numbers.split([1, ranks, ranks], dim=-1)
    odds = log_odds(log_probs)
    found = torch.addcmul(torch.addcmul(fixed, odds, own), odds[..., :1], top)
    return logsigmoid(torch.minimum(found, found[..., :1]))


def log_odds(log_probs: Tensor) -> Tensor:
    """log q / (1 - q) of probabilities q that are given as logs."""
    return torch.logit(log_probs.exp(), eps=_LEAST)


@lru_cache(maxsize=256)
def _numbers(odds: AcceptanceOdds, depths: int, ranks: int, device: torch.device) -> Tensor:
    """`[depths, 1 + ranks + ranks]`, float32: weight of a guess's log odds, rank offsets, first guess's weights."""
    rows = []
    for depth in range(depths):
        of = odds.depths[min(depth, len(odds.depths) - 1)]
        others = range(1, ranks)
        fixed = [of.best, *(of.other + of.rank * math.log(number) for number in others)]
        rows.append([of.own, *fixed, 0.0, *(of.top for _ in others)])
    return torch.tensor(rows, dtype=torch.float32).to(device)


Scores: TypeAlias = Callable[[Tensor, int], Tensor]
"""Maps log probabilities `[requests, ..., ranks]` of guesses and their depth to scores of paths."""


def as_they_are(log_probs: Tensor, depth: int) -> Tensor:
    """Scores without calibration."""
    return log_probs


def scores_by(numbers: Tensor) -> Scores:
    """Survival of the paths of requests, or log probabilities if a request has no odds, from `numbers_of`.

    The numbers may change between replays of a recorded graph.
    """

    def score(log_probs: Tensor, depth: int) -> Tensor:
        own = numbers[:, depth - 1]
        own = own.view(len(own), *[1] * (log_probs.dim() - 2), -1)
        return torch.where(own[..., :1] > 0.0, _survival(log_probs, own[..., 1:]), log_probs)

    return score if numbers.numel() else as_they_are


def numbers_of(requests: Sequence[AcceptanceOdds | None], depths: int, ranks: int, device: torch.device) -> Tensor:
    """Input of `scores_by`: 1 if a request has odds, else 0, and its numbers at each depth; nothing if none has any."""
    if not any(requests):
        return torch.empty(len(requests), 0, device=device)
    return transfers.upload(np.stack([_with_odds(odds, depths, ranks) for odds in requests]), device)


@lru_cache(maxsize=256)
def _with_odds(odds: AcceptanceOdds | None, depths: int, ranks: int) -> NDArray[np.float32]:
    if odds is None:
        return np.zeros((depths, 2 + 2 * ranks), np.float32)
    return np.pad(_numbers(odds, depths, ranks, _HOST).numpy(), ((0, 0), (1, 0)), constant_values=1.0)
