"""From trained heads and held-out answers to the trees that are kept with them, and what those promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from truedraft.core.rank_tree import RankTree
from truedraft.core.survival import Survival
from truedraft.drafters.calibration import COUNTED, COUPLED, LIKELIEST
from truedraft.drafters.guess_trees import MOST_RANKS
from truedraft.training.coupled_noise import coupled_along
from truedraft.training.likely_paths import HeadGuesses, LikelyTable
from truedraft.training.rank_paths import PathCounts, table_of
from truedraft.training.survival_fit import Guesses, fit_survival
from truedraft.training.tree_choice import TreePromise, choose_tree, promises

if TYPE_CHECKING:
    from truedraft.heads.medusa import MedusaHeads
    from truedraft.models.lm_head import LmHead
    from truedraft.training.self_text import SelfText

TREE_TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
"""At which temperature the answers are drawn that each kind of tree is counted on."""
CALIBRATED, RAW = "calibrated", "raw"
"""What trees are chosen by at each step: survival fitted to text, or the heads' own probabilities."""
BUDGETS = (8, 32)
"""Numbers of nodes that reports speak of."""
_TOP = 5
_COUPLED = 3000  # positions at which noise is drawn for every token id, about


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
        survival: what these are chosen by; None takes the heads' own probabilities.
        coupled: the same for requests that share their noise with the target.
        chosen: which trees serve: "likeliest", or "counted" where that was the better.
        compared: what decided it, tokens per target call, the mean over `BUDGETS`: of trees chosen by calibrated
            survival ("calibrated"), by probability ("raw"), and counted, each fitted to one half of the text and
            replayed on the other; empty where a half is too short.
    """

    tree: RankTree
    promises: tuple[TreePromise, ...]
    accuracy: tuple[tuple[float, ...], ...]
    positions: int
    likeliest: tuple[tuple[int, float], ...]
    survival: Survival | None = None
    coupled: Survival | None = None
    chosen: str = LIKELIEST
    compared: Mapping[str, float] = field(default_factory=dict)

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
            LIKELIEST: {
                "nodes": [nodes for nodes, _ in self.likeliest],
                "tokens": [tokens for _, tokens in self.likeliest],
            },
            "chosen": self.chosen,
            "compared": dict(self.compared),
        }


def survival_of(trees: Mapping[str, CountedTree]) -> dict[str, Survival]:
    """What trees are chosen by, for each kind of requests where it was calibrated."""
    found = {kind: each.survival for kind, each in trees.items()}
    found[COUPLED] = next((each.coupled for each in trees.values() if each.coupled is not None), None)
    return {kind: survival for kind, survival in found.items() if survival is not None}


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
        halves = [HeadGuesses.along(heads, lm_head, traces[first::2], MOST_RANKS) for first in range(2)]
        coupled = None
        if temperature:
            some = traces[:: max(1, sum(trace.steps for trace in traces) // _COUPLED)]
            heard = [coupled_along(heads, lm_head, some[first::2], MOST_RANKS, first) for first in range(2)]
            worse = raw_is_kept(compare(heard), 0.0)  # what the noise decides is as sure as greedy choice
            coupled = None if worse else _survival(HeadGuesses.joined(heard))
        found[kind] = _count(halves, temperature, coupled)
    return found


def _count(halves: Sequence[HeadGuesses], temperature: float, coupled: Survival | None) -> CountedTree:
    """From what heads guessed to the trees for one kind of requests."""
    guesses, compared = HeadGuesses.joined(halves), compare(halves)
    counts = PathCounts.of(table_of(guesses))
    tree = choose_tree(counts)
    sizes = tuple(sorted({min(nodes, len(tree)) for nodes in BUDGETS}))
    promised = tuple(promises(counts, tree, sizes))
    survival = None if raw_is_kept(compared, temperature) else _survival(guesses)
    points = LikelyTable.of(guesses, survival).points()
    best = max(compared, key=lambda way: compared[way], default=CALIBRATED)  # of equal ones the first
    chosen = COUNTED if best == COUNTED else LIKELIEST
    return CountedTree(tree, promised, counts.accuracy, counts.positions, points, survival, coupled, chosen, compared)


def raw_is_kept(compared: Mapping[str, float], temperature: float, *, least: float = 0.01) -> bool:
    """Whether trees are chosen by the heads' own probabilities.

    At temperature 1 heads learned the very laws that tokens are drawn from, so there these stay unless calibration
    brings a hundredth more; at other temperatures unless it brings less.

    Args:
        compared: see `CountedTree.compared`.
        temperature: of the requests.
        least: share of what raw probabilities bring.
    """
    least = least if temperature else 0.0
    return bool(compared) and compared[CALIBRATED] < compared[RAW] * (1.0 + least)


def _survival(guesses: HeadGuesses) -> Survival:
    return fit_survival(Guesses.along(guesses.log_probs, guesses.ranks))


def compare(halves: Sequence[HeadGuesses]) -> dict[str, float]:
    """What each way to make trees brings on text that it was not fitted to; see `CountedTree.compared`."""
    tables = [table_of(half) for half in halves]
    if not all(len(table.whole) for table in tables):
        return {}
    found = dict.fromkeys((CALIBRATED, RAW, COUNTED), 0.0)
    for fitted, other in ((0, 1), (1, 0)):
        tree = choose_tree(PathCounts.of(tables[fitted]))
        ways = {
            CALIBRATED: LikelyTable.of(halves[other], _survival(halves[fitted])),
            RAW: LikelyTable.of(halves[other]),
        }
        for nodes in BUDGETS:
            found[COUNTED] += tables[other].replay(tree.first(nodes))
            for way, table in ways.items():
                found[way] += table.replay(nodes)
    return {way: total / (2 * len(BUDGETS)) for way, total in found.items()}
