"""What each token sees, worked out from a few numbers, against the definition by ancestors and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor

from support.pairwise import pairwise
from support.trees import ancestor_mask
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.models.attention import AttentionPattern, Chunk, Full, Window
from truedraft.models.backends.graphs.attention import additive_mask, rows_of_requests, visible
from truedraft.models.backends.graphs.batch import Bucket, Inputs, PagedBatch, PagedSegment, load_in_a_row, path_bits
from truedraft.models.base import Segment
from truedraft.models.cache import PAGE, PagePool, Pages, PageTable, RequestCache

CPU = torch.device("cpu")
TREE = TreeShape((-1, 0, 0, 1, 2, 2, 4))
PATTERNS: tuple[AttentionPattern, ...] = (Full(), Window(4), Chunk(6))


def large_tree(nodes: int) -> TreeShape:
    """Two branches below a root, dealt out in turns, so that paths reach across words of 64 nodes."""
    return TreeShape((-1, 0, 0, *range(1, nodes - 2)))


def cache_of(pool: PagePool, length: int, shape: TreeShape, written: int) -> RequestCache:
    """A cache that holds `length` committed tokens and room for the tree."""
    cache = pool.acquire()
    cache.reserve(length)
    cache.commit(range(length))
    cache.reserve(written)
    cache.reserve(len(shape), written)
    return cache


def batch_of(requests: Sequence[tuple[int, TreeShape, int]], *, exact: bool = False) -> PagedBatch:
    """Requests by (committed tokens, tree, nodes already written)."""
    pool = PagePool(Pages(1, 1, 4, torch.float32, CPU), 1024)
    parts = []
    for length, shape, written in requests:
        cache = cache_of(pool, length, shape, written)
        count = len(shape) - written
        segment = Segment(cache, torch.arange(count), shape, range(count), written)
        assert isinstance(cache.storage, PageTable)
        parts.append(PagedSegment(segment, cache.storage))
    return PagedBatch.exact(parts, PATTERNS) if exact else PagedBatch.recorded(parts, PATTERNS)


def all_loaded(batches: Sequence[PagedBatch], *others: PagedBatch) -> list[Inputs]:
    """Batches, or others in the buckets of these, in one block of memory."""
    inputs = Inputs.in_a_row([batch.bucket for batch in batches], len(batches[0].patterns), CPU)
    load_in_a_row(inputs, others or batches)
    return inputs


def loaded(batch: PagedBatch) -> Inputs:
    return all_loaded([batch])[0]


def assert_equal_but_for(found: Inputs, expected: Inputs, *chosen_on_the_device: str) -> None:
    for field in fields(expected.numbers):
        if field.name not in chosen_on_the_device:
            assert getattr(found.numbers, field.name).equal(getattr(expected.numbers, field.name)), field.name


def defined(length: int, shape: TreeShape, written: int, span: int, pattern: AttentionPattern) -> Tensor:
    """The definition: committed tokens, own ancestors and oneself, as far as positions are in reach."""
    nodes = len(shape)
    seen = torch.zeros(nodes, span, dtype=torch.bool)
    seen[:, :length] = True
    seen[:, length : length + nodes] = ancestor_mask(shape)
    positions = torch.tensor([length - 1 + depth for depth in shape.depths])
    keys = torch.cat([torch.arange(length), positions])
    seen[:, : length + nodes] &= keys >= pattern.first(positions)[:, None]
    return seen[written:]


REQUESTS = {
    "a prompt": [(0, chain_shape(7), 0)],
    "one token": [(5, chain_shape(1), 0)],
    "chains": [(5, chain_shape(4), 0), (0, chain_shape(1), 0), (90, chain_shape(3), 1)],
    "a tree": [(5, TREE, 0)],
    "a tree with two first nodes": [(5, TreeShape((-1, -1, 0, 1, 1)), 0), (0, TreeShape((-1, -1)), 0)],
    "a level of a tree": [(5, TREE, 3)],
    "all kinds": [(30, TREE, 0), (7, chain_shape(8), 0), (0, TREE, 1), (250, chain_shape(1), 0)],
    "a tree of two words": [(9, large_tree(70), 0)],
    "the last level of three words": [(9, large_tree(150), 130), (2, TREE, 0)],
}


@pytest.mark.parametrize(("name", "number", "exact"), pairwise(REQUESTS, range(len(PATTERNS)), [False, True]))
def test_tokens_see_their_own_path(name: str, number: int, exact: bool) -> None:
    requests = REQUESTS[name]
    batch = batch_of(requests, exact=exact)
    seen = visible(loaded(batch), number)
    bucket = batch.bucket
    assert seen.shape == (bucket.requests, bucket.tokens, bucket.span)
    for row, (length, shape, written) in enumerate(requests):
        expected = defined(length, shape, written, bucket.span, PATTERNS[number])
        assert bool(expected.any(-1).all()), "a row that sees nothing would be NaN"
        assert seen[row, : len(expected)].equal(expected)


@pytest.mark.parametrize("exact", [False, True])
def test_every_token_is_placed_and_written_where_it_belongs(exact: bool) -> None:
    requests = REQUESTS["all kinds"]
    batch = batch_of(requests, exact=exact)
    inputs = loaded(batch)
    numbers, bucket = inputs.numbers, batch.bucket
    source = rows_of_requests(inputs)
    row = 0
    for request, (length, shape, written) in enumerate(requests):
        table = batch.parts[request].table.table.tolist()
        assert numbers.table[request, : len(table)].tolist() == table
        assert (int(numbers.length[request]), int(numbers.end[request])) == (length, length + len(shape))
        for i in range(len(shape) - written):
            place = length + written + i
            assert int(numbers.positions[row]) == length - 1 + shape.depths[written + i]
            assert int(numbers.target[row]) == table[place // PAGE] * PAGE + place % PAGE
            assert int(numbers.logit_rows[row]) == row
            assert (int(source[request, i]), int(numbers.request[row])) == (row, request)
            row += 1
    assert batch.logit_rows == row and bool((numbers.target[row:] < PAGE).all()), "padding goes to the scratch page"
    assert bucket.rows == (row if exact else 32)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_later_forward_of_chains_is_the_one_that_segments_would_ask_for(level: int) -> None:
    """It is worked out from the first forward's segments, beside the others in one block."""
    requests = [(5, 4, 0), (0, 1, 0), (90, 3, 1), (30, 2, 0), (15, 1, 0)]
    first = batch_of([(length, chain_shape(count + 4), count + 3) for length, count, _ in requests])  # makes room
    parts, told = [], []
    for part, (_, count, written) in zip(first.parts, requests, strict=True):
        cache = part.segment.cache
        tokens = torch.arange(count - written)
        parts.append(
            PagedSegment(Segment(cache, tokens, chain_shape(count), (count - written - 1,), written), part.table)
        )
        later = count + level - 1
        told.append(PagedSegment(Segment(cache, tokens[:1], chain_shape(later + 1), (0,), later), part.table))
    batches = PagedBatch.levels(parts, PATTERNS, 4)
    inputs = all_loaded(batches)
    assert inputs[0].bucket == Bucket(8, 4, 32, 256, 0, 8), "one row of each gets logits, and there is room for all"
    assert inputs[0].numbers.logit_rows.tolist() == [3, 4, 6, 8, 9, 0, 0, 0]
    assert_equal_but_for(inputs[level], loaded(PagedBatch.recorded(told, PATTERNS)), "tokens")


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_later_forward_of_trees_is_the_one_that_segments_would_ask_for(level: int) -> None:
    """But for whom nodes hang below, which the device knows; two are open at each level."""
    parts = batch_of([(5, chain_shape(10), 6), (90, chain_shape(8), 7), (0, chain_shape(9), 6)]).parts  # with room
    for part in parts:
        part.segment.cache.rollback(part.segment.cache.length)
    read = []
    for part, count in zip(parts, (4, 1, 3), strict=True):
        segment = Segment(part.segment.cache, torch.arange(count), chain_shape(count), (count - 1,))
        read.append(PagedSegment(segment, part.table))
    batches = PagedBatch.levels(read, PATTERNS[:1], 4, beams=2, nodes=6)
    inputs = all_loaded(batches)
    assert [each.bucket for each in inputs[1:]] == [Bucket(4, 2, 8, 256, 1, 8)] * 3
    told = []
    for part in read:
        cache, count = part.segment.cache, len(part.segment.tokens)
        cache.reserve(count + 6)
        cache.commit(range(count))
        shape = TreeShape((-1, -1, 0, 1, 2, 3)[: 2 * level])
        told.append(PagedSegment(Segment(cache, torch.arange(2), shape, (0, 1), 2 * level - 2), part.table))
    (expected,) = all_loaded(batches[level : level + 1], PagedBatch.recorded(told, PATTERNS[:1]))
    assert_equal_but_for(inputs[level], expected, "tokens", "path")


