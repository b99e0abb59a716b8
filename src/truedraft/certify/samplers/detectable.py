"""How small a deviation so many rows would have shown: planted in the exact distribution, and looked for."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from truedraft.certify.samplers.evidence import log_dirichlets

FOUND = 0.9
"""A smallest detectable deviation is found with about this probability."""
_PLANTED = 40
_HALVINGS = 9


def smallest_detectable(probs: Tensor, rows: int, log_needed: float, seed: int = 0) -> float:
    """The least total variation that so many rows show, whatever kind of fault it is.

    Mass is moved from one half of the outcomes to the other, the hardest to see; samples of that are drawn and given to
    the very test.

    Args:
        probs: `[cells]`, float64: the exact distribution.
        rows: how many are drawn.
        log_needed: the logarithm of the e-value that must be reached.
        seed: of the samples.
    """
    low, high = 1e-4, 1.0
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if _found(probs, middle, rows, log_needed, seed) >= FOUND:
            high = middle
        else:
            low = middle
    return high


def _found(probs: Tensor, variation: float, rows: int, log_needed: float, seed: int) -> float:
    """How often a deviation is found."""
    planted = _moved(probs, variation)
    counts = np.random.default_rng(seed).multinomial(rows, planted.numpy() / float(planted.sum()), _PLANTED)
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
