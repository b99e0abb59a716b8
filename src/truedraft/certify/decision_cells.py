"""The law of what a shipped rule answers, measured one noise value per decision cell.

A verdict is a piecewise constant function of the step's uniform numbers. `decision_cells` judges batches with scripted
noise, finds where each decision flips, and multiplies the widths of the cells. Where the kernels say that a decision
flips, it probes just below and just above; only if the flip is not there does it bisect. So the answer is what the
rule does, whatever its kernels say.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from truedraft.certify.verdict_laws import VerdictLaw, group_kernel, is_joint, kernel_law, node_kernel
from truedraft.certify.worlds import Case
from truedraft.core import transfers
from truedraft.core.noise import Purpose
from truedraft.core.verdicts import Origin, Verdict
from truedraft.errors import TruedraftError
from truedraft.verification import Rule
from truedraft.verification.deferred import DeferredRule

Key = tuple[Purpose, int, int]
"""Purpose, depth and index of a decision."""
Script = dict[Key, float]
Answer = tuple[Verdict, list[Key]]
"""A verdict, and the keys of the decisions that led to it, in order."""
BELOW_ONE = 1.0 - 2.0**-53
NEAR = 2e-15
"""How near to the predicted place a decision must flip: a few roundings of float64."""


class KeyReusedError(TruedraftError):
    """A rule let one number decide twice, which biases the law of the answer."""


class ScriptedNoise:
    """Answers from a script, 0.5 elsewhere, and writes down what was asked; no key may be asked twice.

    Raises:
        KeyReusedError: when one is.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[Key] = []

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        """The script's number for a key."""
        key = (purpose, depth, index)
        if key in self.asked:
            raise KeyReusedError(f"the number for {purpose.name.lower()} {index} at depth {depth} decides twice")
        self.asked.append(key)
        return self.script.get(key, 0.5)

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> None:
        """Not to be asked for: rules that are judged by cells draw by uniform numbers."""
        raise AssertionError("this rule needs no Gumbel noise")