def test_tiles_hold_each_row_once() -> None:
    """Rows of one request alone, and no more than a tile holds."""
    for count in (1, 3, 4, 5, 16, 17, 64, 65, 200):
        requests = [(5, chain_shape(1), 0), (9, chain_shape(count), 0), (0, chain_shape(2), 0)]
        batch = batch_of(requests, exact=True)
        tiles = loaded(batch).numbers.tiles.tolist()
        assert len(tiles) == batch.bucket.tiles
        ends = [length + len(shape) for length, shape, _ in requests]
        assert loaded(batch).numbers.tile_end.tolist() == [ends[request] if many else 0 for request, _, many in tiles]
        rows = [[(request, row) for row in range(first, first + many)] for request, first, many in tiles]
        assert all(len(tile) <= batch.bucket.tile for tile in rows)
        starts = [0, 1, 1 + count]
        assert sorted(row for tile in rows for row in tile) == [
            (request, starts[request] + i) for request, (_, shape, _) in enumerate(requests) for i in range(len(shape))
        ]


def test_bits_of_paths() -> None:
    """The worked example; and node 63 makes the number negative, node 64 starts the next word."""
    bits = path_bits(TreeShape((-1, 0, 0, 2)), 0, (0, 0, 0, 0), 1)
    assert bits.tolist() == [[0b1], [0b11], [0b101], [0b1101]]
    assert path_bits(TreeShape((-1, 0, 0, 2)), 2, (1, 2), 1).tolist() == [[0b100], [0b1000]]
    bits = path_bits(chain_shape(66), 62, (61,) * 4, 2)
    assert bits.view(np.uint64).tolist() == [[3 << 61, 0], [7 << 61, 0], [7 << 61, 1], [7 << 61, 3]]


