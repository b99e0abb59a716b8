"""From counted rank paths to the tree that is kept with the heads, and what it promises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.core.rank_tree import RankTree
from truedraft.training.rank_paths import PathCounts, RankTable, most_frequent

_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class TreePromise:
    """What the first nodes of a tree are expected to bring, in tokens per target call.

    Attributes:
        nodes: how many of them.
        replayed: on the counting text, walked as decoding walks: the promise.
        counted: 1 + the sum of plain path frequencies, all positions alike.
        product: the same if heads erred independently.
    """

    nodes: int
    replayed: float
    counted: float
    product: float


def choose_tree(counts: PathCounts, nodes: int = 64, settle_for: int = 32) -> RankTree:
    """The paths to keep, in the order in which a budget takes them, with the probability that each is accepted.

    Begins with the most frequent paths over all positions. Then they are counted again over the positions at which
    decoding with the first `settle_for` nodes starts its steps, and chosen again, as long as that makes the replayed
    mean acceptance length grow. The probabilities are those at the positions that decoding with the kept tree visits,
    so 1 + the sum of the first `settle_for` is the replayed length itself.

    Args:
        counts: of traces that no head was trained on.
        nodes: most nodes to keep.
        settle_for: node budget for which the order is settled; smaller and larger ones take it as it is.

    Raises:
        OptionError: a negative number of nodes.
    """
    table = counts.table
    best = counts.tree(nodes)
    length = table.replay(best.first(settle_for))
    for _ in range(_ROUNDS):
        other = most_frequent(table.frequencies(table.visited(best.first(settle_for))), nodes)
        replayed = table.replay(other.first(settle_for))
        if not replayed > length:
            break
        best, length = other, replayed
    return with_reach(table, best, settle_for)


def with_reach(table: RankTable, tree: RankTree, settle_for: int) -> RankTree:
    """A tree with the share of steps in which each node is accepted, when the first `settle_for` nodes decode."""
    found = table.frequencies(table.visited(tree.first(settle_for)))
    return RankTree(tree.paths, tuple(found.get(path, 0.0) for path in tree.paths))


def promises(
    counts: PathCounts, tree: RankTree, budgets: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
) -> list[TreePromise]:
    """What a tree promises at some node budgets, those above its size left out but for its own size.

    Args:
        counts: of the text on which the promise is made.
        tree: whose first nodes each budget takes.
        budgets: rising.
    """
    sizes = sorted({min(nodes, len(tree)) for nodes in budgets})
    found = []
    for nodes in sizes:
        part = tree.first(nodes)
        replayed = counts.table.replay(part)
        found.append(TreePromise(nodes, replayed, counts.counted_tokens(part), counts.product_tokens(part)))
    return [each for each in found if not math.isnan(each.replayed)]