class _WorkedOutNoise(ScriptedNoise):
    """Until the walk begins any key may be asked for: a final token is drawn for every slot of a depth."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.walking = False
        self.drawn: set[Key] = set()

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        if self.walking:
            return super().uniform(purpose, depth, index)
        self.drawn.add((purpose, depth, index))
        return self.script.get((purpose, depth, index), 0.5)

    def answer(self, verdict: Verdict) -> Answer:
        purpose = Purpose.RECOVERED if verdict.final is Origin.RECOVERED else Purpose.BONUS
        last = (purpose, len(verdict.path), 0)
        return verdict, [*self.asked, last] if last in self.drawn else self.asked


Ask = Callable[[Rule, Sequence[Case], Sequence[Script]], list[Answer]]


def run(rule: Rule, cases: Sequence[Case], scripts: Sequence[Script]) -> list[Answer]:
    """One batched call of the shipped `verify`: verdicts, and the keys that each request asked for, in order."""
    noise = [ScriptedNoise(script) for script in scripts]
    verdicts = rule.verify([case.proposal for case in cases], [case.laws for case in cases], noise)
    return [(verdict, each.asked) for verdict, each in zip(verdicts, noise, strict=True)]


def run_at_once(device: torch.device) -> Ask:
    """The same by `prepare` and `conclude`, as steps on a device ship it: all is worked out there, then read at once.

    The keys are those of the walk, and that of the token which ends it.
    """
    moved: dict[int, tuple[Case, Case]] = {}  # by identity; the first of a pair keeps it from being given to another

    def ask(rule: Rule, cases: Sequence[Case], scripts: Sequence[Script]) -> list[Answer]:
        assert isinstance(rule, DeferredRule)
        there = [_kept(moved, case, device) for case in cases]
        noise = [_WorkedOutNoise(script) for script in scripts]
        prepared = rule.prepare([case.proposal for case in there], [case.laws for case in there], noise)
        numbers = transfers.fetch(prepared.wanted)
        for own in noise:
            own.walking = True
        return [own.answer(verdict) for verdict, own in zip(prepared.conclude(numbers), noise, strict=True)]

    return ask


def _kept(moved: dict[int, tuple[Case, Case]], case: Case, device: torch.device) -> Case:
    if id(case) not in moved:
        moved[id(case)] = case, case.to(device)
    return moved[id(case)][1]


@dataclass(frozen=True, slots=True)
class Cell:
    """A box of uniform numbers in which a verdict stays the same.

    Attributes:
        case: number of the proposal.
        sides: for each decision the numbers between which the box lies.
        mass: its volume.
        verdict: at its middle.
    """

    case: int
    sides: dict[Key, tuple[float, float]]
    mass: float
    verdict: Verdict


@dataclass(slots=True)
class _Edge:
    """One place where a decision flips: False below, True from there on."""

    case: int
    script: Script
    key: Key
    flipped: Callable[[Verdict, list[Key]], bool]
    guess: float
    place: float = 0.0


def decision_cells(rule: Rule, cases: Sequence[Case], ask: Ask = run) -> list[Cell]:
    """All cells of some proposals, judged together in batched calls.

    Args:
        rule: its decisions are made by uniform numbers, each of which flips a verdict alone.
        cases: proposals over one vocabulary.
        ask: `run`, or what `run_at_once` gives.

    Raises:
        KeyReusedError: a number decides twice.
    """
    found: list[Cell] = []
    front = [Cell(i, {}, 1.0, Verdict((), (), Origin.BONUS)) for i in range(len(cases))]
    predicted = _Predicted(rule, cases)
    while front:
        scripts = [_middle(cell) for cell in front]
        answers = ask(rule, [cases[cell.case] for cell in front], scripts)
        still: list[tuple[Cell, Key, list[_Edge]]] = []
        for cell, script, (verdict, asked) in zip(front, scripts, answers, strict=True):
            key = next((key for key in asked if key not in cell.sides), None)
            if key is None:
                found.append(Cell(cell.case, cell.sides, cell.mass, verdict))
            else:
                still.append((cell, key, predicted.edges(cell.case, script, key, verdict)))
        _find(rule, cases, ask, [edge for _, _, edges in still for edge in edges])
        front = [
            Cell(cell.case, {**cell.sides, key: (low, high)}, cell.mass * (high - low), cell.verdict)
            for cell, key, edges in still
            for low, high in itertools.pairwise([0.0, *(edge.place for edge in edges), 1.0])
            if high - low > 4 * NEAR
        ]
    return found


def cell_laws(rule: Rule, cases: Sequence[Case], ask: Ask = run) -> list[VerdictLaw]:
    """For each case the law of the shipped verdict, all cases judged together; arguments as in `decision_cells`."""
    return laws_of(decision_cells(rule, cases, ask), len(cases))


def laws_of(cells: Sequence[Cell], cases: int) -> list[VerdictLaw]:
    """For each of so many cases the law that its cells make."""
    laws: list[VerdictLaw] = [{} for _ in range(cases)]
    for cell in cells:
        laws[cell.case][cell.verdict] = laws[cell.case].get(cell.verdict, 0.0) + cell.mass
    return laws


def mass_that_moves(rule: Rule, cases: Sequence[Case], cells: Sequence[Cell], ask: Ask = run) -> float:
    """Largest share of a case's noise in cells where the verdict at a random place is not that of the middle.

    It is 0 where cells are cells. Otherwise decisions hang together in a way that boxes do not describe.
    """
    chance = random.Random(len(cells))
    scripts = [
        {key: chance.uniform(low + 2 * NEAR, high - 2 * NEAR) for key, (low, high) in cell.sides.items()}
        for cell in cells
    ]
    moved = [0.0] * len(cases)
    for cell, (verdict, _) in zip(cells, ask(rule, [cases[cell.case] for cell in cells], scripts), strict=True):
        moved[cell.case] += cell.mass * (verdict != cell.verdict)
    return max(moved, default=0.0)


def _middle(cell: Cell) -> Script:
    return {key: (low + high) / 2 for key, (low, high) in cell.sides.items()}


def _find(rule: Rule, cases: Sequence[Case], ask: Ask, edges: Sequence[_Edge]) -> None:
    """Set the place of every edge, all of them in the same batched calls."""

    def probe(of: Sequence[_Edge], places: Sequence[float]) -> list[bool]:
        scripts = [{**edge.script, edge.key: place} for edge, place in zip(of, places, strict=True)]
        answers = ask(rule, [cases[edge.case] for edge in of], scripts) if of else []
        return [edge.flipped(*answer) for edge, answer in zip(of, answers, strict=True)]

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


# ---------------------------------------------------------------------------------------- where decisions should flip


class _Predicted:
    """Where a rule's kernels say that decisions flip."""

    def __init__(self, rule: Rule, cases: Sequence[Case]) -> None:
        self._rule = rule
        self._cases = cases
        self._nodes: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
        self._laws: dict[int, VerdictLaw] = {}

    def edges(self, index: int, script: Script, key: Key, verdict: Verdict) -> list[_Edge]:
        """Where the decision `key` may flip: accepting flips once, a final draw between any two tokens."""
        purpose, depth, _ = key
        if purpose is not Purpose.ACCEPT:
            final = self._final(index, verdict)
            places = itertools.accumulate(final[:-1])
            return [_Edge(index, script, key, _Beyond(token), min(each, 1.0)) for token, each in enumerate(places)]
        slot = start = 0
        while start <= depth:
            joint = is_joint(self._rule, self._cases[index], slot)
            block = self._rule.group(self._cases[index].proposal, slot)
            if joint and depth < start + len(block):
                guess = self._passes(index, block, depth - start + 1)
                return [_Edge(index, script, key, _Failed(depth), guess)]
            if start == depth:
                break
            start += len(block)
            slot = verdict.path[start - 1] + 1
        accepts, _ = self._node(index, slot)
        guess = accepts[key[2]] if key[2] < len(accepts) else 0.5
        return [_Edge(index, script, key, _Rejected(key), guess)]

    def _node(self, index: int, slot: int) -> tuple[list[float], list[float]]:
        if (index, slot) not in self._nodes:
            self._nodes[index, slot] = node_kernel(self._rule, self._cases[index], slot)
        return self._nodes[index, slot]

    def _final(self, index: int, verdict: Verdict) -> list[float]:
        """The law of the token that ends a walk with this path."""
        slot = verdict.path[-1] + 1 if verdict.path else 0
        if not is_joint(self._rule, self._cases[index], slot):
            return self._node(index, slot)[1]
        if index not in self._laws:
            self._laws[index] = kernel_law(self._rule, self._cases[index])
        final = [0.0] * self._cases[index].laws.shape[-1]
        for other, mass in self._laws[index].items():
            if other.path == verdict.path:
                final[other.tokens[-1]] += mass
        left = sum(final)
        return [mass / left for mass in final] if left else final

    def _passes(self, index: int, block: Sequence[int], length: int) -> float:
        """The number below which the prefix of this length of a block passes, all longer ones having failed."""
        ends = [0.0] * (len(block) + 1)
        for outcome in group_kernel(self._rule, self._cases[index], block):
            ends[outcome.accepted] += outcome.probability
        reach = sum(ends[: length + 1])
        return ends[length] / reach if reach > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class _Beyond:
    """The final token is a later one."""

    token: int

    def __call__(self, verdict: Verdict, asked: list[Key]) -> bool:
        return verdict.tokens[-1] > self.token


@dataclass(frozen=True, slots=True)
class _Failed:
    """The prefix of a block that ends at a depth was not kept; it passes below its number, wherever the walk ends."""

    depth: int

    def __call__(self, verdict: Verdict, asked: list[Key]) -> bool:
        return len(verdict.path) <= self.depth


@dataclass(frozen=True, slots=True)
class _Rejected:
    """A draw did not stay: the next decision is at the same depth."""

    key: Key

    def __call__(self, verdict: Verdict, asked: list[Key]) -> bool:
        behind = asked.index(self.key) + 1
        return behind < len(asked) and asked[behind][1] == self.key[1]
