"""The law of what a shipped `verify` answers, measured one noise value per decision cell.

A verdict is a piecewise constant function of the step's uniform numbers. `cell_laws` runs the batched `verify` with
scripted noise, finds where each decision flips, and multiplies the widths of the cells. Where the one-node kernel
says that a decision flips, it probes just below and just above; only if the flip is not there does it bisect. So the
answer is what `verify` does, whatever the kernel says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from small_worlds import Case, Prefix

from truedraft.core.noise import Purpose
from truedraft.core.verdicts import Origin, Verdict
from truedraft.verification.rule import DrawnToken, Rule

Key = tuple[Purpose, int, int]
BELOW_ONE = 1.0 - 2.0**-53
NEAR = 2e-15
"""How near to the predicted place a decision must flip: a few roundings of float64."""


class ScriptedNoise:
    """Answers from a script, 0.5 elsewhere, and writes down what was asked; no key may be asked twice."""

    def __init__(self, script: dict[Key, float]) -> None:
        self.script = script
        self.asked: list[Key] = []

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        key = (purpose, depth, index)
        assert key not in self.asked, f"{key} decides twice"
        self.asked.append(key)
        return self.script.get(key, 0.5)

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> None:
        raise AssertionError("this rule needs no Gumbel noise")


def run(rule: Rule, cases: Sequence[Case], scripts: Sequence[dict[Key, float]]) -> list[tuple[Verdict, list[Key]]]:
    """One batched call of the shipped `verify`: verdicts, and the keys that each request asked for, in order."""
    noise = [ScriptedNoise(script) for script in scripts]
    verdicts = rule.verify([case.proposal for case in cases], [case.laws for case in cases], noise)
    return [(verdict, each.asked) for verdict, each in zip(verdicts, noise, strict=True)]


@dataclass
class _Edge:
    """One place where a decision flips: False below, True from there on."""

    case: int
    script: dict[Key, float]
    key: Key
    flipped: Callable[[Verdict, list[Key]], bool]
    guess: float
    place: float = 0.0


def _find(rule: Rule, cases: Sequence[Case], edges: Sequence[_Edge]) -> None:
    """Set the place of every edge, all of them in the same batched calls."""

    def probe(of: Sequence[_Edge], places: Sequence[float]) -> list[bool]:
        scripts = [{**edge.script, edge.key: place} for edge, place in zip(of, places, strict=True)]
        answers = run(rule, [cases[edge.case] for edge in of], scripts)
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
    if not lost:
        return
    lows, highs = [0.0] * len(lost), [1.0] * len(lost)
    for _ in range(54):
        middles = [(low + high) / 2 for low, high in zip(lows, highs, strict=True)]
        for i, high in enumerate(probe(lost, middles)):
            (highs if high else lows)[i] = middles[i]
    for edge, high in zip(lost, highs, strict=True):
        edge.place = high


def _edges(rule: Rule, case: Case, index: int, script: dict[Key, float], key: Key, verdict: Verdict) -> list[_Edge]:
    """Where the decision `key` may flip: accepting flips once, a final draw between any two tokens."""
    purpose, depth, number = key
    slot = verdict.path[depth - 1] + 1 if depth else 0
    accepts, final = kernel_of_slot(rule, case, slot)
    if purpose is Purpose.ACCEPT:

        def went_on(verdict: Verdict, asked: list[Key]) -> bool:
            return asked[asked.index(key) + 1][1] == depth

        return [_Edge(index, script, key, went_on, accepts[number])]
    assert purpose in (Purpose.RECOVERED, Purpose.BONUS)
    edges, reach = [], 0.0
    for token, mass in enumerate(final[:-1]):
        reach += mass

        def beyond(verdict: Verdict, asked: list[Key], token: int = token) -> bool:
            return verdict.tokens[-1] > token

        edges.append(_Edge(index, script, key, beyond, min(reach, 1.0)))
    return edges


def cell_laws(rule: Rule, cases: Sequence[Case]) -> list[dict[Verdict, float]]:
    """For each case the law of the shipped verdict, all cases judged together in batched calls."""
    laws: list[dict[Verdict, float]] = [{} for _ in cases]
    front: list[tuple[int, dict[Key, float], float]] = [(i, {}, 1.0) for i in range(len(cases))]
    while front:
        answers = run(rule, [cases[i] for i, _, _ in front], [script for _, script, _ in front])
        edges: list[list[_Edge]] = []
        still = []
        for (i, script, mass), (verdict, asked) in zip(front, answers, strict=True):
            open_keys = [key for key in asked if key not in script]
            if open_keys:
                edges.append(_edges(rule, cases[i], i, script, open_keys[0], verdict))
                still.append((i, script, mass, open_keys[0]))
            else:
                laws[i][verdict] = laws[i].get(verdict, 0.0) + mass
        flat = [edge for group in edges for edge in group]
        if flat:
            _find(rule, cases, flat)
        front = []
        for (i, script, mass, key), group in zip(still, edges, strict=True):
            places = [0.0, *(edge.place for edge in group), 1.0]
            for low, high in itertools.pairwise(places):
                if high - low > 4 * NEAR:
                    front.append((i, {**script, key: (low + high) / 2}, mass * (high - low)))
    return laws


def kernel_of_slot(rule: Rule, case: Case, slot: int) -> tuple[list[float], list[float]]:
    """What the one-node kernel says of a slot: each draw's chance once it is its turn, and the final token's law."""
    proposal, p = case.proposal, case.laws[slot]
    drawn = []
    for draw in proposal.draws[slot]:
        token = proposal.tree.token_list[draw.child]
        if draw.law < 0:
            q = torch.zeros_like(p)
            q[token] = 1.0
        else:
            assert proposal.laws is not None
            q = proposal.laws[draw.law]
        drawn.append(DrawnToken(token, draw.law, q, draw.kind))
    accepts, final, reach = [], [0.0] * len(p), 1.0
    for outcome in rule.outcomes(p, drawn):
        if outcome.accepted:
            accepts.append(outcome.probability / reach if reach > 0 else 0.0)
            reach -= outcome.probability
        else:
            final[outcome.token] += outcome.probability
    left = sum(final)
    return accepts, [mass / left for mass in final] if left else final


def kernel_law(rule: Rule, case: Case) -> dict[Verdict, float]:
    """The law of the verdict on one proposal, composed from the one-node kernel `outcomes` by a walk of our own."""
    law: dict[Verdict, float] = {}
    tree = case.proposal.tree

    def visit(slot: int, path: Prefix, mass: float) -> None:
        draws = case.proposal.draws[slot]
        accepts, final = kernel_of_slot(rule, case, slot)
        for draw, accept in zip(draws, accepts, strict=False):
            if accept > 0.0:
                visit(draw.child + 1, (*path, draw.child), mass * accept)
            mass *= 1.0 - accept
        origin = Origin.RECOVERED if draws else Origin.BONUS
        for token, probability in enumerate(final):
            if mass * probability > 0.0:
                verdict = Verdict(path, (*(tree.token_list[node] for node in path), token), origin)
                law[verdict] = law.get(verdict, 0.0) + mass * probability

    visit(0, (), 1.0)
    return law


def step_law(cases: Sequence[Case], laws: Sequence[dict[Verdict, float]]) -> dict[tuple[Prefix, int], float]:
    """Over all proposals of a world: the law of (emitted tokens, accepted count) of one step."""
    law: dict[tuple[Prefix, int], float] = {}
    for case, verdicts in zip(cases, laws, strict=True):
        for verdict, mass in verdicts.items():
            key = verdict.tokens, len(verdict.path)
            law[key] = law.get(key, 0.0) + case.probability * mass
    return law


def completed(
    step: dict[tuple[Prefix, int], float], target: Callable[[Prefix], torch.Tensor], length: int
) -> dict[Prefix, float]:
    """The law of `length` tokens when the target itself goes on after the step: the target's, if the step is exact."""
    law: dict[Prefix, float] = {}

    def go_on(answer: Prefix, mass: float) -> None:
        if len(answer) >= length:
            law[answer[:length]] = law.get(answer[:length], 0.0) + mass
            return
        for token, p in enumerate(target(answer).tolist()):
            if p > 0.0:
                go_on((*answer, token), mass * p)

    for (answer, _), mass in step.items():
        go_on(answer, mass)
    return law
