"""The walk down proposals, for a batch at once: where to look in the tables of p and q, and what is looked at.

A *slot* is a place where the target gives a distribution (the root, then each node); a *run* is what is judged there at
once: a single draw, or all candidates of a slot that has deterministic draws only. Slots, nodes, runs and the rows of
draft distributions are numbered through the requests of a batch, and the first run of a slot has the slot's number.
Where things stand depends on trees and draws alone, and these recur, so it is worked out once (`walk_plan`).

Small numbers are `transfers.Array`: of numpy on the CPU, of torch on a device, where nothing is read before all is.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.noise import Noise, Purpose, UniformKeys, uniforms
from truedraft.core.proposal import Draw, DrawKind, Proposal, deterministic_draws, drafted_tokens
from truedraft.core.transfers import Array
from truedraft.core.tree import TreeShape
from truedraft.verification.rule import HasKind

Ints = NDArray[np.int64]

_SENTINELS = (-1.0, 2.0)
"""Uniform numbers that accept always, behind the draws of a run, and never, where it is filled up."""
_ALWAYS, _NEVER, _FIRST_KEY = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """The runs of one proposal, numbered within it.

    Attributes:
        parents: of each slot the slot above; -1 of the root.
        depths: of each slot.
        keys: depth and index of each decision; siblings' subtrees share them, for a walk comes by one of them only.
        rounds: most runs that a walk sees rejected.
        laws: rows of draft distributions.
        nodes: `[runs, width]`: the nodes with the drawn tokens; of each slot its first run, then all others.
        key_of: `[runs, width]`: places in `_SENTINELS` and `keys`, one behind the other.
        law: `[runs]`: rows of draft distributions; -1 for candidates, and where nothing is drawn.
        following: `[runs]`: the next run of the slot; -1 behind the last.
        removed: `[runs, tokens]`: nodes whose tokens earlier draws took out of the distribution; -1 for none.
        joint: slots with one independent draw alone; see `is_joint`.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    keys: tuple[tuple[int, int], ...]
    rounds: int
    laws: int
    nodes: Ints
    key_of: Ints
    law: Ints
    following: Ints
    removed: Ints
    joint: tuple[int, ...]


def is_joint(draws: Sequence[HasKind]) -> bool:
    """Whether the draws of a slot are one independent draw, which block verification judges with those around it."""
    return len(draws) == 1 and draws[0].kind is DrawKind.INDEPENDENT


@lru_cache(maxsize=4096)
def _layout(shape: TreeShape, draws: tuple[tuple[Draw, ...], ...], laws: int) -> _Layout:
    slots = len(draws)
    depths, parents = (0, *shape.depths), (-1, *(parent + 1 for parent in shape.parents))
    keys: dict[tuple[int, int], int] = {}
    placed: list[tuple[int, int, int, int]] = []  # run, column, node and key of each draw
    law, following = [-1] * slots, [-1] * slots
    removed: dict[int, list[int]] = {}
    rejections = [1] * slots  # of the runs of a slot but the last, and of those above it
    for slot, own in enumerate(draws):
        fixed = all(draw.kind is DrawKind.DETERMINISTIC for draw in own)
        run = slot
        for index, draw in enumerate(own):
            key = keys.setdefault((depths[slot], index), _FIRST_KEY + len(keys))
            if index and not fixed:
                following[run] = len(law)
                run = len(law)
                law.append(-1)
                following.append(-1)
            placed.append((run, index if fixed else 0, draw.child, key))
            if draw.kind is not DrawKind.DETERMINISTIC:
                law[run] = draw.law
            if draw.kind is DrawKind.WITHOUT_REPLACEMENT and index:
                before = [each.child for each in own[:index] if each.law == draw.law and each.kind is draw.kind]
                if before:
                    removed[run] = before
        if slot:
            rejections[slot] = rejections[parents[slot]] + (0 if fixed else max(0, len(own) - 1))
        elif not fixed:
            rejections[0] = len(own)
    width = 1 + max((column for _, column, _, _ in placed), default=-1)
    nodes, key_of = np.zeros((len(law), width), np.int64), np.full((len(law), width), _NEVER)
    if placed:
        run_at, column_at, node_at, key_at = np.array(placed).T
        nodes[run_at, column_at], key_of[run_at, column_at] = node_at, key_at
    gone = np.full((len(law), max(map(len, removed.values()), default=0)), -1)
    for run, before in removed.items():
        gone[run, : len(before)] = before
    rounds = max(rejections) if placed else 0
    joint = tuple(slot for slot, own in enumerate(draws) if is_joint(own))
    return _Layout(
        parents, depths, tuple(keys), rounds, laws, nodes, key_of, np.array(law), np.array(following), gone, joint
    )


