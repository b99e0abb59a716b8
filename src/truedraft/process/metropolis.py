"""Metropolis-Hastings with a costly density, as a process under shared noise."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from truedraft.process.base import SharedNoise
from truedraft.process.drafts import Draft, Known
from truedraft.process.noise import StepNoise


class MetropolisHastings(SharedNoise):
    """A random walk: to theta' = theta + scale * normal noise with probability min(1, pi(theta') / pi(theta)).

    Speculation is prefetching along the likely branch (Brockwell 2006; Angelino et al. 1403.7265): the draft guesses
    which of theta and theta' comes next, and the density is evaluated at the proposals of several steps at once. Every
    step evaluates one point, because the density at its state is known: a state `[size + 1]` is theta and its log
    density, which `initial` adds.

    Args:
        scale: standard deviations of proposals, one or `[size]`.
    """

    def __init__(self, scale: float | Tensor) -> None:
        self._scale = scale

    @abstractmethod
    def log_density(self, thetas: Tensor) -> Tensor:
        """The costly function: log pi `[rows]` at `[rows, size]`, up to a constant; -inf where pi is 0."""

    def initial(self, thetas: Tensor) -> Tensor:
        """The states `[chains, size + 1]` of chains that begin at thetas `[chains, size]`; calls the density once."""
        return torch.cat([thetas, self.log_density(thetas)[:, None].to(thetas.dtype)], dim=1)

    def points(self, states: Tensor, steps: Tensor, noise: StepNoise) -> Tensor:
        return states[:, :-1] + self._scale * noise.shared_normal(states.shape[1] - 1)

    def evaluate(self, points: Tensor, steps: Tensor) -> Tensor:
        return self.log_density(points)[:, None]

    def next(self, states: Tensor, steps: Tensor, outputs: Tensor, noise: StepNoise) -> Tensor:
        proposed = torch.cat([self.points(states, steps, noise), outputs.to(states.dtype)], dim=1)
        moves = noise.shared_uniform().log() < proposed[:, -1] - states[:, -1]
        return torch.where(moves[:, None], proposed, states)

    def same(self, drafted: Tensor, outcomes: Tensor) -> Tensor:
        """By theta only, because a draft's densities are its own guesses."""
        return super().same(drafted[:, :-1], outcomes[:, :-1])


class Stays(Draft):
    """Guesses that every proposal is rejected: right in most steps if few are accepted, at no cost."""

    def guess(self, states: Tensor, points: Tensor, steps: Tensor, known: Known) -> Tensor:
        return torch.full_like(states[:, -1:], -torch.inf)


class Surrogate(Draft):
    """A faster log density `[rows]` at `[rows, size]`, up to a constant, replaces the costly one in the acceptance."""

    def __init__(self, log_density: Callable[[Tensor], Tensor]) -> None:
        self._log_density = log_density

    def guess(self, states: Tensor, points: Tensor, steps: Tensor, known: Known) -> Tensor:
        before, after = self._log_density(torch.cat([states[:, :-1], points])).chunk(2)
        return states[:, -1:] + (after - before)[:, None]
