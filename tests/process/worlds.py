"""Small processes whose steps can be followed by hand; rows are computed alike in batches of all sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from truedraft.process import Cheaper, DiscreteSteps, Gaussian, GaussianSteps, MetropolisHastings


class Letters(DiscreteSteps):
    """A Markov chain of four letters; the draft knows a flatter table."""

    table = torch.tensor(
        [[0.5, 0.2, 0.2, 0.1], [0.0, 0.6, 0.3, 0.1], [0.3, 0.3, 0.0, 0.4], [0.1, 0.1, 0.7, 0.1]], dtype=torch.float64
    )

    def evaluate(self, points: Tensor, steps: Tensor) -> Tensor:
        return self.table[points]

    def law(self, states: Tensor, steps: Tensor, outputs: Tensor) -> Tensor:
        return outputs

    draft = Cheaper(lambda points, steps: 0.5 * Letters.table[points] + 0.125)
    start = torch.zeros(6, dtype=torch.int64)


class Wells(GaussianSteps):
    """Langevin dynamics in two wells along each coordinate.

    Args:
        size: of a state.
        spread: factor on deviations, by the output's second half where it is not None.
    """

    def __init__(self, size: int = 2, step: float = 0.1, spread: float = 0.0) -> None:
        self.size, self.step, self.spread = size, step, spread

    def evaluate(self, points: Tensor, steps: Tensor) -> Tensor:
        return points - points * points * points

    def law(self, states: Tensor, steps: Tensor, outputs: Tensor) -> Gaussian:
        deviation = (2 * self.step) ** 0.5 * torch.exp(self.spread * torch.tanh(outputs))
        return Gaussian(states + self.step * outputs, deviation)

    def start(self, chains: int = 5) -> Tensor:
        return torch.linspace(-1, 1, chains * self.size, dtype=torch.float64).view(chains, self.size)


class Walk(MetropolisHastings):
    """A random walk on a normal density, written so that rows are independent of each other to the bit."""

    def log_density(self, thetas: Tensor) -> Tensor:
        total = thetas.new_zeros(len(thetas))
        for coordinate in thetas.unbind(-1):
            total = total - 0.5 * coordinate * coordinate
        return total


class Failing(Wells):
    """Fails at states beyond a bound: raises, or answers NaN."""

    def __init__(self, bound: float, raises: bool) -> None:
        super().__init__()
        self.bound, self.raises = bound, raises

    def evaluate(self, points: Tensor, steps: Tensor) -> Tensor:
        beyond = (points.abs() > self.bound).any(-1)
        if self.raises and beyond.any():
            raise RuntimeError(f"no force at {points[beyond][0].tolist()}")
        return super().evaluate(points, steps).masked_fill(beyond[:, None], torch.nan)
