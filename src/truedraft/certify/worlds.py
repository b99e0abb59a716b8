"""Tiny worlds: a target and drafters over two to four tokens, so small that every proposal can be listed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.core.proposal import Draw, DrawKind, Proposal
from truedraft.core.tree import TokenTree, shape_of
from truedraft.verification.exact import PlannedDraw

Prefix = tuple[int, ...]
STYLES = ("dense", "sparse", "one-hot", "varied")
"""Distributions without zeros, with about half zeros, one-hot, and of a style that changes between contexts."""


class Table:
    """A distribution of small integers for every context, in one of `STYLES`; small values of `largest` make ties."""

    def __init__(self, name: str, vocab: int, style: str, largest: int = 9) -> None:
        self.vocab = vocab
        self._seed = f"{name}/{vocab}/{style}"
        self._style = style
        self._largest = largest
        self._weights: dict[Prefix, list[int]] = {}
        self._probs: dict[Prefix, Tensor] = {}

    def weights(self, prefix: Prefix) -> list[int]:
        if prefix not in self._weights:
            chance = random.Random(f"{self._seed}/{prefix}")
            style = chance.choice(STYLES[:3]) if self._style == "varied" else self._style
            weights = [chance.randint(1, self._largest) for _ in range(self.vocab)]
            kept = {"dense": self.vocab, "sparse": chance.randint(1, max(1, self.vocab - 1)), "one-hot": 1}[style]
            support = chance.sample(range(self.vocab), kept)
            self._weights[prefix] = [weight if token in support else 0 for token, weight in enumerate(weights)]
        return self._weights[prefix]

    def probs(self, prefix: Prefix) -> Tensor:
        if prefix not in self._probs:
            weights = torch.tensor(self.weights(prefix), dtype=torch.float64)
            self._probs[prefix] = weights / weights.sum()
        return self._probs[prefix]


@dataclass(frozen=True, slots=True)
class Choice:
    """One planned draw, from the world's drafter of this number; a deterministic one takes the token of this `rank`."""

    drafter: int
    kind: DrawKind
    rank: int = 0


Plan = tuple[Choice, ...]  # the draws of one node, in order


@dataclass(frozen=True, slots=True)
class Case:
    """One proposal that a world can make at the root, with the target's distributions `[rows, vocab]`, float64."""

    probability: float
    proposal: Proposal
    probs: Tensor

    def to(self, device: torch.device) -> Case:
        if self.probs.device == device:
            return self
        mine = self.proposal
        tree = TokenTree(mine.tree.tokens.to(device), mine.tree.shape)
        tree.keep_host_ids(mine.tree.host_ids)
        drafted = None if mine.probs is None else mine.probs.to(device)
        return Case(self.probability, Proposal(tree, mine.draws, drafted), self.probs.to(device))


Drawn = Mapping[Prefix, Sequence[tuple[int, DrawKind, int]]]
"""For each path of a proposal the draws below it, in order: drafter, kind and token."""


