"""Proposals: a token tree, and for each tree row the ordered draws that made its children."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from truedraft.core import fused, transfers
from truedraft.core.budget import Budget
from truedraft.core.tree import GrowingTree, TokenTree, TreeShape, shape_of
from truedraft.errors import DrafterError


class DrawKind(Enum):
    """How a child's token was chosen."""

    INDEPENDENT = "independent"
    WITHOUT_REPLACEMENT = "without replacement"
    DETERMINISTIC = "deterministic"
    COUPLED = "coupled"

    __hash__ = object.__hash__  # draws are looked up at every step, and the hash of an Enum is written in Python


class Draw(NamedTuple):
    """One draw at a tree row.

    Attributes:
        child: node of the drawn token. Two draws of one tree row may have one child: both count.
        dist: row of `Proposal.probs` that the token was drawn from, before any removal; -1 for a one-hot distribution.
        kind: without replacement, the distribution loses the tokens of earlier draws from the same distribution.
    """

    child: int
    dist: int
    kind: DrawKind


@dataclass(frozen=True)
class Proposal:
    """A drafter's proposal for one request.

    Attributes:
        draws: for each tree row (the root, then each node) its draws, in the order in which they are judged, fixed
            before anything is drawn.
        probs: `[probs, vocab]`: the tensor that was sampled from, or None when every draw is deterministic.
        confidence: the drafter's own probability of each node's token, where computed.
    """

    tree: TokenTree
    draws: tuple[tuple[Draw, ...], ...]
    probs: Tensor | None = None
    confidence: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.draws) != len(self.tree) + 1:
            nodes = len(self.tree)
            raise ValueError(f"a tree of {nodes} nodes has {nodes + 1} tree rows, got {len(self.draws)}")

    def check(self) -> None:
        """Raise ValueError when draws and tree contradict each other."""
        check_draws(self.tree.shape, self.draws, 0 if self.probs is None else self.probs.shape[0])

    @property
    def kinds(self) -> frozenset[DrawKind]:
        return frozenset(draw.kind for draws in self.draws for draw in draws)

    def without_draws(self, rows: Collection[int]) -> Proposal:
        """The same tree, without the draws of some tree rows: their nodes stay, but rules ignore them."""
        draws = tuple(() if row in rows else own for row, own in enumerate(self.draws))
        return Proposal(self.tree, draws, self.probs)

    @classmethod
    def empty(cls) -> Proposal:
        return _EMPTY

    @classmethod
    def deterministic(cls, tree: TokenTree) -> Proposal:
        return cls(tree, deterministic_draws(tree.shape))

    @classmethod
    def chain(cls, tokens: Tensor, probs: Tensor, kind: DrawKind = DrawKind.INDEPENDENT) -> Proposal:
        """One path, token i drawn from row i of `probs` `[length, vocab]`."""
        draws = (*((Draw(i, i, kind),) for i in range(len(tokens))), ())
        return cls(TokenTree.chain(tokens), draws, probs)


@lru_cache(maxsize=1024)
def check_draws(shape: TreeShape, draws: tuple[tuple[Draw, ...], ...], probs: int) -> frozenset[DrawKind]:
    """The kinds of draws; raises ValueError if a tree row's draws do not match its children, or the distributions."""
    for row, own in enumerate(draws):
        if {draw.child for draw in own} != set(shape.children[row]):
            raise ValueError(f"the draws of tree row {row} name other nodes than its children")
        for draw in own:
            if draw.dist >= probs or (draw.dist < 0) != (draw.kind is DrawKind.DETERMINISTIC):
                raise ValueError(
                    f"{draw} of tree row {row} names no distribution of this proposal ({probs} distributions)"
                )
    return frozenset(draw.kind for own in draws for draw in own)


