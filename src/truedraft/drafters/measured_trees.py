"""What is known of a drafter's trees before they are drafted: what their nodes bring, and sizes to choose from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from truedraft.core.params import SamplingParams
from truedraft.core.rank_tree import RankTree
from truedraft.theory import AcceptanceCurve

if TYPE_CHECKING:
    from truedraft.drafters.base import Drafter


@dataclass(frozen=True, slots=True)
class SizePlan:
    """One way to size a drafter, its number of nodes still open: what planning chooses from.

    Attributes:
        name: what is chosen beside the nodes, for reports: "8 beams of 4"; empty where nothing is.
        curve: what nodes bring.
        timed: a drafter whose proposals cost what this plan's cost, by their depth.
        with_nodes: makes the drafter with a number of nodes; 0 drafts nothing.
    """

    name: str
    curve: AcceptanceCurve
    timed: Drafter
    with_nodes: Callable[[int], Drafter]


@dataclass(frozen=True, slots=True)
class TreeFacts:
    """What is known of the token trees of a drafter whose candidates have ranks, for reports.

    Attributes:
        tree: as many of the counted tree's nodes as are drafted.
        fixed: whether that tree is what is drafted; otherwise each step chooses one.
        nodes: most that are drafted.
        curve: what nodes bring; None where nobody measured it.
        accuracy: `[heads][ranks]`: how often the true token had which rank for each head; None where nobody counted.
    """

    tree: RankTree
    fixed: bool
    nodes: int
    curve: AcceptanceCurve | None = None
    accuracy: Sequence[Sequence[float]] | None = None


class MeasuredTrees:
    """Trees of which somebody measured what their nodes bring."""

    def acceptance_curve(self, params: SamplingParams) -> AcceptanceCurve | None:
        """What nodes are expected to bring to requests with such options; None where nobody measured it."""
        return None

    def size_plans(self, params: SamplingParams) -> Sequence[SizePlan]:
        """Sizes to choose from by measuring, for requests with such options.

        Empty where they were chosen, or where nobody measured what they bring.
        """
        return ()

    def tree_facts(self, params: SamplingParams) -> TreeFacts | None:
        """What is known of the trees for requests with such options; None where it makes none of ranks."""
        return None
