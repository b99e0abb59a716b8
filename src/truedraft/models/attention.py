"""A packed forward's plan, and attention of each segment over its own cache: no row depends on the other rows.

Plain matrix products with a softmax in float32 or better give each query the same bits, however many queries share
them; fused kernels do not promise that. Sums over keys depend on the order of the terms, so in a tree each row's keys
and values are first gathered in the order of its own path, and a node gets the bits that it has in a chain
(docs/lossless.md, row invariance). Products run over longer spans than what is filled (`cache.key_span`), masked.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from truedraft.core import transfers
from truedraft.core.tree import TreeShape
from truedraft.errors import ModelError
from truedraft.models.base import Segment
from truedraft.models.cache import FIRST, WIDEST_GAP, key_span, stored_place

Position = TypeVar("Position", int, Tensor, NDArray[np.int64])
_LONGEST_KEPT = 512  # longest chain with a cached mask


class AttentionPattern(ABC):
    """The earlier positions that a layer may see: one run that ends with the query's own, and the first `sink`."""

    sink: int = 0

    @abstractmethod
    def first(self, position: Position) -> Position:
        """The first position of the run that a query at `position` may see; 0 or less if it sees all."""

    def reaches(self, positions: int) -> bool:
        """Whether a query at the last of `positions` positions sees all of them."""
        return self.first(positions - 1) <= self.sink

    def hides(self, query: Tensor, key: Tensor) -> Tensor:
        """Bool, broadcast from positions: True where a query may not see a key."""
        return (key > query) | ((key < self.first(query)) & (key >= self.sink))


@dataclass(frozen=True, slots=True)
class Full(AttentionPattern):
    """Every position."""

    def first(self, position: Position) -> Position:
        return position * 0


@dataclass(frozen=True, slots=True)
class Window(AttentionPattern):
    """The last `size` positions, the query's own included, and the first `sink` ones."""

    size: int
    sink: int = 0

    def first(self, position: Position) -> Position:
        return position - self.size + 1


@dataclass(frozen=True, slots=True)
class Chunk(AttentionPattern):
    """Positions in the same block of `size` positions."""

    size: int

    def first(self, position: Position) -> Position:
        return position - position % self.size


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer computes attention weights: scores are first bounded to softcap * tanh(score / softcap).

    `sinks` `[heads]` are logits that take part in the softmax and add nothing.
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Blocked:
    """`mask`, bool `[new, keys from first on]`, is True where a key is hidden; keys before `first` are seen by all."""

    first: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class ChainLayout:
    """New tokens in a sequence after the cached ones."""

    blocked: Blocked

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """Attention `[new, heads, value width]` of the new tokens' query `[heads, new, key width]`.

        Keys `[kv_heads, key width, span]` and values `[kv_heads, span, value width]`: cached, uncommitted, undefined.
        """
        heads, new, _ = query.shape
        weights = _weights(_scores(query, keys), self.blocked, scoring, values.dtype)
        mixed = _product(weights.flatten(1, 2), values)  # [kv_heads, group * new, value width]
        return mixed.reshape(heads, new, -1).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """New tokens of a tree after `length` cached ones; each root-to-leaf path is computed like a separate chain."""

    length: int
    paths: Paths
    blocked: Blocked

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """See `ChainLayout`."""
        (heads, new, _), (kv_heads, _, width) = query.shape, values.shape
        paths, count, slots = self.paths, len(self.paths.tails), self.length + self.paths.own.shape[1]
        padding = key_span(slots) - slots
        scores = _scores(query, keys)  # [kv_heads, group, new, span of the nodes]
        below = scores[..., self.length :].gather(-1, paths.own.expand(*scores.shape[:2], new, -1))
        masked = scores.new_zeros(1).expand(*scores.shape[:3], padding)
        scores = torch.cat([scores[..., : self.length], below, masked], dim=-1)
        weights = _weights(scores, self.blocked, scoring, values.dtype)
        group, span = weights.shape[1], weights.shape[3]
        # Rows are distributed to their paths. Each path has its own values: the context, its nodes', then zeros.
        dealt = weights.index_select(2, paths.dealt).view(kv_heads, group, count, -1, span)
        dealt = dealt.transpose(1, 2).reshape(kv_heads * count, -1, span)
        context = values[:, None, : self.length].expand(-1, count, -1, -1)
        nodes = values[:, self.length :][:, paths.tails]  # [kv_heads, paths, depth, value width]
        zeros = values.new_zeros(1).expand(kv_heads, count, padding, width)
        mixed = _product(dealt, torch.cat([context, nodes, zeros], dim=2).flatten(0, 1))
        mixed = mixed.reshape(kv_heads, count, group, -1, width).transpose(1, 2)
        return mixed.reshape(heads, -1, width).index_select(1, paths.back).transpose(0, 1)


SegmentLayout: TypeAlias = ChainLayout | TreeLayout