def check_proposal(name: str, proposal: Proposal, budget: Budget, judged: frozenset[DrawKind], vocab: int) -> None:
    """Refuse a proposal that a rule would judge wrongly, or that exceeds a budget; `check_ids` checks the ids.

    Raises:
        DrafterError: describes the problem.
        ValueError: draws and tree contradict each other.
    """
    tree = proposal.tree
    if not len(tree):
        return
    if tree.shape.depth > budget.depth or len(tree) > budget.nodes:
        raise DrafterError(
            f"drafter {name!r} proposed {len(tree)} nodes, {tree.shape.depth} deep; its budget was {budget}"
        )
    kinds = check_draws(tree.shape, proposal.draws, 0 if proposal.probs is None else proposal.probs.shape[0])
    if not kinds <= judged:
        names = ", ".join(sorted(kind.value for kind in kinds - judged))
        raise DrafterError(f"drafter {name!r} made {names} draws, which the rule cannot judge")
    probs = proposal.probs
    if probs is not None and (probs.shape[1:] != (vocab,) or not probs.is_floating_point()):
        raise DrafterError(
            f"drafter {name!r} drew from distributions of {probs.dtype} and shape {tuple(probs.shape)}; they are "
            f"floats of [distributions, {vocab}]"
        )
    if tree.tokens.shape != (len(tree),) or tree.tokens.dtype != torch.int64:
        shape = tuple(tree.tokens.shape)
        raise DrafterError(f"drafter {name!r} gave {tree.tokens.dtype} of shape {shape} for {len(tree)} nodes' ids")


def check_ids(name: str, tree: TokenTree, vocab: int) -> None:
    """Raise DrafterError for ids that do not exist, which it lists; waits for ids on a device."""
    ids = tree.host_ids
    if ids and not 0 <= min(ids) <= max(ids) < vocab:
        raise DrafterError(f"drafter {name!r} proposed ids outside 0 to {vocab - 1}: {ids}")


@lru_cache(maxsize=1024)
def deterministic_draws(shape: TreeShape) -> tuple[tuple[Draw, ...], ...]:
    """The draws of each tree row where every node is a chosen candidate."""
    return tuple(tuple(map(_candidate, nodes)) for nodes in shape.children)


@lru_cache(maxsize=1024)
def _candidate(child: int) -> Draw:
    return Draw(child, -1, DrawKind.DETERMINISTIC)


_ROUNDING = 1e-4
"""Largest distance from 1 of the sum of a distribution in single precision; half precision adds its own unit."""


class DrawCheck:
    """Checks on a device whether draws could have been made as they claim, which rules rely on.

    Only draws that are judged with a distribution are checked. Ids on the host must exist; ids on a device are clamped
    to the vocabulary. The host must read `wanted`: the sums and least entries of the distributions, and the drawn
    entries.
    """

    def __init__(self, proposals: Sequence[Proposal], device: torch.device) -> None:
        self._drawn: list[tuple[int, int, int]] = []  # for each checked draw: proposal, tree row, distribution
        self.wanted: Sequence[Tensor] = ()
        nodes: list[int] = []
        tables: list[Tensor] = []
        trees: list[TokenTree] = []
        first_dist = first_node = 0
        for number, proposal in enumerate(proposals):
            if proposal.probs is None:
                continue
            for row, draws in enumerate(proposal.draws):
                for draw in draws:
                    if draw.kind is DrawKind.INDEPENDENT or draw.kind is DrawKind.WITHOUT_REPLACEMENT:
                        self._drawn.append((number, row, first_dist + draw.dist))
                        nodes.append(first_node + draw.child)
            tables.append(proposal.probs.to(device))
            trees.append(proposal.tree)
            first_dist += len(proposal.probs)
            first_node += len(proposal.tree)
        if self._drawn:
            probs = tables[0] if len(tables) == 1 else torch.cat(tables)
            sum_in, self._slack = _precision(probs.dtype)
            given = probs.take(self._places(nodes, trees, probs))
            # With NaN or infinity in a distribution its sum is not near 1.
            fits = fused.fit(probs)
            of_rows = fused.sums_and_least(probs) if fits else (probs.sum(dim=-1, dtype=sum_in), probs.amin(dim=-1))
            self.wanted = *of_rows, given

    def _places(self, nodes: Sequence[int], trees: Sequence[TokenTree], probs: Tensor) -> Tensor:
        vocab, device = probs.shape[-1], probs.device
        if not any(tree.on_device for tree in trees):
            ids = [token for tree in trees for token in tree.host_ids]
            places = [dist * vocab + ids[node] for (_, _, dist), node in zip(self._drawn, nodes, strict=True)]
            return transfers.upload(places, device)
        dists, at = transfers.upload([*(dist for _, _, dist in self._drawn), *nodes], device).view(2, -1)
        return dists * vocab + drafted_tokens(trees, vocab, device)[at]

    def unsound(self, numbers: Sequence[Sequence[float]]) -> dict[int, set[int]]:
        """From the numbers in `wanted`: by proposal, the tree rows with draws that cannot be as claimed."""
        found: dict[int, set[int]] = {}
        if not self._drawn:
            return found
        sums, least, given = numbers
        for (proposal, row, dist), mass in zip(self._drawn, given, strict=True):
            if not (abs(sums[dist] - 1.0) <= self._slack and least[dist] >= 0.0 and mass > 0.0):
                found.setdefault(proposal, set()).add(row)
        return found