@dataclass(frozen=True)
class World:
    """A target, drafters, and the draws at each node of each depth; nothing is drafted below `bare` (-1 is none)."""

    name: str
    target: Table
    drafters: tuple[Table, ...]
    plans: tuple[Plan, ...]
    bare: int = -1

    @property
    def length(self) -> int:
        return len(self.plans) + 1

    def choices(self, prefix: Prefix, drafted: Prefix) -> list[Choice]:
        """The draws at a node: without replacement, never more from one distribution than it has tokens."""
        if len(drafted) >= len(self.plans) or (drafted and drafted[-1] == self.bare):
            return []
        kept: list[Choice] = []
        for choice in self.plans[len(drafted)]:
            support = sum(weight > 0 for weight in self.drafters[choice.drafter].weights(prefix))
            before = sum(c.drafter == choice.drafter and c.kind is not DrawKind.DETERMINISTIC for c in kept)
            if choice.kind is not DrawKind.WITHOUT_REPLACEMENT or before < support:
                kept.append(choice)
        return kept

    def scheme(self, prefix: Prefix, drafted: Prefix) -> list[PlannedDraw]:
        plan = []
        for choice in self.choices(prefix, drafted):
            if choice.kind is DrawKind.DETERMINISTIC:
                one_hot = torch.zeros(self.target.vocab, dtype=torch.float64)
                one_hot[self._fixed_token(choice, prefix)] = 1.0
                plan.append(PlannedDraw(-1, one_hot, choice.kind))
            else:
                plan.append(PlannedDraw(choice.drafter, self.drafters[choice.drafter].probs(prefix), choice.kind))
        return plan

    def every_proposal(self) -> list[Case]:
        return [case_of(self, probability, drawn) for probability, drawn in self._drafts(())]

    def _fixed_token(self, choice: Choice, prefix: Prefix) -> int:
        weights = self.drafters[choice.drafter].weights(prefix)
        return sorted(range(len(weights)), key=lambda token: (-weights[token], token))[choice.rank % len(weights)]

    def _drafts(self, prefix: Prefix) -> Iterator[tuple[float, Drawn]]:
        choices = self.choices(prefix, prefix)
        for probability, tokens in self._draws(choices, prefix):
            drawn = [(choice.drafter, choice.kind, token) for choice, token in zip(choices, tokens, strict=True)]
            below = [list(self._drafts((*prefix, token))) for token in dict.fromkeys(tokens)]
            for combination in itertools.product(*below):
                mass = math.prod((weight for weight, _ in combination), start=probability)
                yield mass, {prefix: drawn} | dict(itertools.chain(*(each.items() for _, each in combination)))

    def _draws(self, choices: Sequence[Choice], prefix: Prefix) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Every outcome of the draws of a node. Probabilities come from integers, not from shared code."""
        for tokens in itertools.product(range(self.target.vocab), repeat=len(choices)):
            probability = 1.0
            removed: dict[int, list[int]] = {}
            for choice, token in zip(choices, tokens, strict=True):
                weights = self.drafters[choice.drafter].weights(prefix)
                if choice.kind is DrawKind.DETERMINISTIC:
                    probability *= float(token == self._fixed_token(choice, prefix))
                    continue
                taken = removed.setdefault(choice.drafter, []) if choice.kind is DrawKind.WITHOUT_REPLACEMENT else []
                if token in taken or not weights[token]:
                    probability = 0.0
                    break
                probability *= weights[token] / (sum(weights) - sum(weights[each] for each in taken))
                taken.append(token)
            if probability > 0.0:
                yield probability, tokens


def case_of(world: World, probability: float, drawn: Drawn) -> Case:
    """The proposal of some draws, breadth first."""
    parents: list[int] = []
    draws: list[tuple[Draw, ...]] = []
    dists: list[Tensor] = []
    paths: list[Prefix] = [()]  # of tree rows
    for row, path in enumerate(paths):  # grows on the way
        nodes: dict[int, int] = {}
        dist_of: dict[int, int] = {}
        own = []
        for drafter, kind, token in drawn.get(path, ()):
            if token not in nodes:
                nodes[token] = len(parents)
                parents.append(row - 1)
                paths.append((*path, token))
            if kind is not DrawKind.DETERMINISTIC and drafter not in dist_of:
                dist_of[drafter] = len(dists)
                dists.append(world.drafters[drafter].probs(path))
            own.append(Draw(nodes[token], -1 if kind is DrawKind.DETERMINISTIC else dist_of[drafter], kind))
        draws.append(tuple(own))
    tree = TokenTree.of_ids([path[-1] for path in paths[1:]], shape_of(tuple(parents)))
    proposal = Proposal(tree, tuple(draws), torch.stack(dists) if dists else None)
    proposal.check()
    return Case(probability, proposal, torch.stack([world.target.probs(path) for path in paths]))


def build(vocab: int, plans: Sequence[Plan], p: str, q: str, bare: int = -1, largest: int = 9) -> World:
    """A world of two drafters; `p` and `q` are styles, and q "equal" drafts from the target's own distributions."""
    words = [" ".join(f"{choice.kind.value} {'ab'[choice.drafter]}" for choice in plan) for plan in plans]
    name = f"{vocab} tokens, {' then '.join(f'({each})' for each in words) or 'nothing drafted'}, {p} and {q} laws"
    target = Table(f"{name}, target", vocab, p, largest)
    if q == "equal":
        return World(name, target, (target, target), tuple(plans), bare)
    drafts = (Table(f"{name}, a", vocab, q, largest), Table(f"{name}, b", vocab, q, largest))
    return World(name, target, drafts, tuple(plans), bare)


_PAIRS = (
    ("dense", "dense"),
    ("varied", "varied"),
    ("sparse", "dense"),
    ("dense", "sparse"),
    ("one-hot", "dense"),
    ("dense", "one-hot"),
    ("dense", "equal"),
    ("sparse", "equal"),
)
_FEW, _SOME, _ALL = _PAIRS[:1], _PAIRS[:2], _PAIRS


def worlds_for(kinds: Set[DrawKind]) -> list[World]:
    """Worlds of chains, nodes of several draws, trees, mixed kinds and no drafts; coupled draws are left out."""
    listed = [kind for kind in DrawKind if kind in kinds and kind is not DrawKind.COUPLED]
    worlds = [build(vocab, (), "dense", "dense") for vocab in (2, 3, 4)]
    for kind in listed:
        worlds += _of_one_kind(kind, _ALL if len(listed) == 1 else _FEW)
    for first, second in itertools.permutations(listed, 2):
        worlds += _of_two_kinds(first, second, _SOME if len(listed) == 2 else _FEW)
    if len(listed) > 2:
        every = tuple(Choice(0, kind) for kind in listed)
        worlds += [build(2, [every, every[-1:]], p, q, bare=1) for p, q in _SOME]
        worlds += [build(3, [every[::-1]], p, q) for p, q in _SOME]
    return sorted(worlds, key=lambda world: world.target.vocab)


def _of_one_kind(kind: DrawKind, styles: Sequence[tuple[str, str]]) -> list[World]:
    one, two, three = (tuple(Choice(0, kind, rank) for rank in range(count)) for count in (1, 2, 3))
    merged = (Choice(0, kind), Choice(1, kind), Choice(0, kind, 1))
    worlds = []
    for p, q in styles:
        worlds += [build(2, [one] * 3, p, q), build(2, [two, one], p, q, bare=1), build(3, [one] * 2, p, q)]
        worlds += [build(3, [two], p, q), build(4, [one], p, q)]
    for p, q in styles[:2]:
        worlds += [build(2, [two, two], p, q), build(3, [merged], p, q), build(4, [two], p, q)]
    for p, q in styles[:1]:
        worlds += [build(3, [three], p, q), build(3, [two, one], p, q, bare=0), build(4, [one] * 2, p, q)]
    return worlds


def _of_two_kinds(first: DrawKind, second: DrawKind, styles: Sequence[tuple[str, str]]) -> list[World]:
    a, b, again = Choice(0, first), Choice(0, second), Choice(0, first, 1)
    other = Choice(1, second)
    worlds = []
    for p, q in styles:
        worlds += [build(2, [(a,), (b,), (a,)], p, q), build(2, [(a, other, again)], p, q), build(3, [(a, b)], p, q)]
    worlds += [build(2, [(a, b), (b,)], *_FEW[0], bare=0), build(3, [(a, again), (b,)], *_FEW[0], bare=1)]
    return worlds
