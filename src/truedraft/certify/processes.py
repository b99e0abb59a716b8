"""Certification of process runs: e-processes over every step, equal paths, and broken couplings that must be found.

Each step of a run is compared with the target's own distribution after the state before it, by events with a
probability that is known before the step is drawn (`Process.events`). Under shared noise the path itself must be that
of the plain process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.certify.e_process import CERTAIN, EventTests, TestResult
from truedraft.core.noise import Purpose
from truedraft.core.probs import draw
from truedraft.core.theory import holm
from truedraft.errors import OptionError
from truedraft.process import DiscreteSteps, Draft, GaussianSteps, Process, Seen, SharedNoise, speculate
from truedraft.process.noise import StepNoise
from truedraft.process.rules import Judged, reflection

FALSE_ALARM = 1e-3


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """Result of a certificate.

    Attributes:
        same_path: whether every path is that of the plain process; None if only distributions are equal.
    """

    steps: int  # number of tested steps
    accepted: int  # number of accepted drafts among them
    tests: tuple[TestResult, ...]
    p_value: float  # the smallest after Holm's correction, of "every step follows the target"; 1 if paths are compared
    same_path: bool | None = None

    @property
    def holds(self) -> bool:
        return self.p_value >= FALSE_ALARM and self.same_path is not False

    @property
    def certainly_fails(self) -> bool:
        return self.p_value < 1.0 / CERTAIN or self.same_path is False


def certify_process(
    process: Process, states: Tensor, steps: int, *, draft: Draft, windows: Sequence[int] = (1, 4), seed: int = 0
) -> ProcessReport:
    """Run a process with drafts from initial `states` `[chains, ...]`, and test every step of it.

    `windows` are drafted steps per round, one run for each, with its own seed from `seed` on. Raises OptionError for no
    windows, and what ended a chain.
    """
    if not windows:
        raise OptionError("must name one window or more, got none", field="windows")
    tests: EventTests | None = None
    made = accepted = 0

    def look(seen: Seen) -> None:
        nonlocal tests
        names, chances, hits = process.events(seen.states, seen.steps, seen.outputs, seen.guesses, seen.outcomes)
        if names:
            tests = tests or EventTests(names)
            tests.add(chances.double(), hits)

    same: bool | None = None
    for number, window in enumerate(windows):
        own = seed if process.by_path else seed + number
        chains = speculate(process, states, steps, draft=draft, window=window, seed=own, watch=look)
        for error in chains.errors:
            if error is not None:
                raise error
        made, accepted = made + int(chains.at.sum()), accepted + int(chains.accepted.sum())
        if process.by_path:
            plain = speculate(process, states, steps, draft=draft, window=0, seed=own)
            same = same is not False and bool(process.same(chains.states, plain.states).all())
    results = tuple(tests.results()) if tests is not None else ()
    p_value = min(holm([each.p_value for each in results])) if results else 1.0
    return ProcessReport(made, accepted, results, p_value, same)


class WrongAxis(GaussianSteps):
    """Mirrors the noise of a rejected draft along the first axis, not along d. Mix in first.

    Any orthogonal map that takes d to -d would be correct, including the mirror at the origin, but this one is not.
    """

    def judge(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor, drafted: Tensor, noise: StepNoise
    ) -> Judged:
        kept, _ = super().judge(states, steps, outputs, guesses, drafted, noise)
        z = noise.normal(Purpose.DRAFT, states.shape[-1]).clone()
        z[:, 0].neg_()
        mirrored = self.law(states, steps, outputs).at(z)
        return kept, torch.where(kept[:, None], drafted, mirrored)


class AlikeCovariances(GaussianSteps):
    """Uses the draft's covariance as the target's. Mix in first."""

    def judge(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor, drafted: Tensor, noise: StepNoise
    ) -> Judged:
        z, accept = noise.normal(Purpose.DRAFT, states.shape[-1]), noise.uniform(Purpose.ACCEPT)
        return reflection(self.law(states, steps, outputs), self.law(states, steps, guesses), drafted, z, accept)


class GaussianDrawnAgain(GaussianSteps):
    """Draws a rejected step again from the target. Mix in first."""

    def judge(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor, drafted: Tensor, noise: StepNoise
    ) -> Judged:
        kept, _ = super().judge(states, steps, outputs, guesses, drafted, noise)
        again = self.law(states, steps, outputs).at(noise.normal(Purpose.BONUS, states.shape[-1]))
        return kept, torch.where(kept[:, None], drafted, again)


class DiscreteDrawnAgain(DiscreteSteps):
    """Draws a rejected step again from the target. Mix in first."""

    def judge(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor, drafted: Tensor, noise: StepNoise
    ) -> Judged:
        kept, _ = super().judge(states, steps, outputs, guesses, drafted, noise)
        again = draw(self.law(states, steps, outputs), noise.uniform(Purpose.RECOVERED))
        return kept, torch.where(kept, drafted, again)


class SeenNoise(GaussianSteps):
    """Its draft sees the noise of the step: drafts lean in the direction of that noise. Mix in first."""

    def draw(self, states: Tensor, steps: Tensor, outputs: Tensor, noise: StepNoise, purpose: Purpose) -> Tensor:
        drawn = super().draw(states, steps, outputs, noise, purpose)
        if purpose is not Purpose.DRAFT:
            return drawn
        law = self.law(states, steps, outputs)
        z = noise.normal(Purpose.DRAFT, states.shape[-1])
        return torch.where(z.sum(-1, keepdim=True) > 0.0, law.at(1.5 * z), law.at(z))


class AlwaysKept(SharedNoise):
    """Keeps every draft. Mix in first."""

    def judge(
        self, states: Tensor, steps: Tensor, outputs: Tensor, guesses: Tensor, drafted: Tensor, noise: StepNoise
    ) -> Judged:
        return torch.ones(len(drafted), dtype=torch.bool, device=drafted.device), drafted


FAULTS: dict[str, tuple[type[Process], ...]] = {
    "wrong axis": (WrongAxis,),
    "covariances taken as equal": (AlikeCovariances,),
    "a draft that saw the noise": (SeenNoise,),
    "drawn again from the target": (GaussianDrawnAgain, DiscreteDrawnAgain),
    "every draft kept": (AlwaysKept,),
}
"""Broken couplings by their fault, for each kind of process that can have them."""


def planted(process: Process, fault: type[Process]) -> Process:
    """A copy of a process with one of `FAULTS`, as a base class before its own."""
    broken: Callable[..., type[Process]] = type
    made = object.__new__(broken(f"{fault.__name__}{type(process).__name__}", (fault, type(process)), {}))
    vars(made).update(vars(process))
    return made
