"""Exact sums of a rule's output distribution on tiny worlds, compared with the target's.

First the rule's kernels, then the shipped batched code at a noise value in every decision cell, up to the rounding of
float64. Seeded and greedy requests: the shipped rule against plain Python, and its distribution in every cell. Over two
tokens a choice depends only on the difference of their Gumbel numbers, which is logistic. So the line of differences
splits into cells, and the probability of an answer is a sum of products of their widths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from truedraft.certify.cells import (
    completed,
    decision_cells,
    kernel_probs,
    mass_that_moves,
    probs_of,
    step_probs,
    verdicts_of,
)
from truedraft.certify.checks import Check, Context, Finding, Part, ReportProgress, Status, share_of
from truedraft.certify.worlds import Case, Choice, Prefix, World, build, case_of, worlds_for
from truedraft.core.noise import KeyedNoise, Noise, Purpose
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.tree import TokenTree
from truedraft.core.verdict import Origin, Verdict
from truedraft.verification import CoupledSampling, Rule
from truedraft.verification.exact import distance, emitted_dist, target_dist

TOLERANCE = 1e-12  # total variation allowed for rounding in float64; measured values are about a thousandth of it
_TOGETHER = 64  # approximate number of proposals that are verified in one batch


class Exact(Check):
    """Checks the stack's rules, for the draw kinds of its drafter, in sums over all random outcomes.

    Coupled draws that the rule does not support are left to the coupled rule, as in engines, which is checked if it
    serves greedy or seeded requests. A lossy rule is measured, at temperature 0 in its greedy form. The shipped code
    runs on the target's device. The check ignores its time limit.

    Raises IncompatibleRuleError if the rule does not judge such draws.
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


_HOST = torch.device("cpu")
_NOISES = 3
_WIDE, _WIDE_CASES = 4099, 48
_MARGIN = 1e-13
"""Distance from a predicted edge at which both sides are probed; a quarter of it bounds the probability between them.
"""

_DRAWN, _FIXED, _REMOVED = (
    tuple(Choice(0, kind, rank) for rank in range(2))
    for kind in (DrawKind.INDEPENDENT, DrawKind.DETERMINISTIC, DrawKind.WITHOUT_REPLACEMENT)
)


@dataclass(frozen=True, slots=True)
class JudgedCase:
    """One request with its expected verdict by plain Python; `noise` is None for a greedy request."""

    case: Case
    noise: KeyedNoise | None
    expected: Verdict

    @property
    def greedy(self) -> bool:
        return self.noise is None


def expected_verdict(case: Case, noise: KeyedNoise | None) -> Verdict:
    """Take argmax(log p + G) or argmax p, the lowest id among equals, and continue below the child with that token."""
    ids, parents = case.proposal.tree.host_ids, case.proposal.tree.shape.parents
    row = 0
    path: list[int] = []
    tokens: list[int] = []
    while True:
        tokens.append(_slow_choice(case.probs[row], noise, len(path)))
        children = [node for node, parent in enumerate(parents) if parent == row - 1]
        carrying = [node for node in children if ids[node] == tokens[-1]]
        if not carrying:
            return Verdict(tuple(path), tuple(tokens), Origin.RECOVERED if children else Origin.BONUS)
        path.append(carrying[0])
        row = carrying[0] + 1


def _slow_choice(p: Tensor, noise: KeyedNoise | None, depth: int) -> int:
    scores = p.tolist() if noise is None else _perturbed(p.tolist(), noise, depth)
    return scores.index(max(scores))


def _perturbed(weights: Sequence[float], noise: Noise, depth: int) -> list[float]:
    gumbel = noise.gumbel(depth, len(weights), _HOST).tolist()
    return [math.log(weight) + g if weight > 0 else -math.inf for weight, g in zip(weights, gumbel, strict=True)]


