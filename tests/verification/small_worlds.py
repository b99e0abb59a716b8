"""Tiny worlds, an independent reference in exact fractions, and the ways to sum a rule's distribution on them.

The worlds and the search for decision cells are the package's. `Reference` shares nothing with them but the worlds'
whole numbers: it computes what speculative decoding emits without a line of the package's code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest
from torch import Tensor

from truedraft.certify.cells import (
    Key,
    Script,
    ScriptedNoise,
    VerdictProbs,
    completed,
    decision_cells,
    decisions,
    probs_of,
    step_probs,
    verdicts_of,
)
from truedraft.certify.worlds import Case, Choice, Plan, Prefix, Table, World
from truedraft.core import transfers
from truedraft.core.noise import Noise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.tree import TokenTree
from truedraft.core.verdict import Verdict
from truedraft.testing import altered
from truedraft.verification import Rule
from truedraft.verification.exact import distance, emitted_dist, target_dist

INDEPENDENT, WITHOUT, FIXED, COUPLED = (
    DrawKind.INDEPENDENT,
    DrawKind.WITHOUT_REPLACEMENT,
    DrawKind.DETERMINISTIC,
    DrawKind.COUPLED,
)
EXACT, CAUGHT = 1e-12, 0.01


def build(name: str, vocab: int, plans: Sequence[Plan], p: str = "dense", q: str = "dense", bare: int = -1) -> World:
    """A world whose target has style `p` and whose two drafters have style `q`; "equal" drafts from p."""
    target = Table(f"{name}/p", vocab, p)
    drafters = (target, target) if q == "equal" else (Table(f"{name}/a", vocab, q), Table(f"{name}/b", vocab, q))
    return World(name, target, drafters, tuple(plans), bare)


def repeated(count: int, kind: DrawKind) -> Plan:
    return tuple(Choice(0, kind, rank) for rank in range(count))


# ---------------------------------------------------------------------------------------- ways to judge


def run(rule: Rule, cases: Sequence[Case], scripts: Sequence[Script]) -> list[tuple[Verdict, list[Key]]]:
    """One batched call under scripts: verdicts, and the keys of the decisions that led to them, in order.

    The rule may ask for more numbers than decide.
    """
    noise = [ScriptedNoise(script) for script in scripts]
    verdicts = verdicts_of(rule, cases, noise)
    return [
        (verdict, [key for key in decisions(rule, case, verdict) if key in own.requested])
        for case, verdict, own in zip(cases, verdicts, noise, strict=True)
    ]


def cell_probs(rule: Rule, cases: Sequence[Case]) -> list[VerdictProbs]:
    """For each case the distribution of the shipped verdict, all judged together."""
    return probs_of(decision_cells(rule, cases), len(cases))


def by_kernel(rule: Rule, world: World, length: int | None = None) -> float:
    """Total variation of answers' first tokens from the target, by recursion over the rule's kernel."""
    length = length or world.length
    dist = emitted_dist(rule, world.target.probs, world.scheme, length)
    return distance(dist, target_dist(world.target.probs, length))


def by_verify(rule: Rule, world: World) -> float:
    """The same by one step of the shipped `verify`, in every decision cell; then the target itself goes on."""
    cases = world.every_proposal()
    return continued(world, step_probs(cases, cell_probs(rule, cases)))


def continued(world: World, step: dict[tuple[Prefix, int], float]) -> float:
    """Total variation from the target of a step that the target continues."""
    answers = completed(step, world.target.probs, world.length)
    return distance(answers, target_dist(world.target.probs, world.length))


def eagerly(
    rule: Rule, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]
) -> list[Verdict]:
    """The verdicts as on a device, from tokens that stay on it until all is read at once."""
    on_device = [Proposal(TokenTree(p.tree.tokens.clone(), p.tree.shape), p.draws, p.probs) for p in proposals]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "waits", lambda device: True)
        return rule.verify(on_device, probs, noise)


def both_ways(rule: Rule) -> Rule:
    """The rule, judging every batch of scripted noise as on the CPU and as on a device, which must agree."""

    def verify(proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> list[Verdict]:
        verdicts = rule.verify(proposals, probs, noise)
        if proposals:
            scripts = [ScriptedNoise(own.script) for own in noise]  # type: ignore[attr-defined]
            assert eagerly(rule, proposals, probs, scripts) == verdicts
        return verdicts

    return altered(rule, verify=verify)


# ---------------------------------------------------------------------------------------- the reference


@dataclass(frozen=True)
class RefTree:
    """Tokens drawn at a node, in order, and the tree below each distinct one."""

    drawn: list[tuple[Choice, int]]
    below: dict[int, RefTree]


def _fractions(weights: list[int]) -> list[Fraction]:
    return [Fraction(weight, sum(weights)) for weight in weights]


def _ratio(p_x: Fraction, q_x: Fraction) -> Fraction:
    return min(Fraction(1), p_x / q_x)


def _left_over(p: list[Fraction], q: list[Fraction]) -> list[Fraction]:
    rest = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
    mass = sum(rest)
    return [r / mass for r in rest] if mass else p


def _take_out(q: list[Fraction], token: int) -> list[Fraction]:
    mass = sum(q) - q[token]
    return [Fraction(0) if i == token or not mass else x / mass for i, x in enumerate(q)]


@dataclass
class Reference:
    """What speculative decoding emits, in exact fractions: all proposals, all decisions, all final draws.

    Its parts can be replaced, so that it also predicts what a broken rule emits.
    """

    world: World
    accept: Callable[[Fraction, Fraction], Fraction] = _ratio
    rejected: Callable[[list[Fraction], list[Fraction]], list[Fraction]] = _left_over
    take_out: Callable[[list[Fraction], int], list[Fraction]] = _take_out

    @property
    def vocab(self) -> int:
        return self.world.target.vocab

    def dist_of(self, choice: Choice, prefix: Prefix) -> list[Fraction]:
        weights = self.world.drafters[choice.drafter].weights(prefix)
        if choice.kind is FIXED:
            ranked = sorted(range(self.vocab), key=lambda token: (-weights[token], token))
            return [Fraction(int(i == ranked[choice.rank % self.vocab])) for i in range(self.vocab)]
        return _fractions(weights)

    def trees(self, prefix: Prefix, drafted: Prefix) -> Iterator[tuple[Fraction, RefTree]]:
        """Every tree that can be drafted at a node, with its probability. Drafting itself is never broken."""
        choices = self.world.choices(prefix, drafted)
        for tokens in itertools.product(range(self.vocab), repeat=len(choices)):
            probability = Fraction(1)
            gone: dict[int, list[int]] = {}
            for choice, token in zip(choices, tokens, strict=True):
                q = self.dist_of(choice, prefix)
                if choice.kind is WITHOUT:
                    taken = gone.setdefault(choice.drafter, [])
                    for earlier in taken:
                        q = _take_out(q, earlier)
                    taken.append(token)
                probability *= q[token]
                if not probability:
                    break
            if not probability:
                continue
            distinct = list(dict.fromkeys(tokens))
            below = [list(self.trees((*prefix, t), (*drafted, t))) for t in distinct]
            for combination in itertools.product(*below):
                mass = probability
                for weight, _ in combination:
                    mass *= weight
                subtrees = dict(zip(distinct, (tree for _, tree in combination), strict=True))
                yield mass, RefTree(list(zip(choices, tokens, strict=True)), subtrees)

    def walk(self, prefix: Prefix, tree: RefTree) -> Iterator[tuple[Fraction, Prefix, int]]:
        """Every verdict on a drafted tree: probability, emitted tokens, accepted count."""
        p = _fractions(self.world.target.weights(prefix))
        reach = Fraction(1)
        probs: dict[int, list[Fraction]] = {}
        for choice, token in tree.drawn:
            q = self.dist_of(choice, prefix)
            if choice.kind is WITHOUT:
                q = probs.get(choice.drafter, q)
            accept = self.accept(p[token], q[token])
            if reach * accept:
                for weight, tokens, count in self.walk((*prefix, token), tree.below[token]):
                    yield reach * accept * weight, (token, *tokens), count + 1
            reach *= 1 - accept
            if not reach:
                return
            p = self.rejected(p, q)
            if choice.kind is WITHOUT:
                probs[choice.drafter] = self.take_out(q, token)
        for token, mass in enumerate(p):
            if mass:
                yield reach * mass, (token,), 0

    def step(self, prefix: Prefix) -> dict[tuple[Prefix, int], Fraction]:
        """The distribution of (emitted tokens, accepted count) of one step."""
        dist: dict[tuple[Prefix, int], Fraction] = {}
        for probability, tree in self.trees(prefix, ()):
            for mass, tokens, count in self.walk(prefix, tree):
                dist[tokens, count] = dist.get((tokens, count), Fraction(0)) + probability * mass
        return dist

    def emitted(self, length: int) -> dict[Prefix, Fraction]:
        """The distribution of the first `length` tokens, whole step after whole step."""
        done: dict[Prefix, Fraction] = {}
        front: dict[Prefix, Fraction] = {(): Fraction(1)}
        while front:
            ahead: dict[Prefix, Fraction] = {}
            for prefix, mass in front.items():
                for (tokens, _), weight in self.step(prefix).items():
                    answer = (*prefix, *tokens)
                    into, key = (done, answer[:length]) if len(answer) >= length else (ahead, answer)
                    into[key] = into.get(key, Fraction(0)) + mass * weight
            front = ahead
        return done

    def target(self, length: int) -> dict[Prefix, Fraction]:
        """The target's own distribution of answers."""
        dist: dict[Prefix, Fraction] = {}
        for answer in itertools.product(range(self.vocab), repeat=length):
            mass = Fraction(1)
            for i, token in enumerate(answer):
                mass *= _fractions(self.world.target.weights(answer[:i]))[token]
            if mass:
                dist[answer] = mass
        return dist


