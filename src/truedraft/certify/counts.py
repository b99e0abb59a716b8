"""Counts of outcomes beside a distribution that is known: evidence against it, and how small a deviation would show.

Outcomes that follow p are independent draws from it. For any other distribution r, fixed beforehand or averaged over
beforehand, the product over outcomes of r(outcome) / p(outcome) is a martingale that starts at 1. Averaged over
Dirichlet priors around p it has a closed form in the counts, and finds a deviation in any direction.

Where p is 0 the product is taken with `FLOOR` in its place, which only makes it smaller where p is right: one token
that came from a number that was rounded to 0 condemns nobody, a few do.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

FLOOR = 2.0**-22
"""What a cell without probability is taken to have, at least: of the size of a rounding of float32."""
_CONCENTRATIONS = (4.0, 32.0, 256.0, 2048.0, 16384.0)
_ELSEWHERE = 0.05  # the share of a prior that is uniform over cells, those without probability included
_MISSED = 4  # of the samples by which power is measured, about so many are not found
_HALVINGS = 9


def log_dirichlet(counts: Tensor, probs: Tensor) -> float:
    """The logarithm of the averaged likelihood ratio of counts against a distribution.

    The prior is a mean of Dirichlet distributions with parameters c b, b nearly `probs`, for several c. With n rows,
    n_i of them in cell i, one c gives

        Gamma(c) / Gamma(c + n) times the product over i of Gamma(c b_i + n_i) / (Gamma(c b_i) p_i^n_i).

    Args:
        counts: `[cells]`, float64.
        probs: `[cells]`, float64.
    """
    return float(log_dirichlets(counts[None], probs)[0])


def log_dirichlets(counts: Tensor, probs: Tensor) -> Tensor:
    """The same for several counts `[samples, cells]`: `[samples]`."""
    base = (1.0 - _ELSEWHERE) * probs + _ELSEWHERE / len(probs)
    rows = counts.sum(-1)
    against = counts @ probs.clamp_min(FLOOR).log()
    logs = []
    for c in _CONCENTRATIONS:
        prior = c * base
        inside = (torch.lgamma(prior + counts) - torch.lgamma(prior)).sum(-1)
        logs.append(math.lgamma(c) - torch.lgamma(rows + c) + inside - against)
    return torch.logsumexp(torch.stack(logs), 0) - math.log(len(logs))


def total_variation(counts: Tensor, probs: Tensor) -> float:
    """Between frequencies `[cells]` and probabilities `[cells]`."""
    return float((counts / counts.sum().clamp_min(1.0) - probs).abs().sum()) / 2.0


def variation_by_chance(rows: int, probs: Tensor) -> float:
    """The mean total variation between so many rows and what they are drawn from, by the normal approximation."""
    return float((2.0 * probs * (1.0 - probs) / (math.pi * max(rows, 1))).sqrt().sum()) / 2.0


def smallest_detectable(probs: Tensor, rows: int, log_needed: float, power: float = 0.9) -> float:
    """The least total variation that so many rows show, whatever kind of fault it is.

    Mass is moved from one half of the outcomes to the other, the hardest to see; samples of that are drawn and given to
    the very test.

    Args:
        probs: `[cells]`, float64: the exact distribution.
        rows: how many are drawn.
        log_needed: the logarithm of the e-value that must be reached.
        power: with about which probability it is found.
    """
    low, high = 1e-4, 1.0
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if _found(probs, middle, rows, log_needed, round(_MISSED / (1.0 - power))) >= power:
            high = middle
        else:
            low = middle
    return high


def _found(probs: Tensor, variation: float, rows: int, log_needed: float, samples: int) -> float:
    """How often a deviation is found."""
    planted = _moved(probs, variation)
    counts = np.random.default_rng(0).multinomial(rows, planted.numpy() / float(planted.sum()), samples)
    return float((log_dirichlets(torch.from_numpy(counts).double(), probs) >= log_needed).double().mean())


def _moved(probs: Tensor, variation: float) -> Tensor:
    """A distribution so far from another one: what has mass loses some to about half of it, else to where none is."""
    order = probs.argsort(descending=True)
    gains = torch.zeros_like(probs, dtype=torch.bool)
    mass = 0.0
    for cell in order.tolist():
        if mass + float(probs[cell]) <= 0.5 or (mass == 0.0 and float(probs[cell]) < 1.0):
            gains[cell] = True
            mass += float(probs[cell])
    if not 0.0 < mass < 1.0:  # one outcome alone
        gains, mass = probs == 0.0, 0.0
    share = probs / mass if mass > 0.0 else gains.double() / gains.sum()
    variation = min(variation, 1.0 - mass)
    left = probs * ~gains
    return torch.where(gains, probs + variation * share, probs - variation * left / left.sum()).clamp_min(0.0)