class WalkPlan:
    """Where everything of a batch stands.

    Attributes:
        requests: how many there are.
        slots: of each request.
        first_slots: of each request the slot where its walk begins.
        parents: of each slot the slot above; -1 of a root.
        depths: of each slot.
        joint: slots with one independent draw alone; see `is_joint`.
        drafts: whether anything is drawn.
        doublings: how often `jump_table` is doubled to reach the end of the longest path.
        rounds: most runs that a walk sees rejected; 0 where nothing is drafted.
        sampled: of each request that has draft distributions, how many of its slots begin with a draw from one.
        keys: of the decisions.
        draws: of each request, how many draws its slots are judged by first.
        roots: `[requests]`: `first_slots`.
        own: `[slots]`: their numbers.
        nodes: `[runs, width + 1]`: the nodes with the drawn tokens, filled up with others.
        key_of: `[runs, width + 1]`: which uniform numbers accept; always the last of each run, never what fills up.
        is_token: `[runs, width + 1]` bool: which of `nodes` are of the run.
        is_earlier: `[width + 1, width + 1]` bool: whether the second column comes before the first.
        is_end: `[runs, width + 1]` bool: the last column.
        child: `[runs, width + 1]`: the slot of each node, and last that of the run.
        law: `[runs]`: rows of draft distributions; -1 for candidates, and where nothing is drawn.
        is_drawn: `[runs]` bool.
        following: `[runs]`: the next run of the slot; -1 behind the last.
        removed: `[runs, tokens]`: nodes whose tokens earlier draws took out of the distribution, filled up with the
            first.
        reduces: whether there are any.
        is_reduced: `[runs]` bool: of which runs.
        draw_slot: `[draws]`: slots of the draws of first runs.
        draw_column: `[draws]`: their columns in a table `[runs, width + 1]`.
        draw_node: `[draws]`: their nodes.
        sampled_node: `[sampled]`: nodes of those from a distribution.
        first_sampled: `[sampled]`: slots that begin with a draw from a distribution.
        first_law: `[sampled]`: rows of these.
        candidates: `[runs, width]`: the nodes of each run, filled up with its first.
        has_laws: whether there are draws from distributions.
        has_candidates: whether there are runs of deterministic candidates.
    """

    def __init__(self, layouts: Sequence[_Layout], device: torch.device, *, waits: bool) -> None:
        assert waits == transfers.waits(device)
        self.requests = len(layouts)
        self.slots = [len(each.parents) for each in layouts]
        self.first_slots = list(itertools.accumulate(self.slots, initial=0))[:-1]
        shifted = list(zip(layouts, self.first_slots, strict=True))
        self.parents = [parent + first if parent >= 0 else -1 for each, first in shifted for parent in each.parents]
        self.depths = [depth for each in layouts for depth in each.depths]
        self.joint = [slot + first for each, first in shifted for slot in each.joint]
        keys = [(number, *key) for number, each in enumerate(layouts) for key in each.keys]
        self.keys = UniformKeys(*np.array(keys, np.int64).reshape(-1, 3).T.copy())
        self.rounds = max(each.rounds for each in layouts)
        self.drafts = self.rounds > 0
        self.doublings = (max(self.depths) - 1).bit_length() if self.drafts else 0
        self.device = device
        self.roots, self.own = self.array(np.array(self.first_slots)), self.array(np.arange(len(self.depths)))
        if self.drafts:
            self._tabulate(layouts)

    def _tabulate(self, layouts: Sequence[_Layout]) -> None:
        """Bring the runs of all requests together: of all slots the first, then all others."""
        width = max(each.nodes.shape[1] for each in layouts)
        gone = max(each.removed.shape[1] for each in layouts)
        behind = len(self.depths) + np.cumsum([0, *(len(each.law) - len(each.parents) for each in layouts)])
        keys = np.cumsum([0, *(len(each.keys) for each in layouts)])
        laws = np.cumsum([0, *(each.laws for each in layouts)])
        firsts: list[tuple[Ints, ...]] = []
        others: list[tuple[Ints, ...]] = []
        for number, each in enumerate(layouts):
            slots, first = len(each.parents), self.first_slots[number]
            runs = len(each.law)
            nodes, key_of = np.zeros((runs, width + 1), np.int64), np.full((runs, width + 1), _NEVER)
            own_width = each.nodes.shape[1]
            nodes[:, :own_width] = each.nodes
            key_of[:, :own_width] = each.key_of
            key_of[key_of >= _FIRST_KEY] += keys[number]
            key_of[:, -1] = _ALWAYS
            child = nodes + (first + 1)
            child[:slots, -1] = np.arange(first, first + slots)
            nodes += first - number
            law = np.where(each.law >= 0, each.law + laws[number], -1)
            following = np.where(each.following >= 0, each.following + (behind[number] - slots), -1)
            removed = np.full((runs, gone), -1)
            removed[:, : each.removed.shape[1]] = np.where(each.removed >= 0, each.removed + (first - number), -1)
            table = (nodes, key_of, child, law, following, removed)
            firsts.append(tuple(column[:slots] for column in table))
            others.append(tuple(column[slots:] for column in table))
        nodes, key_of, child, law, following, removed = (
            np.concatenate(parts) for parts in zip(*firsts, *others, strict=True)
        )
        slot_request = np.repeat(np.arange(self.requests), self.slots)
        nodes = np.minimum(nodes, len(self.depths) - self.requests - 1)  # what fills up may name none
        first_law = law[: len(self.depths)]
        sampled = first_law >= 0
        self.sampled = [
            int(np.count_nonzero(sampled[first : first + slots]))
            for first, slots, each in zip(self.first_slots, self.slots, layouts, strict=True)
            if each.laws
        ]
        drawn = (key_of[:, :-1] != _NEVER).any(axis=1) if width else np.zeros(len(law), np.bool_)
        self.width = width
        self.nodes, self.key_of, self.child = self.array(nodes), self.array(key_of), self.array(child)
        self.law, self.following, self.is_drawn = self.array(law), self.array(following), self.array(drawn)
        self.reduces = gone > 0
        self.is_reduced = self.array(np.asarray((removed >= 0).any(axis=1)))
        self.removed = self.array(np.where(removed >= 0, removed, removed[:, :1]).clip(0) if gone else removed)
        self.is_earlier = self.array(np.tri(width + 1, k=-1, dtype=np.bool_))
        self.is_token, self.is_end = self.array(key_of >= _FIRST_KEY), self.array(key_of == _ALWAYS)
        slot, column = (key_of[: len(self.depths), :-1] != _NEVER).nonzero()
        self.draws = np.bincount(slot_request[slot], minlength=self.requests).tolist()
        self.draw_slot, self.draw_column = self.array(slot), self.array(column)
        self.draw_node = self.array(nodes[slot, column])
        self.sampled_node = self.array(nodes[: len(self.depths)][sampled, 0])
        self.first_sampled, self.first_law = self.array(sampled.nonzero()[0]), self.array(first_law[sampled])
        # What fills up a run of candidates is its first again.
        self.candidates = self.array(np.where(key_of[:, :-1] >= _FIRST_KEY, nodes[:, :-1], nodes[:, :1]))
        self.has_candidates = bool((drawn & (law < 0)).any())
        self.has_laws = bool((law >= 0).any())

    def array(self, numbers: NDArray[np.generic]) -> Array:
        """Numbers where those of the batch are."""
        return transfers.array(numbers, self.device)


