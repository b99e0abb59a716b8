"""From trained heads and held-out answers to the trees that are kept with them, and what those promise."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from truedraft.core.rank_tree import RankTree
from truedraft.training.likely_paths import LikelyTable
from truedraft.training.rank_paths import count_rank_paths
from truedraft.training.tree_choice import TreePromise, choose_tree, promises

if TYPE_CHECKING:
    from truedraft.heads.medusa import MedusaHeads
    from truedraft.models.lm_head import LmHead
    from truedraft.training.self_text import SelfText

TREE_TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
"""At which temperature the answers are drawn that each kind of tree is counted on."""
BUDGETS = (8, 32)
"""Numbers of nodes that reports speak of."""
_TOP = 5


@dataclass(frozen=True)
class CountedTree:
    """A tree for one kind of requests, and what choosing one at each step would bring in its place.

    Attributes:
        tree: nodes in the order of a greedy choice.
        promises: what its first nodes are expected to bring, at the numbers of nodes that reports speak of.
        accuracy: `[heads][ranks]`: how often the true token had which rank for each head.
        positions: how many were counted.
        likeliest: what trees that are chosen at each step are expected to bring instead: (nodes, tokens per target
            call), replayed, for rising numbers of nodes.
    """

    tree: RankTree
    promises: tuple[TreePromise, ...]
    accuracy: tuple[tuple[float, ...], ...]
    positions: int
    likeliest: tuple[tuple[int, float], ...]

    def promised(self, nodes: int) -> float:
        """Tokens per target call that the first `nodes` nodes promise; of all, where there are fewer."""
        return next(each.replayed for each in self.promises if each.nodes == min(nodes, len(self.tree)))

    def promised_by_likeliest(self, nodes: int) -> float:
        """The same of trees chosen at each step, at one of the numbers of nodes that were replayed."""
        return dict(self.likeliest)[nodes]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the tree itself is kept elsewhere."""
        return {
            "nodes": len(self.tree),
            "positions": self.positions,
            "promises": [asdict(each) for each in self.promises],
            "accuracy": [{"top_1": ranks[0], f"top_{_TOP}": sum(ranks[:_TOP])} for ranks in self.accuracy],
            "rank_accuracy": [list(ranks) for ranks in self.accuracy],
            "likeliest": {
                "nodes": [nodes for nodes, _ in self.likeliest],
                "tokens": [tokens for _, tokens in self.likeliest],
            },
        }


def count_trees(heads: MedusaHeads, lm_head: LmHead, text: SelfText) -> dict[str, CountedTree]:
    """Trees for greedy and for sampled requests.

    Args:
        heads: trained.
        lm_head: of their target.
        text: written by their target at both of `TREE_TEMPERATURES`, used for nothing else.

    Raises:
        DataError: the answers are shorter than what the heads reach.
    """
    found = {}
    for kind, temperature in TREE_TEMPERATURES.items():
        traces = text.traces(temperature)
        counts = count_rank_paths(heads, lm_head, traces)
        tree = choose_tree(counts)
        sizes = tuple(sorted({min(nodes, len(tree)) for nodes in BUDGETS}))
        points = LikelyTable.of(heads, lm_head, traces).points()
        found[kind] = CountedTree(tree, tuple(promises(counts, tree, sizes)), counts.accuracy, counts.positions, points)
    return found
