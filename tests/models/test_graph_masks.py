"""What each token sees, and trees that grow in tensors, against their definitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from support.pairwise import pairwise
from support.recorded_heads import Recordable
from support.trees import ancestor_mask
from truedraft import SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.top_k import TopK
from truedraft.core.tree import TokenTree, TreeShape, chain_shape
from truedraft.drafters.base import DraftRequest
from truedraft.drafters.draws import DraftIds
from truedraft.drafters.heads.base import trees_of
from truedraft.drafters.tree_builder import LikeliestTree, grow_likeliest
from truedraft.models.attention import AttentionPattern, Chunk, Full, Window
from truedraft.models.backends.graphs.attention import rows_of_requests, visible
from truedraft.models.backends.graphs.batch import Bucket, Inputs, PagedBatch, PagedSegment, load_in_a_row
from truedraft.models.backends.graphs.heads import LikeliestNodes, own_bits
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


VOCAB = 11
BUDGETS = [Budget(4, 3, 7), Budget(2, 3, 12), Budget(4, 1, 9), Budget(3, 2, 1), Budget(1, 3, 12)]


def on_the_host(table: Tensor, budget: Budget, root: int, ids: DraftIds | None) -> TokenTree:
    tree = LikeliestTree(RequestCache(64), DraftRequest(0, SamplingParams(), [root]), budget)
    level = [tree]
    while level:
        last = [path[-1] if path else root for path in tree.open_paths()]
        level = grow_likeliest(level, table[last], ids, TopK.of)
        if level:
            tree.segment()
    return tree.proposal().tree


def logit_tables(kind: str) -> tuple[Tensor, DraftIds | None]:
    """Logits behind each token; of few different values, for then products tie."""
    table = torch.randint(0, 3, (VOCAB, VOCAB), generator=torch.Generator().manual_seed(1)).float()
    if kind == "impossible":
        table[:, 4:] = -torch.inf
        table[2, 1:] = -torch.inf
        table[3] = torch.nan
    if kind == "random":
        table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))
    ids = DraftIds(torch.tensor([9, 1, 4, 0]), VOCAB) if kind == "fewer ids" else None
    return (table[:, :4] if ids is not None else table), ids


@pytest.mark.parametrize("kind", ["ties", "random", "impossible", "fewer ids"])
def test_nodes_are_those_of_the_search_on_the_host(kind: str) -> None:
    table, ids = logit_tables(kind)
    roots = torch.arange(len(BUDGETS))
    limits = torch.tensor([(each.width, each.depth) for each in BUDGETS])
    with Recordable():
        trees, tokens = LikeliestNodes(3, 12, None if ids is None else ids.ids, limits), roots
        for _ in range(4):
            tokens, _ = trees.grow(table[tokens])
        found = trees.found()
    for root, (tree, budget) in enumerate(zip(trees_of(*found), BUDGETS, strict=True)):
        expected, own = on_the_host(table, budget, root, ids), tree.first(budget.nodes)
        assert (own.shape.parents, own.host_ids) == (expected.shape.parents, expected.host_ids), budget
    assert max(map(len, trees_of(*found))) > 6 or kind == "impossible"


def test_rows_above_are_those_of_the_nodes_that_others_hang_below() -> None:
    """Two open: the root brings a and b of 0.6 and 0.3, a brings 0.4 and 0.2, b brings 0.9 and 0.1; see
    `LikeliestTree`."""
    trees = LikeliestNodes(2, 4, None, torch.tensor([[2, 3], [2, 3]]))
    first, second = torch.tensor([0.6, 0.3, 0.1]).log(), torch.tensor([[0.2, 0.4, 0.3], [0.9, 0.1, 0.0]]).log()
    tokens, above = trees.grow(torch.stack([first, first.flip(0)]))
    assert (tokens.tolist(), above.tolist()) == ([0, 1, 2, 1], [0, 0, 1, 1])
    tokens, above = trees.grow(torch.cat([second, second]))
    assert (tokens.tolist(), above.tolist()) == ([1, 0, 1, 0], [0, 1, 2, 3])
    tokens, parents, counts = trees.found()
    assert (tokens[0].tolist(), parents[0].tolist(), counts.tolist()) == ([0, 1, 0, 1], [-1, -1, 1, 0], [4, 4])


def test_bits_of_open_nodes() -> None:
    like = torch.empty(0, dtype=torch.int64)
    assert own_bits(2, 1, 1, like).tolist() == [[0b100], [0b1000]]
    assert own_bits(3, 21, 2, like).tolist() == [[-(1 << 63), 0], [0, 1], [0, 2]]
