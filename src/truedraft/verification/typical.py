"""Typical acceptance: keep a drafted token that the target finds typical. Lossy."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.errors import OptionError
from truedraft.verification.threshold import ThresholdAcceptance


class TypicalAcceptance(ThresholdAcceptance):
    """Keep a token x where p(x) > min(epsilon, delta exp(-H(p))), H the entropy of p in nats.

    Cai et al. 2401.10774 (Medusa), section on typical acceptance. The surer the target is, the more it asks of a
    token. Lossy: tokens that the target would seldom draw are emitted often, and those below the threshold never; where
    nothing stays, and behind what stays, comes the argmax. At temperature 0 it looks at p at temperature 1.

    Args:
        epsilon: a probability above which a token always stays, in (0, 1]; the published code's posterior_threshold.
        delta: above 0; the published code's posterior_alpha, there the square root of epsilon.

    Raises:
        OptionError: a value out of range.
    """

    name: ClassVar[str] = "typical"

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        if not 0.0 < epsilon <= 1.0:
            raise OptionError(f"epsilon must be above 0 and at most 1, got {epsilon:g}")
        if not 0.0 < delta < math.inf:
            raise OptionError(f"delta must be above 0 and finite, got {delta:g}")
        self.epsilon = epsilon
        self.delta = delta

    @property
    def spec(self) -> str:
        """The words that make this rule."""
        return f"{self.name},epsilon={self.epsilon:g},delta={self.delta:g}"

    def thresholds(self, laws: Tensor) -> Tensor:
        """min(epsilon, delta exp(-H)) of each row; see `ThresholdAcceptance.thresholds`."""
        entropies = torch.special.entr(laws).sum(dim=-1)
        return (-entropies).exp_().mul_(self.delta).clamp_max_(self.epsilon)

    def stays(self, p_x: float, threshold: float) -> bool:
        """Strictly above the threshold."""
        return p_x > threshold
