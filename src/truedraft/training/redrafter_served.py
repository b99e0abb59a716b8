"""The mean acceptance length of a recurrent head, measured in the very engine that serves it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from truedraft.drafters.redrafter import Redrafter
from truedraft.heads import HeadRecord
from truedraft.planning import BUDGETS, TREE_TEMPERATURES, BeamTokens, ReplayedBeams, facts_of
from truedraft.training.acceptance import count_answers

if TYPE_CHECKING:
    from truedraft.heads.redrafter import RedrafterHead
    from truedraft.models.base import LanguageModel


@dataclass(frozen=True, slots=True)
class ServedBeams:
    """What beam search with a head brought at one temperature with one number of nodes.

    Attributes:
        temperature: of the requests.
        nodes: most nodes of the tree of merged beams.
        beams: that were kept: as many as nodes, so that the tree has the likeliest nodes of all.
        length: newly drafted tokens of a beam.
        promised: tokens per target call, replayed on held-out text.
        mean_acceptance_length: emitted tokens per target call, measured.
        target_calls: that were measured.
        emitted_tokens: by them.
    """

    temperature: float
    nodes: int
    beams: int
    length: int
    promised: float | None
    mean_acceptance_length: float
    target_calls: int
    emitted_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def measure_redrafter(
    target: LanguageModel,
    head: RedrafterHead,
    replayed: Mapping[str, ReplayedBeams],
    prompts: Sequence[Sequence[int]],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    within_s: float | None = None,
) -> list[ServedBeams]:
    """Answer the prompts, greedily and at temperature 1, with small and large trees.

    Args:
        target: the head's.
        head: of that target, in evaluation mode.
        replayed: what the beams are expected to bring, and by what they are chosen.
        prompts: that were not trained on.
        on_progress: called with the number of finished rounds over the prompts, and of all.
        within_s: seconds for all rounds, of which each takes an equal part; None is as long as they take.

    Raises:
        TrainingError: the engine failed.
        CompositionError: the head does not fit the target.
    """
    rounds = list(itertools.product(TREE_TEMPERATURES.items(), BUDGETS))
    found, each_s = [], None if within_s is None else within_s / len(rounds)
    for number, ((kind, temperature), nodes) in enumerate(rounds):
        on_progress(number, len(rounds))
        drafter = Redrafter(head.with_record(HeadRecord(facts=facts_of(replayed))), beams=nodes, nodes=nodes)
        stats = count_answers(target, drafter, prompts, temperature, each_s)
        promised = _promised(replayed[kind].promises, drafter.beams, drafter.length, nodes)
        sizes = (nodes, drafter.beams, drafter.length, promised)
        counted = (stats.mean_acceptance_length, stats.target_calls, stats.emitted_tokens)
        found.append(ServedBeams(temperature, *sizes, *counted))
    on_progress(len(rounds), len(rounds))
    return found


def _promised(promises: Sequence[BeamTokens], beams: int, length: int, nodes: int) -> float | None:
    """Tokens per target call, of so many nodes or, where the beams never come to that, of all that they come to.

    None where there was nothing to replay.
    """
    promise = next((each for each in promises if (each.beams, each.length) == (beams, length)), None)
    return None if promise is None else promise.at(nodes)