def judged_cases() -> list[JudgedCase]:
    """Proposals of every kind over three tokens, each under several noises and greedily, in one order for one batch."""
    found = []
    pairs = [(world, case) for world in _listed() for case in world.every_proposal()]
    for number, (world, case) in enumerate(pairs):
        for extra in range(_NOISES):
            noise = KeyedNoise(number, position=7 + extra, step=extra)
            single = Case(case.probability, case.proposal, case.probs.float())
            found.append(_judged(single if extra % 2 else case, noise))
            if (number + extra) % 3 == 0 and world.plans:  # a chain and a tree drafted under the noise that judges
                found += [_judged(drafted_with_noise(world, noise, *size), noise) for size in ((3, 1), (2, 2))]
        logits = torch.log(case.probs) * 3 + 1  # a greedy request depends only on the argmax; exact ties stay ties
        for probs in (case.probs, logits.float(), logits.bfloat16()):
            found.append(_judged(Case(case.probability, case.proposal, probs), None))
    return found


def wide_cases() -> list[JudgedCase]:
    """Chains over thousands of tokens, most of which shipped code does not examine individually; some end early."""
    chance = torch.Generator().manual_seed(1)
    found = []
    for number in range(_WIDE_CASES):
        probs = torch.softmax(2.0 ** (number % 5 - 2) * torch.randn(3, _WIDE, generator=chance), dim=-1)
        noise = KeyedNoise(number, position=3, step=1) if number % 4 else None
        tokens = [_slow_choice(probs[depth], noise, depth) for depth in range(2)]
        tokens[1] = (tokens[1] + (number % 3 == 0)) % _WIDE
        case = Case(1.0, Proposal.deterministic(TokenTree.chain(tokens)), probs)
        found.append(_judged(case, noise))
    return found


def disagreements(rule: Rule, cases: Sequence[JudgedCase], device: torch.device) -> list[tuple[JudgedCase, Verdict]]:
    """Cases in which the rule (its greedy form for greedy requests) differs, with its verdicts."""
    found = []
    for judge, greedy in ((rule, False), (rule.greedy_form, True)):
        own = [each for each in cases if each.greedy is greedy]
        noise = [each.noise or KeyedNoise(0, 0, 0) for each in own]
        verdicts = verdicts_of(judge, [each.case.to(device) for each in own], noise)
        found += [(each, verdict) for each, verdict in zip(own, verdicts, strict=True) if verdict != each.expected]
    return found


def _judged(case: Case, noise: KeyedNoise | None) -> JudgedCase:
    return JudgedCase(case, noise, expected_verdict(case, noise))


def _listed() -> list[World]:
    return [
        build(3, [], "dense", "dense"),
        build(3, [_DRAWN[:1], _DRAWN[:1]], "dense", "dense"),
        build(3, [_DRAWN, _FIXED[:1]], "sparse", "dense", bare=0),
        build(3, [_REMOVED, _FIXED], "varied", "dense"),
        build(3, [_REMOVED, _DRAWN[:1]], "dense", "dense", largest=2),
        *(build(3, [_FIXED] * 2, "dense", "dense", largest=most) for most in (1, 2, 9)),
    ]


def drafted_with_noise(world: World, noise: Noise, depth: int, width: int) -> Case:
    """A tree with the `width` tokens of largest log q + G at each node, computed in plain Python."""
    table = world.drafters[0]
    level: list[Prefix] = [()]
    drawn: dict[Prefix, list[tuple[int, DrawKind, int]]] = {}
    for place in range(depth):
        for path in level:
            scores = _perturbed(table.weights(path), noise, place)
            best = sorted(range(table.vocab), key=lambda token: (-scores[token], token))[:width]
            drawn[path] = [(0, DrawKind.COUPLED, token) for token in best]
        level = [(*path, token) for path in level for _, _, token in drawn[path]]
    return case_of(world, 1.0, drawn)


@dataclass(frozen=True, slots=True)
class _LineNoise:
    differences: Sequence[float]

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> Tensor:
        return torch.tensor([0.0, self.differences[depth]], dtype=torch.float64, device=device)

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        return 0.5  # coupled sampling uses none; a rule that does is found by its answers

    def inside(self, turn: int, depth: int) -> _LineNoise:
        return _LineNoise(self.differences[depth:])