@dataclass(frozen=True, slots=True)
class Paths:
    """The root-to-leaf paths of a tree with new last nodes.

    Worked example: parents (-1, 0, 0, 2), all new. The leaves are 1 and 3, with paths (0, 1) and (0, 2, 3); padded to
    the depth 3 by their own ends. Rows 0 and 1 are dealt to the first path, rows 2 and 3 to the second.
    """

    own: Tensor  # [new, depth]: for each new node the nodes of its path, padded with itself (and masked)
    tails: Tensor  # [paths, depth]: nodes of each path
    dealt: Tensor  # [paths * longest]: for each path the rows that it computes, padded
    back: Tensor  # [new]: where in `dealt` each row is


@lru_cache(maxsize=1024)
def paths_of(shape: TreeShape, written: int, device: torch.device) -> Paths:
    """The paths of a tree; its nodes from `written` on are new."""
    new = range(written, len(shape))
    dealt: list[list[int]] = []
    tails: list[list[int]] = []
    done: set[int] = set()
    for leaf in shape.leaves:
        path = shape.path(leaf)
        mine = [node for node in path if node >= written and node not in done]
        if mine:
            done.update(mine)
            tails.append(_padded(path, shape.depth))
            dealt.append([node - written for node in mine])
    longest = max(map(len, dealt))
    back = [0] * len(new)
    for number, rows in enumerate(dealt):
        for place, row in enumerate(rows):
            back[row] = number * longest + place
    return Paths(
        torch.tensor([_padded(shape.path(node), shape.depth) for node in new], device=device),
        torch.tensor(tails, device=device),
        torch.tensor([row for rows in dealt for row in _padded(rows, longest)], device=device),
        torch.tensor(back, device=device),
    )


def layout_of(
    shape: TreeShape, written: int, length: int, pattern: AttentionPattern, device: torch.device, dropped: int = 0
) -> SegmentLayout:
    """The layout after `length` cached tokens (`dropped` before these are not) of a tree, new from `written` on."""
    slots = length + (len(shape) if shape.is_chain else shape.depth)
    span = key_span(slots)
    reaches = pattern.reaches(length + dropped + shape.depth)
    if shape.is_chain and reaches:
        return ChainLayout(Blocked(length, _later_nodes(len(shape), device)[written : len(shape), : span - length]))
    # Slots are not positions in a tree, so positions are compared; along a path the two are equal again.
    query = length + dropped - 1 + torch.tensor(shape.depths[written:], device=device)
    first = length if reaches else 0
    key = torch.arange(first, span, device=device)
    hidden = pattern.hides(query[:, None], torch.where(key < FIRST, key, key + dropped))
    if shape.is_chain:
        return ChainLayout(Blocked(first, hidden))
    return TreeLayout(length, paths_of(shape, written, device), Blocked(first, hidden))


def _later_nodes(length: int, device: torch.device) -> Tensor:
    """Slots that each node of a chain, from its first on, may not see: bool `[nodes or more, slots]`; mostly shared."""
    if length > _LONGEST_KEPT:
        return _triangle.__wrapped__(length, device)
    return _triangle(1 << (length - 1).bit_length(), device)


