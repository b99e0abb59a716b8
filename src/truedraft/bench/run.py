"""Paired runs: every contestant answers every group of prompts, in turns, after a warm-up."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from truedraft.bench.breakdown import break_down
from truedraft.bench.contestants import Contestant
from truedraft.bench.rows import Row
from truedraft.core.sampling import SamplingParams
from truedraft.errors import TruedraftError

_WARM_UP_TOKENS = 16

Progress = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that are answered together.

    Attributes:
        names: what reports call them.
        prompts: their token ids.
    """

    names: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Results:
    """What a benchmark brought, also one that was interrupted.

    Attributes:
        rows: finished ones, in the order of running.
        failures: what could not be answered, and why, a sentence each.
        interrupted: whether Ctrl-C ended it.
    """

    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    interrupted: bool = False


def grouped(names: Sequence[str], prompts: Sequence[Sequence[int]], size: int) -> list[Group]:
    """Prompts in groups of `size`, in order; the last may be smaller."""
    return [
        Group(tuple(names[first : first + size]), tuple(tuple(ids) for ids in prompts[first : first + size]))
        for first in range(0, len(names), size)
    ]


def run_all(
    contestants: Sequence[Contestant],
    groups: Sequence[Group],
    params: SamplingParams,
    *,
    runs: int,
    context_length: int,
    keep: Callable[[Row], None],
    progress: Progress,
) -> Results:
    """Let all contestants answer all groups, `runs` times each: A B C, then B C A, and so on.

    The one that goes first changes from group to group, so that none always finds the caches and clocks that another
    left behind. Ctrl-C ends the run; what was finished stays.

    Args:
        contestants: with different names.
        groups: at least one.
        params: for all prompts; answers are cut where prompt and answer fill the target's context.
        runs: how often each contestant answers each group.
        context_length: most tokens of prompt and answer together.
        keep: is given each row as soon as it is finished.
        progress: is called with the number of finished turns and the name of the next contestant.
    """
    results = Results()
    done = 0
    try:
        _warm_up(contestants, groups[0], params, context_length, progress)
        for run in range(runs):
            for number, group in enumerate(groups):
                room = _room(group, params, context_length)
                for place, contestant in enumerate(_in_turn(contestants, run * len(groups) + number)):
                    progress(done, contestant.name)
                    try:
                        row = take_turn(contestant, group, room, run, place)
                    except TruedraftError as error:
                        results.failures.append(f"{contestant.name}, prompt {', '.join(group.names)}: {error}")
                    else:
                        results.rows.append(row)
                        keep(row)
                    done += 1
        progress(done, "")
    except KeyboardInterrupt:
        results.interrupted = True
    return results


def take_turn(contestant: Contestant, group: Group, params: SamplingParams, run: int = 0, place: int = 0) -> Row:
    """Let one contestant answer one group, timed.

    Raises:
        TruedraftError: it could not.
    """
    cpu, started = time.process_time(), time.perf_counter()
    outcome = contestant.answer(group.prompts, params)
    total_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    breakdown = break_down(outcome.steps, total_s, contestant.costs) if contestant.ours else None
    outcome = dataclasses.replace(outcome, steps=())  # summed up; thousands of runs need not keep them
    return Row(contestant.name, group.names, run, place, total_s, cpu_s, outcome, breakdown)


def _warm_up(
    contestants: Sequence[Contestant], group: Group, params: SamplingParams, context_length: int, progress: Progress
) -> None:
    """Let first-time costs fall outside the measurement; what fails here is told when it is measured."""
    few = dataclasses.replace(params, max_tokens=min(params.max_tokens, _WARM_UP_TOKENS))
    for contestant in contestants:
        progress(0, f"warm-up: {contestant.name}")
        try:
            contestant.answer(group.prompts, _room(group, few, context_length))
        except TruedraftError:
            continue


def _room(group: Group, params: SamplingParams, context_length: int) -> SamplingParams:
    """Options with as many tokens as the group's longest prompt leaves room for, so that all stop alike."""
    room = context_length - max(map(len, group.prompts))
    return dataclasses.replace(params, max_tokens=max(1, min(params.max_tokens, room)))


def _in_turn(contestants: Sequence[Contestant], turn: int) -> list[Contestant]:
    first = turn % len(contestants)
    return [*contestants[first:], *contestants[:first]]