class BlockReference(Reference):
    """Every verdict on a chain: for each subset of prefixes that pass, the longest one."""

    def walk(self, prefix: Prefix, tree: RefTree) -> Iterator[tuple[Fraction, Prefix, int]]:
        chain, probs = [], [_fractions(self.world.target.weights(prefix))]
        while tree.drawn:
            ((choice, token),) = tree.drawn
            chain.append((token, self.dist_of(choice, prefix)))
            prefix, tree = (*prefix, token), tree.below[token]
            probs.append(_fractions(self.world.target.weights(prefix)))
        weights = [Fraction(1)]
        for (token, q), p in zip(chain, probs, strict=False):
            weights.append(min(Fraction(1), weights[-1] * p[token] / q[token]))
        ends = [
            [max(Fraction(0), w * a - b) for a, b in zip(p, q, strict=True)]
            for w, p, (_, q) in zip(weights, probs, chain, strict=False)
        ]
        passes = []
        for w, rest in zip(weights[1:], ends[1:], strict=False):
            passes.append(sum(rest) / (sum(rest) + 1 - w) if w < 1 else Fraction(1))
        if chain:
            passes.append(weights[-1])
        for passed in itertools.product([True, False], repeat=len(chain)):
            mass = Fraction(1)
            for h, yes in zip(passes, passed, strict=True):
                mass *= h if yes else 1 - h
            if not mass:
                continue
            kept = max((i + 1 for i, yes in enumerate(passed) if yes), default=0)
            rest = ends[kept] if kept < len(chain) and sum(ends[kept]) else probs[kept]
            for token, share in enumerate(rest):
                if share:
                    yield mass * share / sum(rest), (*(t for t, _ in chain[:kept]), token), kept


