"""From trained heads and held-out answers to the trees that are kept with them, and what those promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from truedraft.core.rank_tree import RankTree
from truedraft.errors import DataError
from truedraft.training.rank_paths import count_rank_paths, rank_table
from truedraft.training.traces import Trace
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
    """A tree for one kind of requests.

    Attributes:
        tree: nodes in the order of a greedy choice.
        promises: what its first nodes are expected to bring, at the numbers of nodes that reports speak of.
        accuracy: `[heads][ranks]`: how often the true token had which rank for each head.
        positions: how many were counted.
    """

    tree: RankTree
    promises: tuple[TreePromise, ...]
    accuracy: tuple[tuple[float, ...], ...]
    positions: int

    def promised(self, nodes: int) -> float:
        """Tokens per target call that the first `nodes` nodes promise; of all, where there are fewer."""
        return next(each.replayed for each in self.promises if each.nodes == min(nodes, len(self.tree)))

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the tree itself is kept elsewhere."""
        return {
            "nodes": len(self.tree),
            "positions": self.positions,
            "promises": [asdict(each) for each in self.promises],
            "accuracy": [{"top_1": ranks[0], f"top_{_TOP}": sum(ranks[:_TOP])} for ranks in self.accuracy],
            "rank_accuracy": [list(ranks) for ranks in self.accuracy],
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
        counts = count_rank_paths(heads, lm_head, text.traces(temperature))
        tree = choose_tree(counts)
        sizes = tuple(sorted({min(nodes, len(tree)) for nodes in BUDGETS}))
        found[kind] = CountedTree(tree, tuple(promises(counts, tree, sizes)), counts.accuracy, counts.positions)
    return found


@dataclass(frozen=True)
class HeldOutAccuracy:
    """How often each head is right on answers that it is not trained on: for the log of a training.

    Attributes:
        heads: in training.
        lm_head: of their target.
        traces: held-out answers.
    """

    heads: MedusaHeads
    lm_head: LmHead
    traces: Sequence[Trace]

    @classmethod
    def on(cls, heads: MedusaHeads, lm_head: LmHead, text: SelfText, positions: int) -> HeldOutAccuracy:
        """On answers of about so many tokens, evenly over the text.

        Raises:
            DataError: there are no answers longer than what the heads reach.
        """
        temperatures = sorted({record.temperature for record in text.records})
        traces = [trace for temperature in temperatures for trace in text.traces(temperature)]
        traces = [trace for trace in traces if trace.steps > heads.config.heads]
        if not traces:
            raise DataError(
                f"the target's answers to the held-out prompts have all fewer than the {heads.config.heads + 2} "
                f"tokens that {heads.config.heads} heads are measured on: let it write more, or train fewer heads"
            )
        every = max(1, sum(trace.steps for trace in traces) // positions)
        return cls(heads, lm_head, traces[::every])

    def __call__(self) -> Mapping[str, float]:
        """`head_K_top_1` and `head_K_top_5` of each head, K from 1: shares of positions."""
        table = rank_table(self.heads, self.lm_head, self.traces, ranks=_TOP)
        ranks = table.ranks[table.whole]
        found = {}
        for head, of_head in enumerate(ranks.unbind(1), start=1):
            found[f"head_{head}_top_1"] = float((of_head == 0).float().mean())
            found[f"head_{head}_top_{_TOP}"] = float((of_head < _TOP).float().mean())
        return found
