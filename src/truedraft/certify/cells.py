"""The verdict distribution of a shipped rule, measured at one noise value in each of its decision cells.

A verdict is a piecewise constant function of the step's uniform numbers. `decision_cells` finds where each decision
flips, and multiplies the widths of the cells. Where the kernels predict a flip it probes on both sides; if the flip is
not there it bisects. So the result is what the rule does, whatever its kernels predict.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from truedraft.certify.worlds import Case, Prefix
from truedraft.core.noise import Noise, Purpose
from truedraft.core.verdict import Origin, Verdict
from truedraft.verification import Rule
from truedraft.verification.rule import DrawnToken, JudgedRow, Outcome

Key = tuple[Purpose, int, int]  # purpose, depth and index of a decision
Script = dict[Key, float]
VerdictProbs = dict[Verdict, float]
BELOW_ONE = 1.0 - 2.0**-53
NEAR = 2e-15  # largest distance of a flip from its predicted place: a few roundings of float64


class ScriptedNoise:
    """Scripted numbers, with a record of the keys. By default, other keys reject whatever may be rejected."""

    def __init__(self, script: Script, elsewhere: Callable[[Key], float] | None = None) -> None:
        self.script = dict(script)
        self.requested: list[Key] = []
        self._elsewhere = elsewhere or (lambda key: BELOW_ONE if key[0] is Purpose.ACCEPT else 0.5)

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        key = (purpose, depth, index)
        self.requested.append(key)
        if key not in self.script:
            self.script[key] = self._elsewhere(key)
        return self.script[key]

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> Tensor:
        raise AssertionError("this rule needs no Gumbel noise")

    def inside(self, turn: int, depth: int) -> Noise:
        raise AssertionError("a rule has no noise one level down")


def verdicts_of(rule: Rule, cases: Sequence[Case], noise: Sequence[Noise]) -> list[Verdict]:
    """One batched call of the shipped `verify`."""
    return rule.verify([case.proposal for case in cases], [case.probs for case in cases], noise)


def outcomes_of(rule: Rule, case: Case, group: Sequence[int]) -> list[Outcome]:
    """The kernel's outcomes for tree rows that are judged together."""
    return rule.outcomes([_judged(case, row) for row in group])


def _judged(case: Case, row: int) -> JudgedRow:
    proposal, p = case.proposal, case.probs[row]
    drawn = []
    for draw in proposal.draws[row]:
        token = proposal.tree.host_ids[draw.child]
        if draw.dist < 0:
            q = torch.zeros_like(p)
            q[token] = 1.0
        else:
            assert proposal.probs is not None
            q = proposal.probs[draw.dist]
        drawn.append(DrawnToken(token, draw.dist, q, draw.kind))
    return JudgedRow(p, tuple(drawn))


def kernel_probs(rule: Rule, case: Case) -> VerdictProbs:
    """The verdict distribution for one proposal, composed from the rule's kernels by an independent tree walk."""
    probs: VerdictProbs = {}
    ids, draws = case.proposal.tree.host_ids, case.proposal.draws

    def visit(row: int, path: Prefix, mass: float) -> None:
        group = rule.group(case.proposal, row)
        for outcome in outcomes_of(rule, case, group):
            share = mass * outcome.probability
            if share <= 0.0:
                continue
            below = path
            for judged, token in zip(group, outcome.tokens[: outcome.accepted], strict=False):
                below = (*below, next(draw.child for draw in draws[judged] if ids[draw.child] == token))
            if outcome.continues:
                visit(below[-1] + 1, below, share)
                continue
            end = below[-1] + 1 if below else 0
            final = Origin.RECOVERED if draws[end] else Origin.BONUS
            verdict = Verdict(below, (*(ids[node] for node in below), outcome.tokens[-1]), final)
            probs[verdict] = probs.get(verdict, 0.0) + share

    visit(0, (), 1.0)
    return probs


def step_probs(cases: Sequence[Case], probs: Sequence[VerdictProbs]) -> dict[tuple[Prefix, int], float]:
    """Over all proposals of a world: the distribution of (emitted tokens, accepted count) of one step."""
    found: dict[tuple[Prefix, int], float] = {}
    for case, verdicts in zip(cases, probs, strict=True):
        for verdict, mass in verdicts.items():
            key = verdict.tokens, len(verdict.path)
            found[key] = found.get(key, 0.0) + case.probability * mass
    return found