_plan = lru_cache(maxsize=512)(WalkPlan)


def walk_plan(proposals: Sequence[Proposal], device: torch.device) -> WalkPlan:
    """The plan of a batch; batches alike in trees and draws share one."""
    layouts = (_layout(own.tree.shape, own.draws, 0 if own.laws is None else len(own.laws)) for own in proposals)
    return _plan(tuple(layouts), device, waits=transfers.waits(device))


def children_plan(shapes: Sequence[TreeShape], device: torch.device) -> WalkPlan:
    """The plan of trees whose children are judged in their order, however they were drawn."""
    layouts = tuple(_layout(shape, deterministic_draws(shape), 0) for shape in shapes)
    return _plan(layouts, device, waits=transfers.waits(device))


def jump_table(plan: WalkPlan, stays: Array) -> Array:
    """Where a walk ends that comes to a slot, `[slots]`, if it follows the first draw of each first run that stays.

    Args:
        plan: of the batch.
        stays: `[slots, width + 1]` bool: which draws would stay; the last column always does: the walk ends there.
    """
    jump = plan.child[plan.own, transfers.first_true(stays)]
    for _ in range(plan.doublings):
        jump = jump[jump]
    return jump


class Rows:
    """Tables `[rows, vocab]` of one vocabulary as if they were one, their rows numbered through.

    On the CPU what is asked for is taken from each table; elsewhere they are brought together, for a copy on a device
    costs less than the host's taking part.
    """

    def __init__(self, tables: Sequence[Tensor], device: torch.device) -> None:
        self._tables = [table if table.device == device else table.to(device) for table in tables]
        self.vocab = tables[0].shape[-1] if tables else 0
        if len(tables) > 1 and transfers.waits(device):
            self._tables = [torch.cat(self._tables)]
        self._starts = list(itertools.accumulate(map(len, self._tables), initial=0)) if len(self._tables) > 1 else [0]

    def entries(self, rows: Array, columns: Array, counts: Sequence[int]) -> Array:
        """Numbers in the tables at some places, float64.

        Args:
            rows: `[places]`, one table's behind another's.
            columns: `[places]`.
            counts: how many of the places are in each table.
        """
        if len(self._tables) == 1:
            return transfers.entries(self._tables[0], rows, columns)
        found, first = [], 0
        for table, start, count in zip(self._tables, self._starts, counts, strict=False):
            if count:
                own = slice(first, first + count)
                found.append(transfers.entries(table, rows[own] - start, columns[own]))
                first += count
        return np.concatenate(found)

    def select(self, rows: Array) -> Tensor:
        """Whole rows `[rows, vocab]`."""
        if isinstance(rows, Tensor):
            return self._tables[0].index_select(0, rows)
        found = []
        for row in rows.tolist():
            table = bisect_right(self._starts, row) - 1
            first = row - self._starts[table]
            found.append(self._tables[table][first : first + 1])
        return found[0] if len(found) == 1 else torch.cat(found)


