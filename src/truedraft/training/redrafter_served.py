"""The mean acceptance length of a recurrent head: replayed on held-out text, and measured in the engine that serves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from truedraft.drafters.calibration import BEAMS_FACT as BEAMS
from truedraft.drafters.calibration import FACT as SURVIVAL
from truedraft.drafters.redrafter import Redrafter
from truedraft.heads.redrafter_runner import RedrafterRunner
from truedraft.training.acceptance import count_answers
from truedraft.training.beam_replay import BeamPromise, beam_guesses, promises_of_beams
from truedraft.training.head_trees import BUDGETS, CALIBRATED, RAW, TREE_TEMPERATURES, raw_is_kept
from truedraft.training.survival_fit import RANKS, fit_survival

if TYPE_CHECKING:
    from truedraft.core.survival import Survival
    from truedraft.heads.redrafter import RedrafterHead
    from truedraft.models.base import LanguageModel
    from truedraft.training.self_text import SelfText
    from truedraft.training.traces import Trace

_WIDTHS = (1, 2, 4, 8, 16, 32)  # numbers of beams that are replayed; those of `BUDGETS` are among them
_POSITIONS = 3000  # of a replay, about: it runs the head for every beam at each of them


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


@dataclass(frozen=True)
class ReplayedBeams:
    """What beams bring to one kind of requests, replayed on held-out text.

    Attributes:
        promises: of several widths and all lengths.
        survival: what beams are chosen by; None where the head's own probabilities were the better.
        compared: what decided it: tokens per target call of the smaller of `BUDGETS`, with as many beams, chosen by
            survival ("calibrated") that was fitted to one half of the text and replayed on the other, and by
            probability ("raw"); empty where a half is too short.
    """

    promises: Sequence[BeamPromise]
    survival: Survival | None = None
    compared: Mapping[str, float] = field(default_factory=dict)


def replay_beams(
    target: LanguageModel,
    head: RedrafterHead,
    text: SelfText,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, ReplayedBeams]:
    """How the head's guesses survive, and what beams of several widths and all lengths are expected to bring by that.

    Args:
        target: the head's.
        head: of that target, in evaluation mode.
        text: written by the target at both of `TREE_TEMPERATURES`, used for nothing else; a part of it is replayed.
        on_progress: called with the number of finished widths, and of all.
    """
    runner, found = RedrafterRunner(head, target), {}
    length, total = head.config.length, len(_WIDTHS) * len(TREE_TEMPERATURES)
    for number, (kind, temperature) in enumerate(TREE_TEMPERATURES.items()):
        traces = text.traces(temperature)
        some = traces[:: max(1, sum(trace.steps for trace in traces) // _POSITIONS)]
        before = number * len(_WIDTHS)

        def follow(done: int, _: int, before: int = before) -> None:
            on_progress(before + done, total)

        compared = compare(runner, some, length)
        survival = None if raw_is_kept(compared, temperature) else _survival(runner, traces, length)
        promises = promises_of_beams(runner, some, _WIDTHS, length, survival, on_progress=follow)
        found[kind] = ReplayedBeams(promises, survival, compared)
    return found


def _survival(runner: RedrafterRunner, traces: Sequence[Trace], length: int) -> Survival:
    return fit_survival(beam_guesses(runner, traces, length, min(RANKS, runner.vocab_size)))


def compare(runner: RedrafterRunner, traces: Sequence[Trace], length: int) -> dict[str, float]:
    """What beams bring that are chosen by survival, and by probability; see `ReplayedBeams.compared`."""
    halves = traces[::2], traces[1::2]
    found = {CALIBRATED: 0.0, RAW: 0.0}
    for fitted, other in (halves, halves[::-1]):
        for way in found:
            survival = _survival(runner, fitted, length) if way == CALIBRATED else None
            promises = promises_of_beams(runner, other, BUDGETS[:1], length, survival)
            if not promises:
                return {}
            found[way] += promises[-1].at(BUDGETS[0]) / len(halves)
    return found


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
        drafter = Redrafter(head, beams=nodes, nodes=nodes, facts=facts_of(replayed))
        stats = count_answers(target, drafter, prompts, temperature, each_s)
        promised = _promised(replayed[kind].promises, drafter.beams, drafter.length, nodes)
        sizes = (nodes, drafter.beams, drafter.length, promised)
        counted = (stats.mean_acceptance_length, stats.target_calls, stats.emitted_tokens)
        found.append(ServedBeams(temperature, *sizes, *counted))
    on_progress(len(rounds), len(rounds))
    return found


def _promised(promises: Sequence[BeamPromise], beams: int, length: int, nodes: int) -> float | None:
    """Tokens per target call, of so many nodes or, where the beams never come to that, of all that they come to.

    None where there was nothing to replay.
    """
    promise = next((each for each in promises if (each.beams, each.length) == (beams, length)), None)
    return None if promise is None else promise.at(nodes)


def facts_of(replayed: Mapping[str, ReplayedBeams]) -> dict[str, Any]:
    """What is kept with the head, for JSON."""
    return {
        BEAMS: {kind: [each.as_dict() for each in of_kind.promises] for kind, of_kind in replayed.items()},
        SURVIVAL: {kind: of.survival.depths for kind, of in replayed.items() if of.survival is not None},
        "compared": {kind: dict(of_kind.compared) for kind, of_kind in replayed.items()},
    }