def completed(
    step: dict[tuple[Prefix, int], float], target: Callable[[Prefix], Tensor], length: int
) -> dict[Prefix, float]:
    """The distribution of `length` tokens if the target continues after the step."""
    found: dict[Prefix, float] = {}

    def extend(answer: Prefix, mass: float) -> None:
        if len(answer) >= length:
            found[answer[:length]] = found.get(answer[:length], 0.0) + mass
            return
        for token, p in enumerate(target(answer).tolist()):
            if p > 0.0:
                extend((*answer, token), mass * p)

    for (answer, _), mass in step.items():
        extend(answer, mass)
    return found


@dataclass(frozen=True, slots=True)
class Cell:
    """A box of uniform numbers with a constant verdict; `sides` are the bounds of each decision, `mass` the volume."""

    case: int
    sides: dict[Key, tuple[float, float]]
    mass: float
    verdict: Verdict


@dataclass(slots=True)
class _Edge:
    case: int
    script: Script
    key: Key
    flipped: Callable[[Verdict], bool]
    guess: float
    place: float = 0.0


def decision_cells(rule: Rule, cases: Sequence[Case], device: torch.device | None = None) -> list[Cell]:
    """All cells of proposals over one vocabulary, judged together on `device` (None keeps theirs)."""
    there = cases if device is None else [case.to(device) for case in cases]
    found: list[Cell] = []
    front = [Cell(i, {}, 1.0, Verdict((), (), Origin.BONUS)) for i in range(len(cases))]
    edges_of = _predictor(rule, cases)
    while front:
        scripts = [{key: (low + high) / 2 for key, (low, high) in cell.sides.items()} for cell in front]
        verdicts = verdicts_of(rule, [there[cell.case] for cell in front], list(map(ScriptedNoise, scripts)))
        still: list[tuple[Cell, Key, list[_Edge]]] = []
        for cell, script, verdict in zip(front, scripts, verdicts, strict=True):
            decided = decisions(rule, cases[cell.case], verdict)
            key = next((key for key in decided if key not in cell.sides), None)
            if key is None:
                found.append(Cell(cell.case, cell.sides, cell.mass, verdict))
            else:
                still.append((cell, key, edges_of(cell.case, script, key, verdict)))
        _find(rule, there, [edge for _, _, edges in still for edge in edges])
        front = [
            Cell(cell.case, {**cell.sides, key: (low, high)}, cell.mass * (high - low), cell.verdict)
            for cell, key, edges in still
            for low, high in itertools.pairwise([0.0, *(edge.place for edge in edges), 1.0])
            if high - low > 4 * NEAR
        ]
    return found


def probs_of(cells: Sequence[Cell], cases: int) -> list[VerdictProbs]:
    """The verdict distribution of each case, from its cells."""
    probs: list[VerdictProbs] = [{} for _ in range(cases)]
    for cell in cells:
        probs[cell.case][cell.verdict] = probs[cell.case].get(cell.verdict, 0.0) + cell.mass
    return probs


def mass_that_moves(
    rule: Rule, cases: Sequence[Case], cells: Sequence[Cell], device: torch.device | None = None
) -> float:
    """Largest share of a case's noise in cells where the verdict varies: 0 if each decision has its own number."""
    chance = random.Random(len(cells))
    there = cases if device is None else [case.to(device) for case in cases]
    noise = []
    for cell in cells:
        script = {key: chance.uniform(low + 2 * NEAR, high - 2 * NEAR) for key, (low, high) in cell.sides.items()}
        noise.append(ScriptedNoise(script, lambda key: chance.random()))
    moved = [0.0] * len(cases)
    for cell, verdict in zip(cells, verdicts_of(rule, [there[cell.case] for cell in cells], noise), strict=True):
        moved[cell.case] += cell.mass * (verdict != cell.verdict)
    return max(moved, default=0.0)


def _find(rule: Rule, cases: Sequence[Case], edges: Sequence[_Edge]) -> None:
    def probe(of: Sequence[_Edge], places: Sequence[float]) -> list[bool]:
        if not of:
            return []
        noise = [ScriptedNoise({**edge.script, edge.key: place}) for edge, place in zip(of, places, strict=True)]
        verdicts = verdicts_of(rule, [cases[edge.case] for edge in of], noise)
        return [edge.flipped(verdict) for edge, verdict in zip(of, verdicts, strict=True)]

    below = probe(edges, [max(edge.guess - NEAR, 0.0) for edge in edges])
    above = probe(edges, [min(edge.guess + NEAR, BELOW_ONE) for edge in edges])
    lost = []
    for edge, low, high in zip(edges, below, above, strict=True):
        edge.place = edge.guess
        if low and edge.guess <= NEAR:
            edge.place = 0.0
        elif not high and edge.guess >= 1.0 - NEAR:
            edge.place = 1.0
        elif low or not high:
            lost.append(edge)
    first, last = probe(lost, [0.0] * len(lost)), probe(lost, [BELOW_ONE] * len(lost))
    between = []
    for edge, low, high in zip(lost, first, last, strict=True):
        edge.place = 0.0 if low else 1.0
        if high and not low:
            between.append(edge)
    lows, highs = [0.0] * len(between), [1.0] * len(between)
    for _ in range(54 if between else 0):
        middles = [(low + high) / 2 for low, high in zip(lows, highs, strict=True)]
        for i, beyond in enumerate(probe(between, middles)):
            (highs if beyond else lows)[i] = middles[i]
    for edge, place in zip(between, highs, strict=True):
        edge.place = place


