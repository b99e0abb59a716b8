"""The mean acceptance length of Medusa heads, measured in the very engine that serves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from truedraft.drafters.calibration import COUNTED, LIKELIEST, Calibration
from truedraft.drafters.guess_trees import FixedTrees, GuessTrees, LikeliestTrees
from truedraft.drafters.medusa import Medusa
from truedraft.planning import BUDGETS, TREE_TEMPERATURES, CountedTree, survival_of
from truedraft.training.acceptance import count_answers

if TYPE_CHECKING:
    from truedraft.heads.medusa import MedusaHeads
    from truedraft.models.base import LanguageModel


@dataclass(frozen=True, slots=True)
class Served:
    """What heads brought at one temperature with one kind of trees and one number of nodes.

    Attributes:
        temperature: of the requests.
        trees: "likeliest", chosen at each step, or "counted", one for all.
        nodes: of the trees.
        mean_acceptance_length: emitted tokens per target call, measured.
        promised: the same, as replayed on the text on which the trees were counted.
        target_calls: that were measured.
        emitted_tokens: by them.
    """

    temperature: float
    trees: str
    nodes: int
    mean_acceptance_length: float
    promised: float
    target_calls: int
    emitted_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Round:
    """What one round over the prompts measures."""

    temperature: float
    trees: str
    nodes: int
    promised: float


def measure_served(
    target: LanguageModel,
    heads: MedusaHeads,
    trees: Mapping[str, CountedTree],
    prompts: Sequence[Sequence[int]],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    within_s: float | None = None,
) -> list[Served]:
    """Answer the prompts, greedily and at temperature 1, with small and large trees of both kinds.

    Args:
        target: the heads'.
        heads: of that target, in evaluation mode.
        trees: of the heads.
        prompts: that neither training nor trees have seen.
        on_progress: called with the number of finished rounds over the prompts, and of all.
        within_s: seconds for all rounds, of which each takes an equal part; None is as long as they take.

    Raises:
        TrainingError: the engine failed.
        CompositionError: the heads do not fit the target.
    """
    ways: dict[str, GuessTrees] = {
        LIKELIEST: LikeliestTrees(heads.config.heads, calibration=Calibration(survival_of(trees))),
        COUNTED: FixedTrees({kind: counted.tree for kind, counted in trees.items()}),
    }
    rounds = [each for kind, temperature in TREE_TEMPERATURES.items() for each in _rounds(trees[kind], temperature)]
    found, each_s = [], None if within_s is None else within_s / len(rounds)
    for number, each in enumerate(rounds):
        on_progress(number, len(rounds))
        stats = count_answers(
            target, Medusa(heads, ways[each.trees], nodes=each.nodes), prompts, each.temperature, each_s
        )
        measured = (stats.mean_acceptance_length, each.promised, stats.target_calls, stats.emitted_tokens)
        found.append(Served(each.temperature, each.trees, each.nodes, *measured))
    on_progress(len(rounds), len(rounds))
    return found


def _rounds(counted: CountedTree, temperature: float) -> list[_Round]:
    sizes = sorted({min(nodes, len(counted.tree)) for nodes in BUDGETS})
    return [
        *(_Round(temperature, LIKELIEST, nodes, counted.promised_by_likeliest(nodes)) for nodes in BUDGETS),
        *(_Round(temperature, COUNTED, nodes, counted.promised(nodes)) for nodes in sizes),
    ]
