"""Root mean square norm, without a module around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RootMeanSquareNorm:
    """x / sqrt(mean(x^2) + eps) * weight along the last axis.

    Attributes:
        weight: `[width]`.
        eps: added to the mean of the squares.
    """

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> RootMeanSquareNorm:
        """From a loaded norm of a Llama-like model."""
        return cls(module.weight.detach(), float(module.variance_epsilon))

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same."""
        return torch.rms_norm(x, self.weight.shape, self.weight, self.eps)
