"""Interface of a process: a state, one costly function, and the distribution that follows from its output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from truedraft.core import probs as L
from truedraft.core.noise import Purpose
from truedraft.process import rules
from truedraft.process.drafts import Draft, Known
from truedraft.process.noise import RoundNoise, StepNoise
from truedraft.process.rules import Gaussian, Judged

Events: TypeAlias = tuple[tuple[str, ...], Tensor, Tensor]
"""Names of events, their probabilities `[rows, events]` (negative if a row has no such event), and whether each
occurred `[rows, events]`."""
_LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
_QUANTILES = tuple(
    f"{what} below its {level:g} quantile" for what in ("along the draft", "sum", "length") for level in _LEVELS
)


class Process(ABC):
    """A Markov chain with one costly function per step, which can evaluate several known states in one call.

    A step from `state` calls `evaluate` at `points`; the outcome is drawn from the output, and `moved` makes the next
    state from it. A draft guesses the output of `evaluate`; drafted outcomes are drawn from a guess by the same
    functions. Everything but `evaluate` must be fast. Derive from `DiscreteSteps`, `GaussianSteps` or `SharedNoise`,
    which implement the verification of drafts.

    Every tensor has one row for each state; `steps` `[rows]`, int64, count from 0.

    Attributes:
        by_path: whether paths, and not only their distributions, are the same whatever is drafted.
    """

    by_path: ClassVar[bool] = False

    def points(self, states: Tensor, steps: Tensor, noise: StepNoise) -> Tensor:
        """Where `evaluate` is called for a step from each state: the states themselves."""
        return states

    @abstractmethod
    def evaluate(self, points: Tensor, steps: Tensor) -> Tensor:
        """The costly function. Rows must be independent of each other.

        Returns:
            One row for each point. NaN in a row ends its chain, and so does an exception at its point.
        """

    def same(self, drafted: Tensor, outcomes: Tensor) -> Tensor:
        """Whether drafted states equal the outcomes, bool `[rows]`, in all that the next steps depend on."""
        return (drafted == outcomes).flatten(1).all(-1)

    @abstractmethod
    def draw(self, states: Tensor, steps: Tensor, outputs: Tensor, noise: StepNoise, purpose: Purpose) -> Tensor:
        """Draw outcomes of a step from outputs of `evaluate`, or from a draft's guesses of them."""

    @abstractmethod
    def judge(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor, drafted: Tensor, noise: StepNoise
    ) -> Judged:
        """Verify outcomes drafted from guesses; returns which are kept, and outcomes with the target's distribution."""

    def judge_window(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor, drafted: Tensor, noise: RoundNoise
    ) -> Judged:
        """`judge` for several steps in sequence `[depth, chains, ...]`, each as if all before it had been kept."""
        given = states.flatten(0, 1), steps.flatten(), outputs.flatten(0, 1), guesses.flatten(0, 1)
        kept, outcomes = self.judge(*given, drafted.flatten(0, 1), noise.first(len(states)))
        shape = states.shape[:2]
        return kept.unflatten(0, shape), outcomes.unflatten(0, shape)

    def moved(self, states: Tensor, steps: Tensor, outcomes: Tensor) -> Tensor:
        return outcomes

    def events(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor | None, outcomes: Tensor
    ) -> Events:
        """Events with probabilities under the target's distribution, for certificates; they may depend on guesses."""
        return (), outputs[:0], outputs[:0] > 0

    def sound(self, outcomes: Tensor) -> Tensor:
        """Which outcomes are valid, bool `[rows]`; an invalid one ends its chain."""
        return ~torch.isnan(outcomes).flatten(1).any(-1)


class DiscreteSteps(Process):
    """Steps with one of finitely many outcomes, numbered from 0; drafts are verified by rejection sampling."""

    @abstractmethod
    def law(self, states: Tensor, steps: Tensor, outputs: Tensor) -> Tensor:
        """The distributions of the outcomes `[rows, outcomes]`, float64, each summing to 1."""

    def draw(self, states: Tensor, steps: Tensor, outputs: Tensor, noise: StepNoise, purpose: Purpose) -> Tensor:
        law = self.law(states, steps, outputs)
        outcomes = L.draw(law, noise.uniform(purpose))
        return torch.where(outcomes < law.shape[-1], outcomes, -1)

    def judge(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor, drafted: Tensor, noise: StepNoise
    ) -> Judged:
        p, q = self.law(states, steps, outputs), self.law(states, steps, guesses)
        accept, again = noise.uniform(Purpose.ACCEPT), noise.uniform(Purpose.RECOVERED)
        kept, outcomes = rules.discrete(p, q, drafted, accept, again)
        return kept, torch.where(outcomes < p.shape[-1], outcomes, -1)

    def events(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor | None, outcomes: Tensor
    ) -> Events:
        """The most likely outcome, in all steps; outcomes to which the draft gives too little, in verified steps."""
        p = self.law(states, steps, outputs)
        top = p.argmax(-1)
        chances, hits = [p.gather(1, top[:, None])[:, 0]], [outcomes == top]
        if guesses is None:
            chances, hits = [*chances, torch.full_like(chances[0], -1.0)], [*hits, hits[0]]
        else:
            favoured = p > self.law(states, steps, guesses)
            chances, hits = [*chances, (p * favoured).sum(-1)], [*hits, favoured.gather(1, outcomes[:, None])[:, 0]]
        return ("likeliest outcome", "outcomes that the draft neglects"), torch.stack(chances, 1), torch.stack(hits, 1)

    def sound(self, outcomes: Tensor) -> Tensor:
        return outcomes >= 0