def drafted_tokens(trees: Sequence[TokenTree], vocab: int, device: torch.device) -> Tensor:
    """The tokens of some trees `[nodes]`; ids on a device are clamped to the vocabulary."""
    parts = [
        tree.tokens.to(device).clamp(0, vocab - 1) if tree.on_device else transfers.upload(tree.host_ids, device)
        for tree in trees
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@lru_cache
def _precision(dtype: torch.dtype) -> tuple[torch.dtype, float]:
    return torch.promote_types(dtype, torch.float32), _ROUNDING + torch.finfo(dtype).eps


_EMPTY = Proposal(TokenTree.empty(), ((),))


def merge(proposals: Sequence[Proposal]) -> tuple[Proposal, list[tuple[int, ...]]]:
    """Merge proposals for one request into one tree; at each tree row the draws of earlier proposals come first.

    Nodes with equal paths become one. Draws are kept even where they repeat a token: each was drawn, so each is judged.
    Exact, because whether a draw exists depends only on tokens above it (docs/concepts.md). Waits for a device.

    Worked example: the chains [5, 7] and [5, 8] merge into node 0 = 5 with two draws at the root that both name it, and
    its children 1 = 7 and 2 = 8; the nodes of the first became (0, 1) and those of the second (0, 2).

    Returns:
        The merged proposal, and for each given one its nodes in the merged tree.

    Raises:
        ValueError: no proposals.
    """
    if not proposals:
        raise ValueError("merge needs at least one proposal")
    merged = GrowingTree()
    draws: list[list[Draw]] = [[]]
    probs: list[Tensor] = []
    nodes: list[tuple[int, ...]] = []
    first_dist = 0
    for proposal in proposals:
        ids, node_of = proposal.tree.host_ids, [-1]
        for node, parent in enumerate(proposal.tree.shape.parents):
            node_of.append(merged.add(ids[node : node + 1], node_of[parent + 1]))
        draws += ([] for _ in range(len(merged.tokens) + 1 - len(draws)))
        for row, own in enumerate(proposal.draws):
            draws[node_of[row] + 1].extend(
                Draw(node_of[d.child + 1], d.dist if d.dist < 0 else d.dist + first_dist, d.kind) for d in own
            )
        if proposal.probs is not None:
            probs.append(proposal.probs)
            first_dist += proposal.probs.shape[0]
        nodes.append(tuple(node_of[1:]))
    tree = TokenTree.of_ids(merged.tokens, shape_of(tuple(merged.parents)))
    return Proposal(tree, tuple(map(tuple, draws)), torch.cat(probs) if probs else None), nodes