def gap(left: dict, right: dict) -> float:
    """Total variation between two distributions given as dictionaries, of floats or fractions."""
    return float(distance(*({key: float(mass) for key, mass in each.items()} for each in (left, right))))


# ---------------------------------------------------------------------------------------- the worlds that are tested

A1, A2, A3 = (repeated(n, INDEPENDENT) for n in (1, 2, 3))
W1, W2, W3 = (repeated(n, WITHOUT) for n in (1, 2, 3))
F1, F2, F3 = (repeated(n, FIXED) for n in (1, 2, 3))
TWO_DRAFTERS = (Choice(0, INDEPENDENT), Choice(1, INDEPENDENT), Choice(0, INDEPENDENT))
TWO_WITHOUT = (Choice(0, WITHOUT), Choice(1, WITHOUT), Choice(0, WITHOUT))
ALL_KINDS = (Choice(0, FIXED), Choice(1, INDEPENDENT), Choice(0, WITHOUT), Choice(0, WITHOUT))
SAMPLED_THEN_FIXED = (Choice(0, WITHOUT), Choice(1, FIXED), Choice(0, WITHOUT))
NODES: dict[str, Plan] = {
    "independent": A3,
    "without replacement": W3,
    "fixed": F3,
    "two drafters": TWO_DRAFTERS,
    "two drafters without replacement": TWO_WITHOUT,
    "all kinds": ALL_KINDS,
    "sampled, then fixed": SAMPLED_THEN_FIXED,
}
STYLES = [
    ("dense", "dense"),
    ("dense", "sparse"),
    ("sparse", "dense"),
    ("sparse", "sparse"),
    ("one-hot", "dense"),
    ("dense", "one-hot"),
    ("one-hot", "one-hot"),
    ("varied", "varied"),
    ("dense", "equal"),
    ("sparse", "equal"),
]