@dataclass(frozen=True, slots=True)
class CoupledAnswers:
    """Totals over the answers in all cells; each cell is probed at three places."""

    proposals: int  # those drafted under the same noise count as one
    cells: int
    distance: float  # largest total variation of answers from the target's distribution
    moved: float  # largest probability of cells in which the answer is not constant


def answer_probs(rule: Rule, device: torch.device) -> CoupledAnswers:
    """The distribution of whole answers over two tokens, continued by the target under the same noise."""
    proposals = cells = 0
    worst = moved = 0.0
    for world in _over_two_tokens():
        expected = target_dist(world.target.probs, world.length)
        drawn = len(world.plans) > 0 and world.plans[0][0].kind is DrawKind.INDEPENDENT
        for case in (*world.every_proposal(), *([None] if drawn else [])):  # None: drafted under the noise that judges
            probs, own_moved, count = _answers(rule, device, world, case)
            proposals, cells = proposals + 1, cells + count
            worst, moved = max(worst, distance(probs, expected)), max(moved, own_moved)
    return CoupledAnswers(proposals, cells, worst, moved)


def _over_two_tokens() -> list[World]:
    worlds = [build(2, [], "dense", "dense")]
    for p, q in (("dense", "dense"), ("varied", "varied")):
        worlds += [
            build(2, [_DRAWN[:1]] * 2, p, q),
            build(2, [_FIXED] * 2, p, q),
            build(2, [_REMOVED, _DRAWN[:1]], p, q),
        ]
    return worlds


def _answers(
    rule: Rule, device: torch.device, world: World, case: Case | None
) -> tuple[dict[Prefix, float], float, int]:
    """The answer's distribution, the probability of cells in which it changes, and the number of cells."""
    tables = [world.target] if case is not None else [world.target, world.drafters[0]]
    lines = [
        _intervals([_edge(table.probs(path)) for path in itertools.product(range(2), repeat=depth) for table in tables])
        for depth in range(world.length)
    ]
    boxes = list(itertools.product(*lines))
    found: list[list[Prefix]] = []
    for place in range(3):
        noise = [_LineNoise([places[place] for _, places in box]) for box in boxes]
        cases = [(case or drafted_with_noise(world, own, world.length - 1, 1)).to(device) for own in noise]
        verdicts = verdicts_of(rule, cases, noise)
        ends = [_continued(world, verdict, own) for verdict, own in zip(verdicts, noise, strict=True)]
        found.append(ends)
    probs: dict[Prefix, float] = {}
    moved = 0.0
    for box, below, middle, above in zip(boxes, *found, strict=True):
        width = math.prod(own for own, _ in box)
        probs[middle] = probs.get(middle, 0.0) + width
        moved += width * (not below == middle == above)
    return probs, moved, len(boxes)


def _continued(world: World, verdict: Verdict, noise: _LineNoise) -> Prefix:
    answer = verdict.tokens
    while len(answer) < world.length:
        answer = (*answer, int(noise.differences[len(answer)] > _edge(world.target.probs(answer))))
    return answer[: world.length]


def _edge(p: Tensor) -> float:
    """Token 1 is chosen if G1 - G0 is above log p0 - log p1, which may be infinite."""
    log_p0, log_p1 = p.log().tolist()
    return float(log_p0 - log_p1)


_END = 60.0  # beyond it lies a probability of 1e-26 on either side


def _intervals(edges: Sequence[float]) -> list[tuple[float, tuple[float, float, float]]]:
    """Cells of the line of differences: the probability of each, and places near its ends and in its middle."""
    ends = [-_END, *sorted({edge for edge in edges if math.isfinite(edge)}), _END]
    return [
        (_logistic(high) - _logistic(low), (low + _MARGIN, (low + high) / 2, high - _MARGIN))
        for low, high in itertools.pairwise(ends)
        if high - low > 4 * _MARGIN
    ]


def _logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))
