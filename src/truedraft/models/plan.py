"""The plan of one packed forward: where each segment's tokens are, at which positions, and what they may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truedraft.cache import RequestCache
from truedraft.models.base import Segment
from truedraft.models.patterns import AttentionPattern


@dataclass(frozen=True, slots=True)
class Blocked:
    """Keys that queries may not see.

    Attributes:
        first: the first key that any query may not see; all before it are seen by all.
        mask: bool `[new, keys from first on]`, True where the key is hidden.
    """

    first: int
    mask: Tensor


@dataclass(slots=True)
class SegmentPlan:
    """One segment in the pack: rows `start .. start + count - 1`, behind `length` cached tokens."""

    segment: Segment
    start: int
    count: int
    length: int
    blocked: dict[AttentionPattern, Blocked | None] = field(default_factory=dict)

    @property
    def cache(self) -> RequestCache:
        """The segment's cache."""
        return self.segment.cache

    def blocked_for(self, pattern: AttentionPattern) -> Blocked | None:
        """What a pattern hides, computed once for all layers that share it; None when nothing is hidden."""
        if pattern not in self.blocked:
            self.blocked[pattern] = self._block(pattern)
        return self.blocked[pattern]

    def _block(self, pattern: AttentionPattern) -> Blocked | None:
        shape = self.segment.shape
        device = self.segment.tokens.device
        reaches = pattern.reaches(self.length + shape.depth)
        if self.count == 1 and shape.is_chain and reaches:
            return None
        first = self.segment.written
        seen = shape.ancestor_mask[first:].to(device)  # [new, uncommitted]
        if reaches:
            return Blocked(self.length, ~seen)
        # Slots are not positions in a tree, so windows and chunks go by position.
        below = self.length - 1 + torch.tensor(shape.depths, device=device)
        key = torch.cat([torch.arange(self.length, device=device), below])
        context = seen.new_ones(self.count, self.length)
        return Blocked(0, ~(torch.cat([context, seen], dim=1) & pattern.allowed(below[first:], key)))


@dataclass(slots=True)
class ForwardPlan:
    """All that a packed forward needs to know.

    Attributes:
        segments: the segments' plans.
        tokens: `[1, total]`, int64: all new tokens, then padding.
        positions: `[1, total]`, int64: cached length + depth in the tree.
        rows: `[wanted]`, int64: rows of the pack that need logits, then padding.
        wanted: how many of `rows` were asked for.
    """

    segments: list[SegmentPlan]
    tokens: Tensor
    positions: Tensor
    rows: Tensor
    wanted: int

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device, least_rows: int) -> ForwardPlan:
        """Lay out the segments one behind another and reserve room in their caches.

        Args:
            segments: the requests' shares.
            device: where tokens and positions go.
            least_rows: pad to this many tokens and rows. Kernels treat very short products differently, and a row
                must not depend on how many share its forward (DESIGN section 2, row invariance).
        """
        plans: list[SegmentPlan] = []
        positions: list[int] = []
        rows: list[int] = []
        for segment in segments:
            written = segment.written
            count = len(segment.shape) - written
            length = segment.cache.length
            segment.cache.reserve(written + count, written)
            start = len(positions)
            plans.append(SegmentPlan(segment, start, count, length))
            positions.extend(length - 1 + depth for depth in segment.shape.depths[written:])
            rows.extend(start + row for row in segment.rows)
        tokens = [segment.tokens for segment in segments]
        missing = least_rows - len(positions)
        if missing > 0:
            tokens.append(tokens[0].new_zeros(missing))
            positions.extend([0] * missing)
        wanted = len(rows)
        if wanted:
            rows.extend([rows[-1]] * (least_rows - wanted))
        return cls(
            plans,
            (torch.cat(tokens) if len(tokens) > 1 else tokens[0])[None],
            torch.tensor([positions], device=device),
            torch.tensor(rows, dtype=torch.int64, device=device),
            wanted,
        )
