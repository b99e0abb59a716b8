"""One packed forward: the rows of each segment's tokens, their positions, and what they may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.errors import ModelError
from truedraft.models.attention import AttentionPattern, Blocked, ChainLayout, Scoring, SegmentLayout, layout_of
from truedraft.models.base import Segment
from truedraft.models.cache import stored_place

_MASKED_ROWS = 256  # rows with scores in memory at the same time


@dataclass(slots=True)
class SegmentPlan:
    """One segment in the pack: rows `start .. start + count - 1`, after `length` cached tokens, on a device.

    `dropped` tokens of the text are not cached (`truedraft.models.cache.bounded`).
    """

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
    """The plan of a packed forward.

    Attributes:
        tokens: `[1, total]`, int64: all new tokens, then padding.
        positions: `[1, total]`, int64: cached length + depth in the tree - 1, plus the cache's shift.
        rows: `[requested]`, int64: rows of the pack that need logits, then padding.
        requested: number of `rows` without padding.
        furthest: the largest position.
    """

    segments: list[SegmentPlan]
    tokens: Tensor
    positions: Tensor
    rows: Tensor
    requested: int
    furthest: int

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device, least_rows: int) -> ForwardPlan:
        """Concatenate the segments, reserve room in their caches, and pad to `least_rows` tokens and rows.

        Kernels treat very short products differently, and a row must not depend on how many share its forward
        (docs/lossless.md, row invariance).

        Raises:
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
