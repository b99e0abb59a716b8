"""Estimates with their 95 % confidence interval, by resampling samples or in closed form, and a sign test."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
_TAILS = (2.5, 97.5)  # percentiles
_RESAMPLED = 1000
_FLIPS = 20_000

Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Interval:
        return Interval(self.value * factor, self.low * factor, self.high * factor)


def resampled(numbers: ArrayLike, value: Callable[[Numbers], Numbers], draws: int = _RESAMPLED) -> Interval:
    """A value of sums over samples, with a percentile bootstrap by the same draws at every call.

    `value` computes it from sums `[kinds, ...]` of numbers `[kinds, samples]`; draws without a finite value are left
    out.
    """
    terms = np.asarray(numbers, np.float64)
    count = terms.shape[1]
    chosen = np.random.default_rng(0).integers(0, count, (draws, count))
    with np.errstate(all="ignore"):
        values, whole = value(terms[:, chosen].sum(axis=2)), float(value(terms.sum(axis=1)))
    known = values[np.isfinite(values)]
    low, high = np.percentile(known, _TAILS) if len(known) else (-math.inf, math.inf)
    return Interval(whole, float(low), float(high))


def ratio_over_prompts(above: Sequence[float], below: Sequence[float]) -> Interval:
    """The ratio of two sums over prompts, resampled; the sum of the denominator's terms is above 0."""
    return resampled([above, below], lambda sums: sums[0] / sums[1])


def ratio_of_rates(fast: Sequence[tuple[float, float]], plain: Sequence[tuple[float, float]]) -> Interval:
    """How many times faster one way was: ratio of all tokens over all seconds; (tokens, seconds) by prompt."""
    return resampled([*zip(*fast, strict=True), *zip(*plain, strict=True)], lambda n: n[0] / n[1] / (n[2] / n[3]))


def ratio_of_totals(above: Sequence[float], below: Sequence[float]) -> Interval:
    """The ratio of two totals over independent samples, with the interval of its linear approximation.

    Worked example: sums 1 and 3 over 10 tokens each give 0.2; the samples are 0.1 off it each way.
    """
    total, count = math.fsum(below), len(above)
    ratio = math.fsum(above) / total
    if count < 2:
        return Interval(ratio, -math.inf, math.inf)
    squares = math.fsum((own - ratio * size) ** 2 for own, size in zip(above, below, strict=True))
    error = math.sqrt(squares * count / (count - 1)) / total
    half = (1.96 + 2.4 / (count - 1)) * error  # near Student's quantile
    return Interval(ratio, ratio - half, ratio + half)


def sign_flips(differences: Numbers) -> float:
    """Probability that paired differences `[prompts]` have so large a sum if either sign of each is equally likely.

    By random signs; one-sided, and never 0. It bounds the false alarms if two ways are exchangeable on each prompt;
    where only their mean is 0 and they are skewed, only for many prompts.
    """
    signs = np.random.default_rng(0).integers(0, 2, (_FLIPS, len(differences))) * 2 - 1
    as_large = (signs @ differences >= differences.sum() - 1e-9).sum()
    return float((1 + as_large) / (1 + _FLIPS))
