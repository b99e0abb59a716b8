"""Requests over pages of keys and values, laid out as a kernel reads them, and attention over them by definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from support.trees import ancestor_mask
from truedraft.core.tree import TreeShape

PAGE = 16


@dataclass(frozen=True)
class Asked:
    """One request's share of a forward: its uncommitted nodes from `written` on are new."""

    length: int
    shape: TreeShape
    written: int = 0

    @property
    def end(self) -> int:
        return self.length + len(self.shape)

    @property
    def count(self) -> int:
        return len(self.shape) - self.written

    @property
    def positions(self) -> Tensor:
        """Of all keys: committed ones lie where they are, nodes as deep as they are."""
        return torch.tensor([*range(self.length), *(self.length - 1 + depth for depth in self.shape.depths)])

    def seen(self, window: int) -> Tensor:
        """By the definition: bool `[count, end]`."""
        committed = torch.ones(len(self.shape), self.length, dtype=torch.bool)
        seen = torch.cat([committed, ancestor_mask(self.shape)], 1)
        own = self.positions[self.length :, None]
        return (seen & (self.positions > own - window))[self.written :]


@dataclass(frozen=True)
class Paged:
    """Arguments of `paged_attention`, and the requests' own keys and values."""

    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    tiles: Tensor
    tile_end: Tensor
    length: Tensor
    until: Tensor
    first: Tensor
    path: Tensor
    scaling: float
    tile: int
    span: int
    own: tuple[tuple[Tensor, Tensor], ...]
    asked: tuple[Asked, ...]
    window: int

    def arguments(self) -> tuple[Tensor | float | int, ...]:
        """As the kernel takes them; the query is a copy."""
        return (
            self.query.clone(), self.keys, self.values, self.table, self.tiles, self.tile_end, self.length, self.until,
            self.first, self.path, self.scaling, self.tile, self.span,
        )  # fmt: skip

    def defined(self) -> Tensor:
        """The result of all rows of tiles by one product for each request, in float64."""
        outputs, row = [], 0
        for one, (keys, values) in zip(self.asked, self.own, strict=True):
            group = self.query.shape[1] // keys.shape[1]
            query = self.query[row : row + one.count].double()
            row += one.count
            seen = one.seen(self.window).to(query.device)
            keys, values = (each.double().nan_to_num().repeat_interleave(group, 1) for each in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query, keys) * self.scaling
            probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", probs, values).flatten(1))
        return torch.cat(outputs)

    def with_span(self, span: int) -> Paged:
        """The same with a wider table."""
        table = self.table.new_zeros(len(self.table), -(-span // PAGE))
        table[:, : self.table.shape[1]] = self.table
        return replace(self, table=table, span=span)


def lay_out(
    asked: Sequence[Asked],
    *,
    heads: int = 2,
    kv_heads: int = 1,
    width: int = 64,
    tile: int = 1,
    window: int = 1 << 20,
    words: int | None = None,
    padding: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> Paged:
    """Requests in a pool of scrambled pages. NaN are free pages, page 0, and what lies before and behind all that rows
    of a request see.

    Mask `words` have 64 bits; None is as many as the largest tree needs, none where all are chains. `padding` are rows
    and tiles. Keys, values and queries of the first request are drawn by `seed`, the next one's by one more.
    """
    if words is None:
        words = max(0 if one.shape.is_chain else -(-len(one.shape) // 64) for one in asked)
    span = max(one.end for one in asked)
    pages = [-(-one.end // PAGE) for one in asked]
    order = (torch.randperm(2 * sum(pages), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    pool = torch.full((2, 2 * sum(pages) + 1, PAGE, kv_heads, width), torch.nan)
    rows = sum(one.count for one in asked)
    table = torch.zeros(len(asked), -(-span // PAGE), dtype=torch.int32)
    until, first = torch.ones(rows + padding, dtype=torch.int32), torch.zeros(rows + padding, dtype=torch.int32)
    path = torch.zeros(rows + padding, words, dtype=torch.int64)
    queries, own, tiles = [], [], []
    row = 0
    for number, one in enumerate(asked):
        random = torch.Generator().manual_seed(seed + number)
        both = torch.randn(2, one.end, kv_heads, width, generator=random)
        seen = one.seen(window)
        reached = seen.any(0).nonzero()[:, 0]
        both[:, : reached.min()] = torch.nan
        both[:, reached.max() + 1 :] = torch.nan
        queries.append(torch.randn(one.count, heads, width, generator=random))
        own.append((both[0].to(device), both[1].to(device)))
        mine = [order.pop() for _ in range(pages[number])]
        table[number, : len(mine)] = torch.tensor(mine)
        places = torch.tensor(mine)[torch.arange(one.end) // PAGE] * PAGE + torch.arange(one.end) % PAGE
        pool.flatten(1, 2)[:, places] = both
        tiles += [(number, row + at, min(tile, one.count - at)) for at in range(0, one.count, tile)]
        for new, position in enumerate(one.positions[one.length + one.written :].tolist()):
            first[row] = max(0, position - window + 1)
            until[row] = position + 1 if one.shape.is_chain else one.length
            if not one.shape.is_chain:
                nodes = seen[new, one.length :].nonzero()[:, 0].tolist()
                for node in nodes:
                    bit = 1 << node % 64
                    path[row, node // 64] |= bit - (1 << 64) if node % 64 == 63 else bit
            row += 1
    queries.append(torch.randn(padding, heads, width, generator=torch.Generator().manual_seed(99)))
    ends = [*(asked[number].end for number, *_ in tiles), *(0,) * padding]
    tiles += [(0, 0, 0)] * padding
    numbers = (
        *(torch.tensor(each, dtype=torch.int32) for each in (tiles, ends, [one.length for one in asked])), until, first,
        path,
    )  # fmt: skip
    return Paged(
        torch.cat(queries).to(device), pool[0].to(device), pool[1].to(device), table.to(device),
        *(each.to(device) for each in numbers), width**-0.5, tile, span, tuple(own), tuple(asked), window,
    )  # fmt: skip