class GaussianSteps(Process):
    """Steps to a normally distributed state `[rows, size]`, as in diffusion samplers and Langevin dynamics.

    Drafts are verified by reflection if both covariances are equal, otherwise by rejection. Acceptance falls with |d|,
    the distance of the means in standard deviations: it is 2 Phi(-|d| / 2).
    """

    @abstractmethod
    def law(self, states: Tensor, steps: Tensor, outputs: Tensor) -> Gaussian:
        """The distributions of the next states."""

    def draw(self, states: Tensor, steps: Tensor, outputs: Tensor, noise: StepNoise, purpose: Purpose) -> Tensor:
        return self.law(states, steps, outputs).at(noise.normal(purpose, states.shape[-1]))

    def judge(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor, drafted: Tensor, noise: StepNoise
    ) -> Judged:
        size = states.shape[-1]
        return rules.gaussian(
            self.law(states, steps, outputs),
            self.law(states, steps, guesses),
            drafted,
            noise.normal(Purpose.DRAFT, size),
            noise.uniform(Purpose.ACCEPT),
            lambda number, rows: noise.attempt(number, rows, size),
        )

    def events(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor | None, outcomes: Tensor
    ) -> Events:
        """Quantiles of v = L^-1 (outcome - m_p), which is standard normal: along the draft's mean, along all
        coordinates, and of its length; the probability integral transform of each step."""
        p = self.law(states, steps, outputs)
        v = p.whitened(outcomes - p.mean)
        size = v.shape[-1]
        across = v.sum(-1) / size**0.5
        if guesses is None:
            along, judged = across, torch.zeros_like(across)
        else:
            d = p.whitened(self.law(states, steps, guesses).mean - p.mean)
            judged = (d.norm(dim=-1) > 0.0) & torch.isfinite(d).all(-1)
            along = (v * torch.nan_to_num(d / d.norm(dim=-1, keepdim=True))).sum(-1)
        length = torch.special.gammainc(torch.full_like(across, size / 2.0), v.square().sum(-1) / 2.0)
        uniform = torch.stack([torch.special.ndtr(along), torch.special.ndtr(across), length], 1)
        levels = torch.tensor(_LEVELS, dtype=uniform.dtype, device=uniform.device)
        chances = levels.repeat(len(v), 3)
        chances[:, : len(_LEVELS)].masked_fill_(~judged.bool()[:, None], -1.0)
        chances.masked_fill_(~torch.isfinite(v).all(-1, keepdim=True), -1.0)
        return _QUANTILES, chances, (uniform[:, :, None] < levels).flatten(1)

    def sound(self, outcomes: Tensor) -> Tensor:
        return torch.isfinite(outcomes).all(-1)


class SharedNoise(Process):
    """Steps that are functions of state, output and the step's own noise; a draft is kept if it gives the same state.

    Outcomes never depend on drafts, so the same seed gives the same path with any draft and window.
    """

    by_path: ClassVar[bool] = True

    @abstractmethod
    def next(self, states: Tensor, steps: Tensor, outputs: Tensor, noise: StepNoise) -> Tensor:
        """The next states `[rows, ...]`, using only `noise.shared_normal` and `noise.shared_uniform`."""

    def draw(self, states: Tensor, steps: Tensor, outputs: Tensor, noise: StepNoise, purpose: Purpose) -> Tensor:
        return self.next(states, steps, outputs, noise)

    def judge(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor, drafted: Tensor, noise: StepNoise
    ) -> Judged:
        outcomes = self.next(states, steps, outputs, noise)
        return self.same(drafted, outcomes), outcomes

    def judge_window(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor, drafted: Tensor, noise: RoundNoise
    ) -> Judged:
        """Step by step, because the parts of drafted states that `same` does not compare are only guesses."""
        found, truth = [], states[0]
        for depth in range(len(states)):
            given = outputs[depth], guesses[depth], drafted[depth]
            found.append(self.judge(truth, steps[depth], *given, noise.at(depth)))
            truth = self.moved(truth, steps[depth], found[-1][1])
        kept, outcomes = zip(*found, strict=True)
        return torch.stack(kept), torch.stack(outcomes)


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