class Chosen:
    """Rows of tables that a mask `[rows]` names.

    On the CPU only these are worked on. A device cannot say how many they are without being waited for; there all rows
    are, and the mask says in the end which of them count.
    """

    def __init__(self, mask: Array) -> None:
        self._mask = mask
        self._places: Ints | None = None
        self._waits = isinstance(mask, Tensor)
        if not self._waits:
            places = mask.nonzero()[0]
            self._places = None if len(places) == len(mask) else places

    @property
    def are_none(self) -> bool:
        """Whether the mask surely names none."""
        return self._places is not None and not len(self._places)

    def of(self, table: Array) -> Array:
        """The rows of an array or tensor `[rows, ...]`."""
        if self._places is None:
            return table
        return table[torch.from_numpy(self._places)] if isinstance(table, Tensor) else table[self._places]

    def put(self, table: Array, rows: Array) -> Array:
        """The table `[rows, ...]` with these in place of `of(table)`."""
        if self._waits:
            return torch.where(self._mask.view(-1, *(1,) * (table.dim() - 1)), rows, table)
        if self._places is None:
            return rows
        if isinstance(table, Tensor):
            return table.index_copy(0, torch.from_numpy(self._places), rows)
        changed = table.copy()
        changed[self._places] = rows
        return changed