@lru_cache(maxsize=32)
def _triangle(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length + WIDEST_GAP, dtype=torch.bool, device=device).triu_(1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Batched product `[batch, rows, .]`, padded where few rows, or in float32 rows % 4, would use other kernels."""
    rows = left.shape[1]
    if left.dtype == torch.float32 and rows % 4:
        return torch.bmm(pad(left, (0, 0, 0, -rows % 4)), right)[:, :rows]
    if rows == 1:
        return torch.bmm(left.expand(-1, 2, -1), right)[:, :1]
    return torch.bmm(left, right)


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    heads, new, width = query.shape
    kv_heads = keys.shape[0]
    scores = _product(query.reshape(kv_heads, -1, width), keys)
    return scores.reshape(kv_heads, heads // kv_heads, new, -1)


def _weights(scores: Tensor, blocked: Blocked, scoring: Scoring, dtype: torch.dtype) -> Tensor:
    """Attention weights of the shape of `scores`, which are overwritten; computed in float32 or better."""
    plain = scoring.softcap is None and scoring.sinks is None
    if plain and math.frexp(scoring.scaling)[0] == 0.5:
        # A power of two scales without rounding, and softmax computes in float32 for any dtype.
        scores.mul_(scoring.scaling)
    else:
        scores = (scores if scores.dtype == torch.float64 else scores.float()).mul_(scoring.scaling)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores[..., blocked.first :].masked_fill_(blocked.mask, -torch.inf)
    if scoring.sinks is None:
        return torch.softmax(scores, dim=-1).to(dtype)
    kv_heads, group, new, _ = scores.shape
    sink = scoring.sinks.to(scores.dtype).view(kv_heads, group, 1, 1).expand(-1, -1, new, -1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1].to(dtype)


def _padded(items: list[int] | tuple[int, ...], length: int) -> list[int]:
    return [*items, *([items[-1]] * (length - len(items)))]


_MASKED_ROWS = 256  # rows with scores in memory at the same time


@dataclass(slots=True)
class SegmentPlan:
    """One segment in the pack: rows `start .. start + count - 1`, after `length` cached tokens (`dropped` are not)."""

    segment: Segment
    start: int
    count: int
    length: int
    device: torch.device
    dropped: int = 0
    layouts: dict[AttentionPattern, SegmentLayout] = field(default_factory=dict)

    def first(self, pattern: AttentionPattern) -> list[int]:
        """The first key/value position that each row sees; 0 or less if it sees all."""
        before, depths = self.length + self.dropped - 1, self.segment.shape.depths[self.segment.written :]
        return [stored_place(pattern.first(before + depth), self.dropped) for depth in depths]

    def layout(self, pattern: AttentionPattern) -> SegmentLayout:
        if pattern not in self.layouts:
            shape, written = self.segment.shape, self.segment.written
            self.layouts[pattern] = layout_of(shape, written, self.length, pattern, self.device, self.dropped)
        return self.layouts[pattern]


@dataclass(slots=True)
class ForwardPlan:
    """The plan of a packed forward."""

    segments: list[SegmentPlan]
    tokens: Tensor  # [1, total], int64: all new tokens, then padding
    positions: Tensor  # [1, total], int64: cached length + depth in the tree - 1, plus the cache's shift
    rows: Tensor  # [requested], int64: rows of the pack that need logits, then padding
    requested: int  # rows without padding
    furthest: int  # the largest position

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device, least_rows: int) -> ForwardPlan:
        """Concatenate the segments, reserve room in their caches, and pad to `least_rows` tokens and rows.

        Kernels treat very short products differently, and a row must not depend on how many share its forward. Raises
        ModelError: a segment has more or fewer tokens than new nodes.
        """
        plans: list[SegmentPlan] = []
        positions: list[int] = []
        rows: list[int] = []
        for segment in segments:
            written, cache = segment.written, segment.cache
            count = len(segment.shape) - written
            if len(segment.tokens) != count:
                raise ModelError(f"{len(segment.tokens)} tokens are given for {count} nodes; give one for each new one")
            cache.reserve(written + count, written)
            start = len(positions)
            plans.append(SegmentPlan(segment, start, count, cache.stored, device, cache.dropped))
            first = cache.length - 1 + cache.family.shift
            positions.extend(first + depth for depth in segment.shape.depths[written:])
            rows.extend(start + row for row in segment.rows)
        tokens = _on_device([segment.tokens for segment in segments], device)
        missing = least_rows - len(positions)
        if missing > 0:
            tokens.append(tokens[0].new_zeros(missing))
            positions.extend([0] * missing)
        requested = len(rows)
        if requested:
            rows.extend([rows[-1]] * (least_rows - requested))
        whole = torch.cat(tokens) if len(tokens) > 1 else tokens[0]
        places, logit_rows = transfers.upload(positions, device), transfers.upload(rows, device)
        return cls(plans, whole[None], places[None], logit_rows, requested, max(positions))

    def attend(
        self, call: int, pattern: AttentionPattern, scoring: Scoring, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attention of all segments, each over its own cache, which receives their keys and values.

        `call` is the attention call's index in the forward. Queries are `[heads, total, key width]`, keys and values
        `[kv_heads, total, width]`; returns `[total, heads, value width]`, with rows of padding undefined.
        """
        outputs: list[Tensor] = []
        for part in self.segments:
            rows = slice(part.start, part.start + part.count)
            keys, values = part.segment.cache.write(call, key[:, rows], value[:, rows])
            outputs.append(part.layout(pattern).attend(query[:, rows], keys, values, scoring))
        padding = query.shape[1] - sum(part.count for part in self.segments)
        if padding:
            outputs.append(outputs[0][:1].expand(padding, -1, -1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def attend_rows(
        self, call: int, pattern: AttentionPattern, scoring: Scoring, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """`attend` for `[total, heads, width]` each; returns `[total, heads * width]`."""
        by_head = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        return self.attend(call, pattern, scoring, *by_head).flatten(1)

    def attend_masked(
        self, call: int, mask: Tensor | None, scoring: Scoring, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """`attend` for one whole prompt under a mask `[total, total]`, True or 0 where seen; None is causal."""
        count = query.shape[1]
        keys, values = self.segments[0].segment.cache.write(call, key, value)
        hidden = torch.ones(count, keys.shape[2], dtype=torch.bool, device=query.device)
        if mask is None:
            hidden = hidden.triu(1)
        else:
            hidden[:, :count] = ~mask if mask.dtype == torch.bool else mask < 0
        outputs = [
            ChainLayout(Blocked(0, hidden[first : first + _MASKED_ROWS])).attend(
                query[:, first : first + _MASKED_ROWS], keys, values, scoring
            )
            for first in range(0, count, _MASKED_ROWS)
        ]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _on_device(tokens: list[Tensor], device: torch.device) -> list[Tensor]:
    if not transfers.waits(device):
        return tokens
    known = [each for each in tokens if not transfers.waits(each.device)]
    if not known:
        return tokens
    uploaded = iter(transfers.upload(torch.cat(known).tolist(), device).split([len(each) for each in known]))
    return [each if transfers.waits(each.device) else next(uploaded) for each in tokens]
