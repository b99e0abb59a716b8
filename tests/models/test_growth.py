"""Trees that grow in tensors are those that the host grows: `LikeliestNodes` held to `LikeliestTree`, node for node."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.recorded_heads import Recordable
from truedraft import SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.top_k import TopK
from truedraft.core.tree import TokenTree
from truedraft.drafters.base import DraftRequest
from truedraft.drafters.draws import DraftIds
from truedraft.drafters.heads.base import trees_of
from truedraft.drafters.tree_builder import LikeliestTree, grow_likeliest
from truedraft.models.backends.graphs.heads import LikeliestNodes, own_bits
from truedraft.models.cache import RequestCache

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


def tables(kind: str) -> tuple[Tensor, DraftIds | None]:
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
    table, ids = tables(kind)
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
