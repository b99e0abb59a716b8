"""The walk down proposals, for a batch at once: indices into the tables of p and q, and the values at them.

A *tree row* is a place with a distribution of the target (the root, then each node). A *run* is a set of draws judged
together: a single draw, or all candidates of a row that has only deterministic draws. Rows, nodes, runs and draft
distributions are numbered through the requests of a batch, and the first run of a row has the row's number. Indices
depend only on trees and draws, which recur, so they are cached (`walk_plan`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.noise import Noise, Purpose, UniformKeys, uniforms
from truedraft.core.proposal import Draw, DrawKind, Proposal, drafted_tokens
from truedraft.core.tree import TreeShape
from truedraft.core.verdict import Verdict
from truedraft.verification.rule import HasKind, verdict_at

Ints = NDArray[np.int64]

Number = Any
"""Probabilities in float64: one, as a float, in the walk on the host; `[n]`, a tensor, in the walk of a batch."""


def larger(number: Number, other: Number) -> Number:
    """The elementwise maximum; the type of the first argument decides whether the numbers are tensors."""
    if not isinstance(number, Tensor):
        return max(number, other)
    return torch.maximum(number, other) if isinstance(other, Tensor) else number.clamp_min(other)


def either(flag: Number, yes: Number, no: Number) -> Number:
    """`yes` where the flag is set, else `no`."""
    return torch.where(flag, yes, no) if isinstance(flag, Tensor) else yes if flag else no


def is_joint(draws: Sequence[HasKind]) -> bool:
    """Whether a row has exactly one, independent draw, which block verification judges with its neighbours."""
    return len(draws) == 1 and draws[0].kind is DrawKind.INDEPENDENT


@dataclass(frozen=True, slots=True)
class _LaterRun:
    """A draw judged after an earlier one of its row was rejected; `removed` are nodes with tokens removed by then."""

    row: int
    index: int
    node: int
    dist: int
    removed: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """The runs of one proposal, numbered within it."""

    shape: TreeShape
    probs: int  # number of draft distributions
    draws: Ints  # [4, draws]: row, column, node and distribution (-1 for candidates) of the draws of first runs
    key_of: Ints  # [draws]: indices into `keys`
    keys: Ints  # [2, keys]: depth and index of decisions; shared by siblings' subtrees, because a walk visits only one
    later: tuple[_LaterRun, ...]  # the other runs, by tree row and then by draw
    rounds: int  # most runs that a walk can reject
    joint: tuple[int, ...]  # tree rows for which `is_joint` is true


@lru_cache(maxsize=1024)
def _layout(shape: TreeShape, draws: tuple[tuple[Draw, ...], ...], probs: int) -> _Layout:
    firsts: list[tuple[int, int, int, int]] = []
    later: list[_LaterRun] = []
    rejected = [0] * len(draws)  # most runs on the way to a tree row and there, but for the last one
    for row, own in enumerate(draws):
        above = rejected[shape.parents[row - 1] + 1] if row else 0
        fixed = all(draw.kind is DrawKind.DETERMINISTIC for draw in own)
        rejected[row] = above + (0 if fixed else len(own) - 1)
        for index, draw in enumerate(own):
            if fixed or not index:
                firsts.append((row, index, draw.child, draw.dist))
                continue
            alike = draw.kind is DrawKind.WITHOUT_REPLACEMENT
            before = own[:index] if alike else ()
            removed = tuple(each.child for each in before if each.dist == draw.dist and each.kind is draw.kind)
            later.append(_LaterRun(row, index, draw.child, draw.dist, removed))
    joint = tuple(row for row, own in enumerate(draws) if is_joint(own))
    table = np.array(firsts, np.int64).reshape(-1, 4).T
    depths, width = np.array((0, *shape.depths), np.int64), int(table[1].max(initial=0)) + 1
    found, key_of = np.unique(depths[table[0]] * width + table[1], return_inverse=True)
    keys = np.stack([found // width, found % width])
    rounds = 1 + max(rejected) if firsts else 0
    return _Layout(shape, probs, table, key_of, keys, tuple(later), rounds, joint)


class WalkPlan:
    """Indices of a batch.

    Attributes:
        first_rows: the root's tree row of each request.
        depths: one for each tree row.
        joint: tree rows for which `is_joint` is true.
        doublings: pointer doublings that reach the deepest node.
        rounds: most runs that a walk can reject; 0 where nothing is drafted.
        width: most candidates of a tree row.
        draws: of each request, number of draws of first runs.
        keys: of the decisions about these draws, then about later runs.
        draw_rows: tree rows of the draws of first runs; `draw_row` `[draws]` as an array.
        draw_key: `[draws]`: indices into `keys`.
        sampled_draws, sampled_dist: `[sampled]`: the draws from a distribution, and these distributions.
        is_drawn: `[rows]` bool: whether the row has draws.
        dist: `[runs]`: numbers of draft distributions; -1 for candidates, and for rows without draws.
        has_candidates: whether there are runs of deterministic candidates.
    """

    def __init__(self, layouts: Sequence[_Layout], device: torch.device) -> None:
        self.device = device
        self._layouts = layouts
        self.requests = len(layouts)
        self.rows = [len(each.shape) + 1 for each in layouts]
        self.first_rows = list(itertools.accumulate(self.rows, initial=0))[:-1]
        self.depths = [depth for each in layouts for depth in (0, *each.shape.depths)]
        self.joint = [row + first for each, first in self._placed for row in each.joint]
        self.rounds = max(each.rounds for each in layouts)
        self.drafts = self.rounds > 0
        self.doublings = (max(self.depths) - 1).bit_length() if self.drafts else 0
        self.roots, self.own = self.array(np.array(self.first_rows)), self.array(np.arange(len(self.depths)))
        self.draws = [each.draws.shape[1] for each in layouts]
        row, column, node, dist = self._first_draws()
        self.draw_rows: list[int] = row.tolist()
        depths = np.array(self.depths)
        self.width = int(column.max()) + 1 if self.drafts else 0
        requests = np.repeat(np.arange(self.requests), self.draws)
        counts = [each.keys.shape[1] for each in layouts]
        keys = np.concatenate([each.keys for each in layouts], axis=1)
        self.keys = UniformKeys(np.repeat(np.arange(self.requests), counts), *keys)
        shift = np.repeat(np.cumsum([0, *counts[:-1]]), self.draws)
        self.draw_key = self.array(np.concatenate([each.key_of for each in layouts]) + shift)
        self.draw_row, self.draw_column, self.draw_node = self.array(row), self.array(column), self.array(node)
        self.draw_child = self.array(node + requests + 1)
        is_sampled = dist >= 0
        self.sampled_draws, self.sampled_dist = self.array(is_sampled.nonzero()[0]), self.array(dist[is_sampled])
        first_dist, is_drawn = np.full(len(depths), -1), np.zeros(len(depths), np.bool_)
        first_dist[row], is_drawn[row] = dist, True
        self.is_drawn, self.dist = self.array(is_drawn), self.array(first_dist)
        self.has_candidates = not bool(is_sampled.all())
        if self.rounds > 1:
            self._add_later_runs(first_dist)

    @property
    def _placed(self) -> list[tuple[_Layout, int]]:
        return list(zip(self._layouts, self.first_rows, strict=True))

    @cached_property
    def parents(self) -> list[int]:
        return [up for each, first in self._placed for up in (-1, *(node + 1 + first for node in each.shape.parents))]

    def _first_draws(self) -> Ints:
        if self.requests == 1:
            return self._layouts[0].draws
        nodes = [first - number for number, first in enumerate(self.first_rows)]
        probs = [0, *itertools.accumulate(each.probs for each in self._layouts)]
        shift = np.repeat(np.array([self.first_rows, nodes, probs[:-1]]), self.draws, axis=1)
        row, column, node, dist = np.concatenate([each.draws for each in self._layouts], axis=1)
        return np.stack([row + shift[0], column, node + shift[1], np.where(dist >= 0, dist + shift[2], -1)])

    def _add_later_runs(self, first_dist: Ints) -> None:
        """Build the tables of all runs, first runs before later ones, if tree rows have several.

        Sets `dist`; `following` `[runs]`, the next run of the tree row or -1; `run_node`, `run_child` and `run_key`
        `[runs]`, arbitrary for first runs; `later` `[runs]`, their numbers, -1 for first runs; `is_reduced` `[runs]`
        bool and `removed` `[runs, tokens]`, nodes with tokens removed from the distribution, padded with the first;
        `reduces`.
        """
        rows = len(first_dist)
        following, dist, node, child = [-1] * rows, first_dist.tolist(), [0] * rows, [0] * rows
        key = [0] * rows
        keys = {place: number for number, place in enumerate(self.keys.listed)}
        removed: list[list[int]] = [[] for _ in range(rows)]
        last: dict[int, int] = {}  # the last run of a tree row
        first_dist_of = 0
        for number, (each, first) in enumerate(self._placed):
            for run in each.later:
                row = run.row + first
                following[last.get(row, row)] = last[row] = len(dist)
                dist.append(run.dist + first_dist_of if run.dist >= 0 else -1)
                following.append(-1)
                node.append(run.node + first - number)
                child.append(run.node + first + 1)
                removed.append([own + first - number for own in run.removed])
                place = number, self.depths[row], run.index
                key.append(keys.setdefault(place, len(keys)))
            first_dist_of += each.probs
        width = max(map(len, removed))
        self.reduces = width > 0
        self.later = self.array(np.array([-1] * rows + list(range(rows, len(dist)))))
        self.following, self.dist, self.run_node, self.run_child, self.run_key = (
            self.array(np.array(each)) for each in (following, dist, node, child, key)
        )
        self.is_reduced = self.array(np.array([bool(own) for own in removed]))
        filled = [[*own, *(own or [0])[:1] * (width - len(own))] for own in removed]
        self.removed = self.array(np.array(filled, np.int64).reshape(len(dist), width))
        self.keys = UniformKeys(*np.array(list(keys), np.int64).T.copy())
        self.has_candidates = self.has_candidates or any(run.dist < 0 for each in self._layouts for run in each.later)

    def array(self, numbers: NDArray[np.generic]) -> Tensor:
        return transfers.upload(numbers, self.device)


_plan = lru_cache(maxsize=512)(WalkPlan)


def walk_plan(proposals: Sequence[Proposal], device: torch.device) -> WalkPlan:
    """The plan of a batch, shared by batches with equal trees and draws."""
    layouts = (_layout(own.tree.shape, own.draws, 0 if own.probs is None else len(own.probs)) for own in proposals)
    return _plan(tuple(layouts), device)


def jump_table(plan: WalkPlan, stays: Tensor) -> Tensor:
    """The row `[rows]` where each row's walk along first accepted draws ends; `stays` `[draws]` are accepted."""
    columns = torch.where(stays, plan.draw_column, plan.width)  # [draws]
    first = plan.own.new_full((len(plan.own),), plan.width).scatter_reduce(0, plan.draw_row, columns, "amin")
    is_first = stays & (plan.draw_column == first[plan.draw_row])
    below = torch.where(is_first, plan.draw_child - plan.draw_row, 0)
    jump = plan.own.scatter_add(0, plan.draw_row, below)  # [rows]: one below where a draw stays, else itself
    for _ in range(plan.doublings):
        jump = jump[jump]
    return jump


