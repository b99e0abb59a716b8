"""What a process is: a state, one costly function, and the distribution that follows from its value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from truedraft.core import probs as L
from truedraft.core.noise import Purpose
from truedraft.process import rules
from truedraft.process.noise import RoundNoise, StepNoise
from truedraft.process.rules import Gaussian, Judged

Events: TypeAlias = tuple[tuple[str, ...], Tensor, Tensor]
"""Names of events, their probabilities `[rows, events]`, negative where a row has no such event, and whether each came
about, likewise."""
_LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
_QUANTILES = tuple(
    f"{what} below its {level:g} quantile" for what in ("along the draft", "sum", "length") for level in _LEVELS
)


class Process(ABC):
    """A Markov chain whose steps ask one costly function: of several states in one call, if they are known.

    A step from `state` asks `evaluate` at `points`; from what it gives the outcome is drawn, and `moved` makes the next
    state of that. A draft guesses what `evaluate` would give; from a guess a draft is drawn by the same functions. All
    but `evaluate` must be cheap. Derive from `DiscreteSteps`, `GaussianSteps` or `SharedNoise`, which know how a draft
    is judged.

    Every tensor has one row for each state; `steps` `[rows]`, int64, count from 0.

    Attributes:
        by_path: whether paths, and not only their distributions, are the same whatever is drafted.
    """

    by_path: ClassVar[bool] = False

    def points(self, states: Tensor, steps: Tensor, noise: StepNoise) -> Tensor:
        """Where `evaluate` is asked for a step from each state: the states themselves."""
        return states

    @abstractmethod
    def evaluate(self, points: Tensor, steps: Tensor) -> Tensor:
        """The costly function. Rows are independent: what one gives must not hang on the others beside it.

        Returns:
            One row for each point. One with NaN ends its chain, and so does an error that its point raises.
        """

    def same(self, drafted: Tensor, outcomes: Tensor) -> Tensor:
        """Whether drafted states are those that came out, bool `[rows]`, as far as the next steps hang on it."""
        return (drafted == outcomes).flatten(1).all(-1)

    @abstractmethod
    def draw(self, states: Tensor, steps: Tensor, outputs: Tensor, noise: StepNoise, purpose: Purpose) -> Tensor:
        """Outcomes of a step by what `evaluate` gave, or what a draft guesses that it would.

        Args:
            states: that it starts from.
            steps: their numbers.
            outputs: of `evaluate`.
            noise: of the step.
            purpose: what the outcomes are for.
        """

    @abstractmethod
    def judge(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor, drafted: Tensor, noise: StepNoise
    ) -> Judged:
        """Which drafted outcomes stay, and the outcomes of the step, which have the target's distribution.

        Args:
            states: that the step starts from.
            steps: their numbers.
            outputs: of `evaluate`.
            guesses: what the draft took them for.
            drafted: outcomes that were drawn from these.
            noise: of the step.
        """

    def judge_window(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor, drafted: Tensor, noise: RoundNoise
    ) -> Judged:
        """`judge` for several steps in sequence `[depth, chains, ...]`, each as if all before it had stayed."""
        given = states.flatten(0, 1), steps.flatten(), outputs.flatten(0, 1), guesses.flatten(0, 1)
        kept, outcomes = self.judge(*given, drafted.flatten(0, 1), noise.first(len(states)))
        shape = states.shape[:2]
        return kept.unflatten(0, shape), outcomes.unflatten(0, shape)

    def moved(self, states: Tensor, steps: Tensor, outcomes: Tensor) -> Tensor:
        """The states that outcomes lead to: the outcomes themselves."""
        return outcomes

    def events(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor | None, outcomes: Tensor
    ) -> Events:
        """Events of steps whose probabilities the target's distribution gives, for certificates: none.

        Args:
            states: before each step.
            steps: their numbers.
            outputs: of `evaluate`.
            guesses: of the draft, which may choose events, for they hang on nothing that the step draws.
            outcomes: of each.
        """
        return (), outputs[:0], outputs[:0] > 0

    def sound(self, outcomes: Tensor) -> Tensor:
        """Which outcomes are such, bool `[rows]`; a chain with another one ends."""
        return ~torch.isnan(outcomes).flatten(1).any(-1)


class DiscreteSteps(Process):
    """Steps with one of finitely many outcomes, numbers from 0; drafts are judged by rejection."""

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
        """Outcomes that the draft finds less probable than they are, in judged steps; the likeliest one, in all."""
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
    """Steps to a normally distributed state `[rows, size]`, such as those of diffusion samplers and Langevin dynamics.

    Drafts are judged by reflection where both covariances are equal, else by rejection. Acceptance falls with |d|, the
    distance of the means in standard deviations: it is 2 Phi(-|d| / 2).
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
    """Steps that are functions of state, output and the step's own noise; a draft stays where it gives the same state.

    What comes out never hangs on drafts, so the same seed gives the same path with any draft and window.
    """

    by_path: ClassVar[bool] = True

    @abstractmethod
    def next(self, states: Tensor, steps: Tensor, outputs: Tensor, noise: StepNoise) -> Tensor:
        """The next states `[rows, ...]`, by `noise.shared_normal` and `noise.shared_uniform` alone."""

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
        """Step by step, for what drafted states hold beside what `same` compares is only guessed."""
        found, truth = [], states[0]
        for depth in range(len(states)):
            given = outputs[depth], guesses[depth], drafted[depth]
            found.append(self.judge(truth, steps[depth], *given, noise.at(depth)))
            truth = self.moved(truth, steps[depth], found[-1][1])
        kept, outcomes = zip(*found, strict=True)
        return torch.stack(kept), torch.stack(outcomes)
