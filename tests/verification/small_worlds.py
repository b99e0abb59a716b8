"""Tiny targets, drafters and an independent reference, shared by the tests of this folder.

Every distribution is made of small whole numbers, so it exists twice: as a float64 tensor for the package, and as exact
fractions for `Reference`, which computes what speculative decoding emits without a line of the package's code.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from truedraft.core.proposal import Draw, DrawKind, Proposal
from truedraft.core.tree import TokenTree, TreeShape
from truedraft.verification.exact import PlannedDraw

Prefix = tuple[int, ...]
INDEPENDENT, WITHOUT, FIXED, COUPLED = (
    DrawKind.INDEPENDENT,
    DrawKind.WITHOUT_REPLACEMENT,
    DrawKind.DETERMINISTIC,
    DrawKind.COUPLED,
)


class Table:
    """A distribution for every context, from whole numbers that depend on (name, context) alone.

    Styles: "dense" has no zeros, "sparse" about half of them, "one-hot" is temperature 0, "varied" changes its style
    from context to context.
    """

    def __init__(self, name: str, vocab: int, style: str) -> None:
        self.name, self.vocab, self.style = name, vocab, style
        self._weights: dict[Prefix, list[int]] = {}
        self._probs: dict[Prefix, Tensor] = {}

    def weights(self, prefix: Prefix) -> list[int]:
        if prefix not in self._weights:
            chance = random.Random(f"{self.name}/{self.vocab}/{self.style}/{prefix}")
            style = chance.choice(["dense", "sparse", "one-hot"]) if self.style == "varied" else self.style
            weights = [chance.randint(1, 9) for _ in range(self.vocab)]
            kept = {"dense": self.vocab, "sparse": chance.randint(1, max(1, self.vocab - 1)), "one-hot": 1}[style]
            support = chance.sample(range(self.vocab), kept)
            self._weights[prefix] = [w if token in support else 0 for token, w in enumerate(weights)]
        return self._weights[prefix]

    def fix(self, prefix: Prefix, weights: list[int]) -> None:
        """Set the distribution of one context by hand, before it is first used."""
        assert prefix not in self._weights
        self._weights[prefix] = weights

    def dist(self, prefix: Prefix) -> Tensor:
        if prefix not in self._probs:
            weights = torch.tensor(self.weights(prefix), dtype=torch.float64)
            self._probs[prefix] = weights / weights.sum()
        return self._probs[prefix]

    def fractions(self, prefix: Prefix) -> list[Fraction]:
        weights = self.weights(prefix)
        return [Fraction(w, sum(weights)) for w in weights]


@dataclass(frozen=True)
class Choice:
    """One planned draw: the drafter's table ("a", "b", ...) and the kind; a fixed draw takes its rank-th token."""

    drafter: str
    kind: DrawKind
    rank: int = 0


Plan = tuple[Choice, ...]
"""The draws of one node, in order."""


def repeated(count: int, kind: DrawKind, drafter: str = "a") -> Plan:
    return tuple(Choice(drafter, kind, rank) for rank in range(count))


@dataclass(frozen=True)
class World:
    """A target, drafters by letter, and one plan for each depth of the tree.

    `bare` names a token under which nothing is drafted, which makes trees uneven; -1 is none.
    """

    target: Table
    drafters: dict[str, Table]
    plans: tuple[Plan, ...]
    bare: int = -1

    @property
    def vocab(self) -> int:
        return self.target.vocab

    def choices(self, prefix: Prefix, drafted: Prefix) -> list[Choice]:
        """The draws that exist at a node: never more of one distribution without replacement than it has tokens."""
        if len(drafted) >= len(self.plans) or (drafted and drafted[-1] == self.bare):
            return []
        kept: list[Choice] = []
        for choice in self.plans[len(drafted)]:
            support = sum(w > 0 for w in self.drafters[choice.drafter].weights(prefix))
            before = sum(c.drafter == choice.drafter and c.kind is not FIXED for c in kept)
            if choice.kind is not WITHOUT or before < support:
                kept.append(choice)
        return kept

    def fixed_token(self, choice: Choice, prefix: Prefix) -> int:
        weights = self.drafters[choice.drafter].weights(prefix)
        return sorted(range(self.vocab), key=lambda token: (-weights[token], token))[choice.rank % self.vocab]

    def scheme(self, prefix: Prefix, drafted: Prefix) -> list[PlannedDraw]:
        """What the package's exact distribution is given."""
        plan = []
        for choice in self.choices(prefix, drafted):
            if choice.kind is FIXED:
                plan.append(PlannedDraw(-1, one_hot(self.fixed_token(choice, prefix), self.vocab), FIXED))
            else:
                dist = sorted(self.drafters).index(choice.drafter)
                plan.append(PlannedDraw(dist, self.drafters[choice.drafter].dist(prefix), choice.kind))
        return plan


def one_hot(token: int, vocab: int) -> Tensor:
    dist = torch.zeros(vocab, dtype=torch.float64)
    dist[token] = 1.0
    return dist


