"""What each token sees, worked out from a few numbers, against the definition by ancestors and positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from support.pairwise import pairwise
from support.trees import ancestor_mask
from truedraft.cache import RequestCache
from truedraft.cache.arena import Arena, ArenaPool, ArenaSlot
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.models.attention import AttentionPattern, Chunk, Full, Window
from truedraft.models.backends.graphs.batch import (
    ArenaBatch,
    Bucket,
    Inputs,
    PlacedSegment,
    additive_mask,
    lone_bucket,
    path_bits,
    shared_bucket,
    visible,
)
from truedraft.models.base import Segment

CPU = torch.device("cpu")
TREE = TreeShape((-1, 0, 0, 1, 2, 2, 4))
PATTERNS: tuple[AttentionPattern, ...] = (Full(), Window(4), Chunk(6))


def large_tree(nodes: int) -> TreeShape:
    """Two branches below a root, dealt out in turns, so that paths reach across words of 64 nodes."""
    return TreeShape((-1, 0, 0, *range(1, nodes - 2)))


def cache_of(pool: ArenaPool, length: int, shape: TreeShape, written: int) -> RequestCache:
    """A cache that holds `length` committed tokens and room for the tree."""
    cache = pool.acquire()
    cache.reserve(length)
    cache.commit(range(length))
    cache.reserve(written)
    cache.reserve(len(shape), written)
    return cache


def batch_of(requests: Sequence[tuple[int, TreeShape, int]], *, lone: bool = False) -> ArenaBatch:
    """Requests by (committed tokens, tree, nodes already written)."""
    pool = ArenaPool(Arena(1, 1, 4, torch.float32, CPU, 1024), 1024)
    parts = []
    for length, shape, written in requests:
        cache = cache_of(pool, length, shape, written)
        count = len(shape) - written
        segment = Segment(cache, torch.arange(count), shape, range(count), written)
        assert isinstance(cache.storage, ArenaSlot)
        parts.append(PlacedSegment(segment, cache.storage.place))
    capacity = parts[0].segment.cache.capacity
    return ArenaBatch.lone(parts[-1], capacity, PATTERNS) if lone else ArenaBatch.shared(parts, capacity, PATTERNS)


def loaded(batch: ArenaBatch) -> Inputs:
    inputs = Inputs(batch.bucket, len(PATTERNS), 12345, CPU)
    inputs.load(batch)
    return inputs


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


@pytest.mark.parametrize(("name", "number", "lone"), pairwise(REQUESTS, range(len(PATTERNS)), [False, True]))
def test_tokens_see_their_own_path(name: str, number: int, lone: bool) -> None:
    requests = REQUESTS[name]
    batch = batch_of(requests, lone=lone)
    seen = visible(loaded(batch), number)
    bucket = batch.bucket
    assert seen.shape == (bucket.requests, bucket.tokens, bucket.span)
    assert bool(seen.any(-1).all()), "a row that sees nothing would be NaN"
    for row, (length, shape, written) in enumerate(requests[-1:] if lone else requests):
        expected = defined(length, shape, written, bucket.span, PATTERNS[number])
        assert seen[row, : len(expected)].equal(expected)


def test_windows_and_chunks_hide_something_here() -> None:
    """The comparison above would notice a pattern that was lost."""
    inputs = loaded(batch_of(REQUESTS["all kinds"]))
    full, window, chunk = (visible(inputs, number) for number in range(3))
    assert int(full.sum()) > int(window.sum())
    assert int(full.sum()) > int(chunk.sum())


def test_every_token_is_fetched_placed_and_written_where_it_belongs() -> None:
    batch = batch_of(REQUESTS["all kinds"])
    numbers, bucket, capacity = loaded(batch).numbers, batch.bucket, batch.capacity
    packed = 0
    used = set()
    for slot, (length, shape, written) in enumerate(REQUESTS["all kinds"]):
        for i in range(len(shape) - written):
            row = slot * bucket.tokens + i
            used.add(row)
            assert int(numbers.source[row]) == packed
            assert int(numbers.positions[row]) == length - 1 + shape.depths[written + i]
            assert int(numbers.target[row]) == slot * capacity + length + written + i
            assert int(numbers.wanted[packed]) == row
            packed += 1
    padding = [row for row in range(bucket.rows) if row not in used]
    assert set(numbers.target[padding].tolist()) == {12345}
    assert batch.wanted == packed


def test_the_worked_example_of_paths() -> None:
    bits = path_bits(TreeShape((-1, 0, 0, 2)), 0, (0, 0, 0, 0), 1)
    assert bits.tolist() == [[0b1], [0b11], [0b101], [0b1101]]
    assert path_bits(TreeShape((-1, 0, 0, 2)), 2, (1, 2), 1).tolist() == [[0b100], [0b1000]]


def test_the_highest_bit_of_a_word() -> None:
    """Node 63 makes the number negative; node 64 starts the next word."""
    bits = path_bits(chain_shape(66), 62, (61,) * 4, 2)
    assert bits.view(np.uint64).tolist() == [[3 << 61, 0], [7 << 61, 0], [7 << 61, 1], [7 << 61, 3]]


def test_a_mask_to_add() -> None:
    seen = torch.tensor([[[True, False], [True, True]]])
    mask = additive_mask(seen, 3, torch.bfloat16)
    assert mask.dtype == torch.bfloat16
    assert mask.shape == (1, 1, 6, 2)
    assert mask[0, 0].tolist() == [[0.0, -torch.inf]] * 3 + [[0.0, 0.0]] * 3


def test_shapes_are_rounded_up() -> None:
    assert shared_bucket(1, 1, 20, 0, 1024) == Bucket(0, 1, 1, 256, 0, 1)
    assert shared_bucket(3, 5, 257, 0, 1024) == Bucket(0, 4, 8, 512, 0, 32)
    assert shared_bucket(4, 8, 600, 15, 768) == Bucket(0, 4, 8, 768, 1, 32)
    assert shared_bucket(1, 64, 600, 129, 1024) == Bucket(0, 1, 64, 1024, 4, 64)
    assert lone_bucket(3, 77, 130, 0, 1) == Bucket(3, 1, 77, 192, 0, 1)
    assert lone_bucket(3, 77, 128, 77, 0) == Bucket(3, 1, 77, 128, 2, 0)
