"""The mean acceptance length of heads, measured in the very engine that serves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from truedraft.core.counters import Counters
from truedraft.core.sampling import SamplingParams
from truedraft.drafters.medusa import Medusa
from truedraft.engine import Engine
from truedraft.errors import TrainingError
from truedraft.training.head_trees import BUDGETS, TREE_TEMPERATURES, CountedTree

if TYPE_CHECKING:
    from truedraft.heads.medusa import MedusaHeads
    from truedraft.models.base import LanguageModel


_TOKENS = 128  # of an answer, half the context at the most


@dataclass(frozen=True, slots=True)
class Served:
    """What heads brought at one temperature with one number of nodes.

    Attributes:
        temperature: of the requests.
        nodes: of the tree.
        mean_acceptance_length: emitted tokens per target call, measured.
        promised: the same, as the tree promised it on the text on which it was counted.
        target_calls: that were measured.
        emitted_tokens: by them.
    """

    temperature: float
    nodes: int
    mean_acceptance_length: float
    promised: float
    target_calls: int
    emitted_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def measure_served(
    target: LanguageModel,
    heads: MedusaHeads,
    trees: Mapping[str, CountedTree],
    prompts: Sequence[Sequence[int]],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Served]:
    """Answer the prompts, greedily and at temperature 1, with small and large trees.

    Args:
        target: the heads'.
        heads: of that target, in evaluation mode.
        trees: of the heads.
        prompts: that neither training nor trees have seen.
        on_progress: called with the number of finished rounds over the prompts, and of all.

    Raises:
        TrainingError: the engine failed.
        CompositionError: the heads do not fit the target.
    """
    max_tokens = min(_TOKENS, target.context_length // 2)
    rounds = [
        (kind, temperature, nodes)
        for kind, temperature in TREE_TEMPERATURES.items()
        for nodes in sorted({min(budget, len(trees[kind].tree)) for budget in BUDGETS})
    ]
    found = []
    drafter = Medusa(heads, {kind: counted.tree for kind, counted in trees.items()})
    for number, (kind, temperature, nodes) in enumerate(rounds):
        on_progress(number, len(rounds))
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
        engine = Engine(target, drafter.with_nodes(nodes))
        most = target.context_length - max_tokens
        stats = Counters()
        for answer in engine.generate([list(prompt)[-most:] for prompt in prompts], params):
            if answer.error is not None or answer.warnings:
                raise TrainingError(f"an answer with the trained heads failed: {answer.error or answer.warnings[0]}")
            stats = stats + answer.stats
        promised = trees[kind].promised(nodes)
        length = stats.mean_acceptance_length
        found.append(Served(temperature, nodes, length, promised, stats.target_calls, stats.emitted_tokens))
    on_progress(len(rounds), len(rounds))
    return found