@dataclass(slots=True)
class Batch:
    """Proposals that are being judged, and all that is looked at.

    Attributes:
        plan: where it stands.
        proposals: one for each request.
        noise: of each request.
        device: of the target's distributions.
        p: these, a row for each slot.
        q: the drafts' distributions, a row for each that a proposal has.
        dtype: in which p and q are compared.
        tokens: `[nodes]`.
        uniforms: `[sentinels + keys]`, float64: the numbers that accept.
        weights: `[slots]`, float64: what a rule scales p by, where it does.
    """

    plan: WalkPlan
    proposals: Sequence[Proposal]
    noise: Sequence[Noise]
    device: torch.device
    p: Rows
    q: Rows
    dtype: torch.dtype
    tokens: Array
    uniforms: Array
    weights: Array | None = None

    @classmethod
    def of(cls, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> Batch:
        """A batch of at least one request; arguments as in `Rule.verify`."""
        if not len(proposals) == len(probs) == len(noise):
            raise ValueError(f"{len(proposals)} proposals, {len(probs)} tables and {len(noise)} noises are no batch")
        device, vocab = probs[0].device, probs[0].shape[-1]
        plan = walk_plan(proposals, device)
        drafted = [own.laws for own in proposals if own.laws is not None and len(own.laws)]
        dtype = functools.reduce(torch.promote_types, {each.dtype for each in (*probs, *drafted)})
        tokens = drafted_tokens([own.tree for own in proposals], vocab, device) if plan.drafts else plan.own
        numbers = transfers.array(np.concatenate([_SENTINELS, uniforms(noise, Purpose.ACCEPT, plan.keys)]), device)
        rows = Rows(probs, device), Rows(drafted, device)
        return cls(plan, proposals, noise, device, *rows, dtype, tokens, numbers)

    def first_looks(self) -> tuple[Array, Array]:
        """p and q `[slots, width + 1]`, float64, of the draws that are judged first; q is 1 where it is one-hot."""
        plan = self.plan
        shape = len(plan.depths), plan.width + 1
        p_x, q_x = transfers.full(shape, 0.0, self.device), transfers.full(shape, 1.0, self.device)
        p_x[plan.draw_slot, plan.draw_column] = self.p.entries(plan.draw_slot, self.tokens[plan.draw_node], plan.draws)
        if len(plan.first_sampled):
            q_x[plan.first_sampled, 0] = self.q.entries(plan.first_law, self.tokens[plan.sampled_node], plan.sampled)
        return p_x, q_x

    def is_repeated(self) -> Array:
        """Which candidates `[slots, width + 1]` carry the token of an earlier one of their slot."""
        tokens = self.tokens[self.plan.nodes[: len(self.plan.depths)]]
        return ((tokens[:, :, None] == tokens[:, None, :]) & self.plan.is_earlier).any(-1)

    def target(self, slots: Array) -> Tensor:
        """The target's distributions at some slots `[slots, vocab]`, scaled where the rule does so."""
        p = self.p.select(slots).to(self.dtype)
        return p if self.weights is None else p * self.vector(self.weights[slots])[:, None].to(self.dtype)

    def draft(self, runs: Array, removed: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """What the tokens of some runs were drawn from, `[runs, vocab]`; for candidates 1 at each of them.

        Args:
            runs: `[runs]`.
            removed: takes tokens `[runs, tokens]` out of distributions `[runs, vocab]`.
        """
        plan = self.plan
        law = plan.law[runs]
        sampled = Chosen(law >= 0)
        if plan.has_candidates:
            at = self.vector(self.tokens[plan.candidates[runs]])
            q = torch.zeros(len(law), self.p.vocab, dtype=self.dtype, device=self.device).scatter_(1, at, 1.0)
            if plan.has_laws and not sampled.are_none:
                q = sampled.put(q, self.q.select(sampled.of(law).clip(0)).to(self.dtype))
        else:
            q = self.q.select(law.clip(0)).to(self.dtype)
        if plan.reduces:
            reduced = Chosen(plan.is_reduced[runs])
            if not reduced.are_none:
                gone = self.vector(self.tokens[plan.removed[reduced.of(runs)]])
                q = reduced.put(q, removed(reduced.of(q), gone))
        return q

    def vector(self, numbers: Array) -> Tensor:
        """Small numbers as a tensor where the distributions are."""
        return numbers if isinstance(numbers, Tensor) else torch.from_numpy(numbers)

    def final_uniforms(self, requests: range, ends: Array) -> Tensor:
        """The numbers that draw the tokens at the ends of the walks of some requests, `[requests]` float64.

        Only the host makes such numbers, and on a device it does not know the ends: there it makes all that may serve.
        """
        if not isinstance(ends, Tensor):
            found = []
            for request, end in zip(requests, ends.tolist(), strict=True):
                draws = self.proposals[request].draws[end - self.plan.first_slots[request]]
                found.append(_final(self.noise[request], bool(draws), self.plan.depths[end]))
            return torch.tensor(found, dtype=torch.float64)
        table: list[float] = []
        for own, proposal in zip(self.noise, self.proposals, strict=True):
            depths = (0, *proposal.tree.shape.depths)
            places = [(bool(draws), depth) for draws, depth in zip(proposal.draws, depths, strict=True)]
            made = {place: _final(own, *place) for place in dict.fromkeys(places)}
            table += (made[place] for place in places)
        return transfers.upload(table, self.device, torch.float64)[ends]


def _final(noise: Noise, rejected: bool, depth: int) -> float:
    return noise.uniform(Purpose.RECOVERED if rejected else Purpose.BONUS, depth)