def decisions(rule: Rule, case: Case, verdict: Verdict) -> list[Key]:
    """The keys of the numbers that led to a verdict, in the order in which they decide."""
    draws, kept = case.proposal.draws, len(verdict.path)
    keys: list[Key] = []
    for depth, group in _walked(rule, case, verdict):
        if rule.joins(draws[group[0]]):  # the longest prefix first
            shortest = min(max(kept - depth, 1), len(group))
            keys += [(Purpose.ACCEPT, depth + length - 1, 0) for length in range(len(group), shortest - 1, -1)]
            continue
        for index, draw in enumerate(draws[group[0]]):
            keys.append((Purpose.ACCEPT, depth, index))
            if kept > depth and draw.child == verdict.path[depth]:
                break
    return [*keys, (Purpose.RECOVERED if verdict.final is Origin.RECOVERED else Purpose.BONUS, kept, 0)]


def _walked(rule: Rule, case: Case, verdict: Verdict) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The groups on the path of a verdict, each with the depth of its first tree row."""
    depth = row = 0
    while True:
        group = rule.group(case.proposal, row)
        yield depth, group
        depth += len(group)
        if depth > len(verdict.path):
            return
        row = verdict.path[depth - 1] + 1


def _predictor(rule: Rule, cases: Sequence[Case]) -> Callable[[int, Script, Key, Verdict], list[_Edge]]:
    """A function to the edges of a decision, from a case, the numbers before it, its key and a verdict."""
    kernel = cache(lambda index: kernel_probs(rule, cases[index]))

    @cache
    def final(index: int, path: Prefix) -> list[float]:
        found = [0.0] * cases[index].probs.shape[-1]
        for verdict, mass in kernel(index).items():
            if verdict.path == path:
                found[verdict.tokens[-1]] += mass
        left = sum(found)
        return [mass / left for mass in found] if left else found

    @cache
    def accepting(index: int, group: tuple[int, ...]) -> list[float]:
        """The number below which each decision accepts after all earlier ones rejected; later ones may be missing."""
        outcomes = outcomes_of(rule, cases[index], group)
        accepted = [outcome for outcome in outcomes if outcome.accepted]
        left = sum(outcome.probability for outcome in outcomes if not outcome.accepted)
        # One decision accepts one draw of a tree row, or a prefix of a longer group with any token after it.
        single = not rule.joins(cases[index].proposal.draws[group[0]])
        found: list[float] = []
        for _, same in itertools.groupby(reversed(accepted), key=id if single else lambda each: each.accepted):
            mass = sum(outcome.probability for outcome in same)
            left += mass
            found.insert(0, mass / left if left > 0.0 else 0.0)
        return found

    def ends_above(token: int) -> Callable[[Verdict], bool]:
        return lambda verdict: verdict.tokens[-1] > token

    def edges(index: int, script: Script, key: Key, verdict: Verdict) -> list[_Edge]:
        purpose, depth, number = key
        if purpose is not Purpose.ACCEPT:
            places = itertools.accumulate(final(index, verdict.path)[:-1])
            return [_Edge(index, script, key, ends_above(token), min(each, 1.0)) for token, each in enumerate(places)]
        draws = cases[index].proposal.draws
        walked = _walked(rule, cases[index], verdict)
        start, group = next(each for each in walked if each[0] <= depth < each[0] + len(each[1]))
        child = draws[group[depth - start]][number].child
        accepts = accepting(index, group)
        # In a group of several tree rows the longest prefix decides first.
        place = len(group) - 1 - (depth - start) if rule.joins(draws[group[0]]) else number
        guess = accepts[place] if place < len(accepts) else 0.5
        return [_Edge(index, script, key, lambda verdict: verdict.path[depth : depth + 1] != (child,), guess)]

    return edges
