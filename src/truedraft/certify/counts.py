"""Counts of outcomes compared with a known distribution: evidence against it, and the smallest detectable deviation.

Outcomes that follow p are independent draws from it. For any other distribution r, fixed beforehand or averaged over
beforehand, the product over outcomes of r(outcome) / p(outcome) is a martingale that starts at 1. Averaged over
Dirichlet priors around p it has a closed form in the counts, and finds a deviation in any direction.

Where p is 0, `FLOOR` replaces it, which only makes the product smaller if p is right: one token from a number that was
rounded to 0 is no strong evidence, a few are.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

FLOOR = 2.0**-22
"""Minimum probability of a cell: of the size of a rounding of float32."""
_CONCENTRATIONS = (4.0, 32.0, 256.0, 2048.0, 16384.0)
_ELSEWHERE = 0.05  # the share of a prior that is uniform over cells, including those without probability
_MISSED = 4  # expected number of samples without detection when measuring power
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
    """`log_dirichlet` of several counts `[samples, cells]`: `[samples]`."""
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
    """Mean total variation between `rows` draws and their distribution, by the normal approximation."""
    return float((2.0 * probs * (1.0 - probs) / (math.pi * max(rows, 1))).sqrt().sum()) / 2.0


def smallest_detectable(probs: Tensor, rows: int, log_needed: float, power: float = 0.9) -> float:
    """The least total variation that `rows` draws detect, for any kind of fault.

    Mass is moved from one half of the outcomes to the other, which is the hardest to detect; samples of the result are
    given to the same test.

    Args:
        probs: `[cells]`, float64: the exact distribution.
        log_needed: the logarithm of the required e-value.
        power: approximate probability of detection.
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
    """Fraction of samples with a detected deviation."""
    planted = _moved(probs, variation)
    counts = np.random.default_rng(0).multinomial(rows, planted.numpy() / float(planted.sum()), samples)
    return float((log_dirichlets(torch.from_numpy(counts).double(), probs) >= log_needed).double().mean())


def _moved(probs: Tensor, variation: float) -> Tensor:
    """A distribution at this distance: about half of the mass loses some to the other half, or to empty cells."""
    order = probs.argsort(descending=True)
    gains = torch.zeros_like(probs, dtype=torch.bool)
    mass = 0.0
    for cell in order.tolist():
        if mass + float(probs[cell]) <= 0.5 or (mass == 0.0 and float(probs[cell]) < 1.0):
            gains[cell] = True
            mass += float(probs[cell])
    if not 0.0 < mass < 1.0:  # only one outcome
        gains, mass = probs == 0.0, 0.0
    share = probs / mass if mass > 0.0 else gains.double() / gains.sum()
    variation = min(variation, 1.0 - mass)
    left = probs * ~gains
    return torch.where(gains, probs + variation * share, probs - variation * left / left.sum()).clamp_min(0.0)