@dataclass(slots=True)
class Batch:
    """Proposals under verification, and their tables."""

    plan: WalkPlan
    proposals: Sequence[Proposal]
    noise: Sequence[Noise]
    p: Tensor  # [rows, vocab]: the target's distributions
    q: Tensor  # [dists, vocab]: the draft's distributions
    dtype: torch.dtype  # in which p and q are compared
    tokens: Tensor
    uniforms: Tensor  # [keys], float64: the numbers that decide acceptance
    weights: Tensor | None = None  # [rows], float64: factors of p, or None

    @classmethod
    def of(cls, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> Batch:
        """A batch of at least one request; arguments as in `Rule.verify`."""
        device, vocab = probs[0].device, probs[0].shape[-1]
        plan = walk_plan(proposals, device)
        drafted = [own.probs.to(device) for own in proposals if own.probs is not None and len(own.probs)]
        dtype = functools.reduce(torch.promote_types, {each.dtype for each in (*probs, *drafted)})
        tokens = drafted_tokens([own.tree for own in proposals], vocab, device)
        numbers = transfers.upload(uniforms(noise, Purpose.ACCEPT, plan.keys), device)
        q = torch.cat(drafted) if drafted else probs[0][:0]
        return cls(plan, proposals, noise, torch.cat(list(probs)), q, dtype, tokens, numbers)

    def first_looks(self) -> tuple[Tensor, Tensor]:
        """p and q `[draws]`, float64, of the draws of first runs; q is 1 for a one-hot distribution."""
        plan = self.plan
        tokens = self.tokens[plan.draw_node]
        q_x = torch.ones(len(tokens), dtype=torch.float64, device=tokens.device)
        q_x[plan.sampled_draws] = _entries(self.q, plan.sampled_dist, tokens[plan.sampled_draws])
        return _entries(self.p, plan.draw_row, tokens), q_x

    def without_repeated(self, table: Tensor) -> Tensor:
        """Set entries of `[rows, width]` to 0 where an earlier draw of the row has the same token."""
        plan = self.plan
        tokens = (-1 - torch.arange(plan.width, device=table.device)).repeat(len(table), 1)  # [rows, width]
        tokens[plan.draw_row, plan.draw_column] = self.tokens[plan.draw_node]
        same = tokens[:, :, None] == tokens[:, None, :]  # [rows, width, width]
        return torch.where(same.tril(-1).any(-1), 0.0, table)

    def target(self, rows: Tensor) -> Tensor:
        p = self.p.index_select(0, rows).to(self.dtype)
        return p if self.weights is None else p * self.weights[rows][:, None].to(self.dtype)

    def draft(self, runs: Tensor, removed: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The draft distributions `[runs, vocab]` of some runs, 1 at each candidate; `removed` takes tokens out."""
        plan = self.plan
        dist = plan.dist[runs]
        if not len(self.q):
            return self._candidates(runs)
        q = self.q.index_select(0, dist.clamp_min(0)).to(self.dtype)
        if plan.has_candidates:
            q = torch.where((dist >= 0)[:, None], q, self._candidates(runs))
        if plan.rounds > 1 and plan.reduces:
            excluded = self.tokens[plan.removed[runs]]  # [runs, tokens]
            q = torch.where(plan.is_reduced[runs][:, None], removed(q, excluded), q)
        return q

    def _candidates(self, runs: Tensor) -> Tensor:
        """1 or more at the tokens of each run, `[runs, vocab]`."""
        plan = self.plan
        tokens, of_run = self.tokens[plan.draw_node], plan.draw_row == runs[:, None]  # [draws], [runs, draws]
        if plan.rounds > 1:
            tokens = torch.cat([tokens, self.tokens[plan.run_node]])
            of_run = torch.cat([of_run, plan.later == runs[:, None]], dim=1)
        q = torch.zeros(len(runs), self.p.shape[-1], dtype=self.dtype, device=runs.device)
        return q.scatter_add_(1, tokens.expand(len(runs), -1), of_run.to(self.dtype))

    def final_uniforms(self, ends: Tensor) -> Tensor:
        """The numbers `[requests]`, float64, that draw last tokens; the host makes all that may be needed."""
        table: list[float] = []
        for own, proposal in zip(self.noise, self.proposals, strict=True):
            depths = (0, *proposal.tree.shape.depths)
            places = [(bool(draws), depth) for draws, depth in zip(proposal.draws, depths, strict=True)]
            made = {place: _final(own, *place) for place in dict.fromkeys(places)}
            table += (made[place] for place in places)
        return transfers.upload(table, ends.device, torch.float64)[ends]


def _entries(table: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return table.take(torch.add(columns, rows, alpha=table.shape[-1])).double()


def _final(noise: Noise, rejected: bool, depth: int) -> float:
    return noise.uniform(Purpose.RECOVERED if rejected else Purpose.BONUS, depth)


def walks_ended(
    first_rows: Sequence[int], proposals: Sequence[Proposal], numbers: Sequence[Sequence[float]]
) -> list[Verdict]:
    """The verdicts of walks; `numbers` are the tree row where each ends, and the last tokens."""
    return [
        verdict_at(proposal, proposal.tree.shape.path(int(end) - root - 1), int(final))
        for proposal, root, end, final in zip(proposals, first_rows, *numbers, strict=True)
    ]
