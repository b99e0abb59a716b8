"""Exact sums of a rule's output distribution on tiny worlds, compared with the target's.

First the rule's kernels, then the shipped batched code at a noise value in every decision cell, up to the rounding of
float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from truedraft.certify.cells import (
    completed,
    decision_cells,
    kernel_probs,
    mass_that_moves,
    probs_of,
    step_probs,
)
from truedraft.certify.checks import Check, Context, Finding, Part, ReportProgress, Status, share_of
from truedraft.certify.coupled_cells import JudgedCase, answer_probs, disagreements, judged_cases, wide_cases
from truedraft.certify.worlds import Case, World, worlds_for
from truedraft.core.proposal import DrawKind
from truedraft.core.verdict import Verdict
from truedraft.verification import CoupledSampling, Rule
from truedraft.verification.exact import distance, emitted_dist, target_dist

TOLERANCE = 1e-12
"""Total variation allowed for rounding in float64; measured values are about a thousandth of it."""
_TOGETHER = 64
"""Approximate number of proposals that are verified in one batch."""


class Exact(Check):
    """Checks the stack's rules, for the draw kinds of its drafter, in sums over all random outcomes.

    Coupled draws that the rule does not support are left to the coupled rule, as in engines, which is checked if it
    serves greedy or seeded requests. A lossy rule is measured, at temperature 0 in its greedy form. The shipped code
    runs on the target's device. The check ignores its time limit.

    Raises:
        IncompatibleRuleError: the rule does not support such draws.
    """

    part = Part.EXACT

    def run(self, context: Context) -> list[Finding]:
        stack, params = context.stack, context.params
        rule = stack.rule if stack.rule.lossless or not params.greedy else stack.rule.greedy_form
        kinds = stack.drafter.kinds_for(rule.judges)
        own = kinds if DrawKind.COUPLED in rule.judges else kinds - {DrawKind.COUPLED}
        rule.check(own, "to be certified")
        worlds = worlds_for(own)
        jobs: list[Callable[[ReportProgress], list[Finding]]] = []
        if rule.coupled:
            comparing: Rule | None = rule
        else:
            compares = params.seeded or (params.greedy and stack.rule.lossless)
            comparing = (stack.coupled_rule or CoupledSampling()) if compares else None
            if rule.lossless:
                jobs.append(lambda report: [_kernel(rule, worlds, report)])
            batched = _shipped if rule.lossless else _lossy
            jobs.append(lambda report: [batched(rule, worlds, stack.target.device, report)])
        if comparing is not None:
            jobs.append(lambda report: [_kernel(comparing, worlds, report, "coupled ")])
            jobs.append(lambda report: _coupled(comparing, stack.target.device, report))
        findings = []
        for number, job in enumerate(jobs):
            findings += job(share_of(context.tell, number, len(jobs)))
            context.tell((number + 1) / len(jobs))  # also if a failure ended it early
        return findings


# ---------------------------------------------------------------------------------------- kernels


def _kernel(rule: Rule, worlds: Sequence[World], report: ReportProgress, prefix: str = "") -> Finding:
    answers, worst = 0, _Largest()
    for number, world in enumerate(worlds):
        expected = target_dist(world.target.probs, world.length)
        worst.see(distance(emitted_dist(rule, world.target.probs, world.scheme, world.length), expected), world)
        answers += len(expected)
        report((number + 1) / len(worlds))
    summary = f"{len(worlds)} worlds, {answers:,} answers, largest distance {worst.distance:.1e}{worst.where}"
    facts = {"worlds": len(worlds), "answers": answers, **worst.facts("distance")}
    return Finding(Part.EXACT, f"{prefix}kernel", _status(worst.distance), summary, facts)


# ---------------------------------------------------------------------------------------- shipped code


@dataclass(slots=True)
class _Largest:
    distance: float = 0.0
    world: World | None = None

    @property
    def fails(self) -> bool:
        return not self.distance < TOLERANCE

    @property
    def where(self) -> str:
        return f" ({self.world.name})" if self.world is not None and self.fails else ""

    def see(self, distance: float, world: World) -> None:
        # NaN is the worst value, and must not be lost in a comparison.
        if not distance <= self.distance:
            self.distance, self.world = distance, world

    def facts(self, name: str) -> dict[str, Any]:
        return {f"largest_{name}": self.distance, **({"world": self.world.name} if self.fails and self.world else {})}


Listed = tuple[World, list[Case]]


@dataclass(slots=True)
class _Judged:
    """Totals of judging proposals in every cell."""

    rule: Rule
    device: torch.device
    proposals: int = 0
    cells: int = 0
    kernel: _Largest = field(default_factory=_Largest)  # distance from the kernels' verdicts
    target: _Largest = field(default_factory=_Largest)  # distance of continued answers from it
    moved: _Largest = field(default_factory=_Largest)  # share of noise where the verdict changes
    distances: list[float] = field(default_factory=list)
    compared: int = 0  # proposals with a verdict distribution that the kernels determine

    def worlds(self, worlds: Sequence[World], tell: ReportProgress) -> Iterator[int]:
        done = 0
        for batch in _batches(worlds):
            self._judge(batch)
            done += len(batch)
            tell(done / len(worlds))
            yield done

    def _judge(self, batch: Sequence[Listed]) -> None:
        cases = [case for _, own in batch for case in own]
        cells = decision_cells(self.rule, cases, self.device)
        probs = iter(probs_of(cells, len(cases)))
        self.proposals, self.cells = self.proposals + len(cases), self.cells + len(cells)
        self.moved.see(mass_that_moves(self.rule, cases, cells, self.device), batch[0][0])
        for world, listed in batch:
            own = list(itertools.islice(probs, len(listed)))
            for case, found in zip(listed, own, strict=True):
                if _composes(self.rule, case):
                    self.compared += 1
                    self.kernel.see(distance(found, kernel_probs(self.rule, case)), world)
            answers = completed(step_probs(listed, own), world.target.probs, world.length)
            self.distances.append(distance(answers, target_dist(world.target.probs, world.length)))
            self.target.see(self.distances[-1], world)

    @property
    def counted(self) -> str:
        return f"{self.proposals:,} proposals, {self.cells:,} cells"

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "proposals": self.proposals,
            "cells": self.cells,
            "distance_from_kernel": self.kernel.distance,
            "distance_from_target": self.target.distance,
            "noise_in_broken_cells": self.moved.distance,
            "tolerance": TOLERANCE,
        }


def _shipped(rule: Rule, worlds: Sequence[World], device: torch.device, report: ReportProgress) -> Finding:
    name, judged = "batched code, every decision cell", _Judged(rule, device)
    parts = (judged.kernel, judged.target, judged.moved)
    for done in judged.worlds(worlds, report):
        if any(part.fails for part in parts):
            return Finding(Part.EXACT, name, Status.FAILS, _what_failed(judged), {**judged.facts, "worlds": done})
    largest = max(part.distance for part in parts)
    facts = {**judged.facts, "worlds": len(worlds), "largest_distance": largest}
    return Finding(Part.EXACT, name, Status.HOLDS, f"{judged.counted}, largest distance {largest:.1e}", facts)


def _what_failed(judged: _Judged) -> str:
    said = [f"distance {judged.target.distance:.2g} from the target's distribution{judged.target.where}"]
    said.append(f"{judged.kernel.distance:.2g} from the kernel's{judged.kernel.where}")
    if judged.moved.fails:
        said.append(f"{judged.moved.distance:.2g} of the noise is in cells where verdicts differ")
    return f"{judged.counted}, stopped there: {', '.join(said)}"


def _batches(worlds: Sequence[World]) -> Iterator[list[Listed]]:
    for _, group in itertools.groupby(worlds, key=lambda world: world.target.vocab):
        batch: list[Listed] = []
        for world in group:
            batch.append((world, world.every_proposal()))
            if sum(len(cases) for _, cases in batch) >= _TOGETHER:
                yield batch
                batch = []
        if batch:
            yield batch


def _composes(rule: Rule, case: Case) -> bool:
    """Whether the kernels determine the verdict distribution: not if a rule chooses among whole paths."""
    if rule.by_groups:
        return True
    children = case.proposal.tree.shape.children
    return not any(children[node + 1] for nodes in children if len(nodes) > 1 for node in nodes)


# ---------------------------------------------------------------------------------------- lossy rules


def _lossy(rule: Rule, worlds: Sequence[World], device: torch.device, report: ReportProgress) -> Finding:
    name, judged = "distance on tiny worlds", _Judged(rule, device)
    drafted = [world for world in worlds if world.plans] or worlds
    for _ in judged.worlds(drafted, report):
        pass
    if judged.kernel.fails or judged.moved.fails:
        return Finding(Part.EXACT, name, Status.FAILS, _what_failed(judged), judged.facts)
    mean = sum(judged.distances) / max(1, len(judged.distances))
    summary = (
        f"{judged.counted}: answers of up to {max(world.length for world in drafted)} tokens are "
        f"{mean:.2g} from the target's distribution in the mean of {len(drafted)} worlds, "
        f"{judged.target.distance:.2g} at most; verdicts are within {judged.kernel.distance:.1e} of the kernel's "
        f"distribution where that can be composed ({judged.compared:,} proposals)"
    )
    facts = {**judged.facts, "worlds": len(drafted), "mean_distance": mean, "compared_with_kernel": judged.compared}
    return Finding(Part.EXACT, name, Status.MEASURED, summary, facts)


# ---------------------------------------------------------------------------------------- coupled and greedy


def _coupled(rule: Rule, device: torch.device, report: ReportProgress) -> list[Finding]:
    cases, otherwise = [], []
    for number, some in enumerate((judged_cases(), wide_cases())):  # one vocabulary in a batch
        cases += some
        otherwise += disagreements(rule, some, device)
        report((number + 1) / 4)
    sampled, greedy = (
        _followed(
            name, sum(each.greedy is own for each in cases), [each for each in otherwise if each[0].greedy is own]
        )
        for name, own in (("coupled walks", False), ("greedy walks", True))
    )
    answers = answer_probs(rule, device)
    largest = max(answers.distance, answers.moved)
    facts = {
        "proposals": answers.proposals,
        "cells": answers.cells,
        "largest_distance": largest,
        "tolerance": TOLERANCE,
    }
    summary = f"{answers.proposals:,} proposals, {answers.cells:,} cells, largest distance {largest:.1e}"
    dist = Finding(Part.EXACT, "coupled distribution, every cell", _status(largest), summary, facts)
    return [sampled, dist, greedy]


def _followed(name: str, cases: int, otherwise: Sequence[tuple[JudgedCase, Verdict]]) -> Finding:
    facts: dict[str, Any] = {"walks": cases, "otherwise": len(otherwise)}
    if not otherwise:
        return Finding(Part.EXACT, name, Status.HOLDS, f"{cases:,} walks, every one as it must be", facts)
    case, verdict = otherwise[0]
    facts |= {"expected": list(case.expected.tokens), "emitted": list(verdict.tokens)}
    summary = (
        f"{len(otherwise):,} of {cases:,} walks are judged otherwise; the first emits {facts['emitted']} and must emit "
        f"{facts['expected']}, {len(verdict.path)} and {len(case.expected.path)} of them accepted"
    )
    return Finding(Part.EXACT, name, Status.FAILS, summary, facts)


def _status(distance: float) -> Status:
    return Status.HOLDS if distance < TOLERANCE else Status.FAILS