def build(name: str, vocab: int, plans: Sequence[Plan], p: str = "dense", q: str = "dense", bare: int = -1) -> World:
    """A world whose target has style `p` and whose drafters "a" and "b" have style `q`; "equal" drafts from p."""
    target = Table(f"{name}/p", vocab, p)
    if q == "equal":
        return World(target, {"a": target, "b": target}, tuple(plans), bare)
    drafters = {letter: Table(f"{name}/{letter}", vocab, q) for letter in "ab"}
    return World(target, drafters, tuple(plans), bare)


# ---------------------------------------------------------------------------------------- every proposal


@dataclass(frozen=True)
class Case:
    """One proposal that a world can make at the root, its probability, and the target's distributions `[rows,
    vocab]`."""

    probability: float
    proposal: Proposal
    probs: Tensor


def every_proposal(world: World) -> list[Case]:
    """All proposals of the first step, siblings' subtrees included, with their probabilities."""
    cases = []
    for probability, tree in Reference(world).trees((), ()):
        tokens: list[int] = []
        parents: list[int] = []
        draws: list[list[Draw]] = [[]]
        dists: list[Tensor] = []
        paths: list[Prefix] = [()]

        def add(
            row: int,
            tree: RefTree,
            tokens: list[int] = tokens,
            parents: list[int] = parents,
            draws: list[list[Draw]] = draws,
            dists: list[Tensor] = dists,
            paths: list[Prefix] = paths,
        ) -> None:
            path = paths[row]
            nodes: dict[int, int] = {}
            dist_of: dict[str, int] = {}
            for choice, token in tree.drawn:
                if token not in nodes:
                    nodes[token] = len(tokens)
                    tokens.append(token)
                    parents.append(row - 1)
                    draws.append([])
                    paths.append((*path, token))
                dist = -1
                if choice.kind is not FIXED:
                    if choice.drafter not in dist_of:
                        dist_of[choice.drafter] = len(dists)
                        dists.append(world.drafters[choice.drafter].dist(path))
                    dist = dist_of[choice.drafter]
                draws[row].append(Draw(nodes[token], dist, choice.kind))
            for token, below in tree.below.items():
                add(nodes[token] + 1, below)

        add(0, tree)
        shape = TokenTree(torch.tensor(tokens, dtype=torch.int64), TreeShape(tuple(parents)))
        proposal = Proposal(shape, tuple(map(tuple, draws)), torch.stack(dists) if dists else None)
        proposal.check()
        cases.append(Case(float(probability), proposal, torch.stack([world.target.dist(path) for path in paths])))
    return cases


# ---------------------------------------------------------------------------------------- the reference


@dataclass(frozen=True)
class RefTree:
    """Tokens drawn at a node, in order, and the tree below each distinct one."""

    drawn: list[tuple[Choice, int]]
    below: dict[int, RefTree]


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

    def dist_of(self, choice: Choice, prefix: Prefix) -> list[Fraction]:
        if choice.kind is FIXED:
            token = self.world.fixed_token(choice, prefix)
            return [Fraction(int(i == token)) for i in range(self.world.vocab)]
        return self.world.drafters[choice.drafter].fractions(prefix)

    def trees(self, prefix: Prefix, drafted: Prefix) -> Iterator[tuple[Fraction, RefTree]]:
        """Every tree that can be drafted at a node, with its probability. Drafting itself is never broken."""
        choices = self.world.choices(prefix, drafted)
        for tokens in itertools.product(range(self.world.vocab), repeat=len(choices)):
            probability = Fraction(1)
            gone: dict[str, list[int]] = {}
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
        p = self.world.target.fractions(prefix)
        reach = Fraction(1)
        probs: dict[str, list[Fraction]] = {}
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
        for answer in itertools.product(range(self.world.vocab), repeat=length):
            mass = Fraction(1)
            for i, token in enumerate(answer):
                mass *= self.world.target.fractions(answer[:i])[token]
            if mass:
                dist[answer] = mass
        return dist


def gap(left: dict, right: dict) -> float:
    """Total variation between two distributions given as dictionaries, of floats or fractions."""
    return 0.5 * sum(abs(float(left.get(key, 0)) - float(right.get(key, 0))) for key in left.keys() | right.keys())


# ---------------------------------------------------------------------------------------- the worlds that are tested

A1, A2, A3 = (repeated(n, INDEPENDENT) for n in (1, 2, 3))
W1, W2, W3 = (repeated(n, WITHOUT) for n in (1, 2, 3))
F1, F2, F3 = (repeated(n, FIXED) for n in (1, 2, 3))
TWO_DRAFTERS = (Choice("a", INDEPENDENT), Choice("b", INDEPENDENT), Choice("a", INDEPENDENT))
TWO_WITHOUT = (Choice("a", WITHOUT), Choice("b", WITHOUT), Choice("a", WITHOUT))
ALL_KINDS = (Choice("a", FIXED), Choice("b", INDEPENDENT), Choice("a", WITHOUT), Choice("a", WITHOUT))
SAMPLED_THEN_FIXED = (Choice("a", WITHOUT), Choice("b", FIXED), Choice("a", WITHOUT))
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