def test_a_mask_to_add() -> None:
    seen = torch.tensor([[[True, False], [True, True]]])
    mask = additive_mask(seen, 3, torch.bfloat16)
    assert mask.dtype == torch.bfloat16
    assert mask.shape == (1, 1, 6, 2)
    assert mask[0, 0].tolist() == [[0.0, -torch.inf]] * 3 + [[0.0, 0.0]] * 3


def test_shapes_are_rounded_up_and_rows_divided_into_tiles() -> None:
    assert Bucket.recorded(1, 1, 1, 20, 0) == Bucket(1, 1, 1, 256, 0, 1)
    assert Bucket.recorded(3, 5, 9, 257, 0) == Bucket(4, 8, 32, 512, 0, 32)
    assert Bucket.recorded(9, 5, 19, 257, 0) == Bucket(16, 8, 32, 512, 0, 32)
    assert Bucket.recorded(4, 8, 32, 600, 15) == Bucket(4, 8, 32, 1024, 1, 32)
    assert Bucket.recorded(1, 64, 64, 600, 129) == Bucket(1, 64, 64, 1024, 4, 64)
    assert Bucket.exact(1, 77, 77, 130, 0, logit_rows=1) == Bucket(1, 77, 77, 192, 0, 1)
    assert Bucket.exact(2, 77, 99, 128, 77, logit_rows=0) == Bucket(2, 77, 99, 128, 2, 0)

    assert [Bucket(1, tokens, tokens, 256, 0, 1).tile for tokens in (1, 2, 4, 5, 16, 17, 64, 65)] == [
        1, 4, 4, 16, 16, 64, 64, 64,
    ]  # fmt: skip
    assert Bucket(8, 4, 20, 256, 0, 20).tiles == 8
    assert Bucket(33, 2000, 2032, 4096, 0, 33).tiles == 33 + 31
