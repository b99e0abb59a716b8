"""Paired runs: every system answers every group of prompts, in rotating order, after a warm-up; one row per answer.

The time of decoding is compared by part with cost curves that were measured before.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from truedraft.core.params import SamplingParams
from truedraft.core.stats import Counters, StepRecord
from truedraft.core.sums import summed
from truedraft.core.theory import DraftCost, TargetCost
from truedraft.engine.policy.decisions import Decisions
from truedraft.errors import TruedraftError
from truedraft.options import record_of
from truedraft.progress import Progress, unwatched

_ROUNDING = 0.005  # of a share that is shown with two digits


class CurveCosts:
    """Costs of one engine's steps: V(rows, contexts) of its target, and each drafter's by name."""

    def __init__(self, target: TargetCost, drafting: Mapping[str, DraftCost] | None = None) -> None:
        self._target = target
        self._drafting = dict(drafting or {})
        self._of_nodes = functools.cache(lambda name, nodes: self._drafting[name].of_nodes(nodes))

    def forward_s(self, rows: int, contexts: Sequence[int]) -> float:
        return self._target(rows, contexts)

    def drafting_s(self, step: StepRecord) -> float:
        """Seconds of drafting: as for one request's share, because a batch is drafted in common forwards."""
        return sum(self._of(name, step) for name in self._drafting)

    def _of(self, name: str, step: StepRecord) -> float:
        levels = next((each.levels for each in step.drafting if each.drafter == name), None)
        if levels is not None:
            return self._drafting[name](levels)
        nodes = [share.nodes for request in step.requests for share in request.shares if share.drafter == name]
        return self._of_nodes(name, -(-sum(nodes) // max(1, len(nodes))))


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Sums over the settled decoding steps (without a part of a prompt), in seconds."""

    steps: int = 0
    requests: int = 0  # requests summed over steps: their target calls
    rows: int = 0
    nodes: int = 0
    decode_s: float = 0.0  # wall time of decoding, including that between steps, without steps that were not settled
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    forward_curve_s: float | None = None  # V(rows, contexts) of each step, by the curve; None without one
    plain_curve_s: float | None = None  # V(one row a request, contexts)
    drafting_curve_s: float | None = None  # the cost of each step's drafting
    unsettled: int = 0  # decoding steps that were not settled, see `StepRecord.settled`; not in the sums
    unsettled_s: float = 0.0

    __add__ = summed


@dataclass(frozen=True, slots=True)
class Shares:
    """Fractions of the time of decoding.

    `target` (V) and `draft` are by the curves, `host` is the rest, with verification; these are None where the run was
    faster than the curves, which were measured at another speed of the machine. The last three are as timed.
    """

    target: float | None
    draft: float | None
    host: float | None
    verification: float
    timed_target: float
    timed_draft: float


def known_share(share: float | None) -> float | None:
    """A share of time or of memory bandwidth; None above 1, which no run can reach: its reference was of another speed
    of the machine, or the weights were in the processor's caches.
    """
    return None if share is None or share > 1.0 + _ROUNDING else share


def break_down(steps: Sequence[StepRecord], total_s: float, costs: CurveCosts | None) -> Breakdown:
    """Sum the decoding steps of one run; without curves the fields by the curve are None."""
    decoding = [step for step in steps if step.settled and not step.prefill]
    unsettled = [step for step in steps if not step.settled and not step.prefill]
    unsettled_s = sum(step.total_s for step in unsettled)
    curves = {} if costs is None else {
        "forward_curve_s": sum(costs.forward_s(step.rows, step.contexts) for step in decoding),
        "plain_curve_s": sum(costs.forward_s(len(step.requests), step.contexts) for step in decoding),
        "drafting_curve_s": sum(costs.drafting_s(step) for step in decoding if step.nodes),
    }  # fmt: skip
    return Breakdown(
        steps=len(decoding),
        requests=sum(len(step.requests) for step in decoding),
        rows=sum(step.rows for step in decoding),
        nodes=sum(step.nodes for step in decoding),
        decode_s=total_s - sum(step.total_s for step in steps if step.prefill) - unsettled_s,
        draft_s=sum(step.draft_s for step in decoding),
        target_s=sum(step.target_s for step in decoding),
        verify_s=sum(step.verify_s for step in decoding),
        unsettled=len(unsettled),
        unsettled_s=unsettled_s,
        **curves,
    )


def shares(breakdown: Breakdown) -> Shares | None:
    """Fractions of decoding time; None where nothing was decoded."""
    whole = breakdown.decode_s
    if whole <= 0 or not breakdown.steps:
        return None
    target = draft = host = None
    if breakdown.forward_curve_s is not None and breakdown.drafting_curve_s is not None:
        target, draft = breakdown.forward_curve_s / whole, breakdown.drafting_curve_s / whole
        if known_share(target + draft) is None:
            target = draft = None
        else:
            host = max(1.0 - target - draft, 0.0)
    timed = (seconds / whole for seconds in (breakdown.verify_s, breakdown.target_s, breakdown.draft_s))
    return Shares(target, draft, host, *timed)


T = TypeVar("T")
_WARM_UP_TOKENS = 16
_RECORDED = (
    "first_token_s", "prefill_s", "first_tokens", "forwards", "draft_forwards", "context_tokens", "target_calls",
    "mean_acceptance_length", "counters", "token_ids",
)  # fmt: skip
_WARM_UPS = 3  # of all groups, where steps were not settled: a shape is settled from its third forward on


@dataclass(frozen=True, slots=True)
class SystemOutput:
    """A system's answers to a group of prompts; the last four fields are only of our engines."""

    token_ids: tuple[tuple[int, ...], ...]
    first_token_s: tuple[float | None, ...]  # None for a prompt without tokens
    prefill_s: float  # seconds spent on prompts, including the first tokens
    forwards: int  # of the target after the prefill; each serves all prompts of the group
    draft_forwards: int
    context_tokens: int  # cached tokens read by those forwards, summed over forwards and prompts
    target_calls: int | None
    mean_acceptance_length: float | None
    first_tokens: int = 1  # new tokens of a prompt from the prefill; several where that already verifies a draft
    counters: Counters | None = None
    steps: Sequence[StepRecord] = field(default=(), repr=False)
    finish_reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class System(ABC):
    """A system under test, with a name for reports that is unique in a run."""

    name: str

    @abstractmethod
    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> SystemOutput:
        """Answer prompts, given as token ids, together; TruedraftError if one of them could not be answered."""


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that are answered together."""

    names: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams

    def cut(self, context_length: int, most: int | None = None) -> SamplingParams:
        """Options with at most `most` tokens, and as many as the longest prompt leaves room for."""
        room = context_length - max(map(len, self.prompts))
        limit = self.params.max_tokens if most is None else min(self.params.max_tokens, most)
        return dataclasses.replace(self.params, max_tokens=max(1, min(limit, room)))


@dataclass(frozen=True, slots=True)
class Row:
    """One system's answer to one group of prompts in one run; `cpu_s` is the CPU time of all threads."""

    system: str
    prompts: tuple[str, ...]
    run: int
    place: int
    total_s: float
    cpu_s: float
    output: SystemOutput
    breakdown: Breakdown | None = None
    decisions: Decisions | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.output.token_ids))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s if self.total_s else 0.0

    @property
    def decode_s(self) -> float:
        return self.total_s - self.output.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        later = sum(max(len(tokens) - self.output.first_tokens, 0) for tokens in self.output.token_ids)
        return later / self.decode_s if later and self.decode_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Counts and seconds, no rates, so that every rate can be recomputed."""
        decisions = None if self.decisions is None else self.decisions.as_dict(most=0)
        own = record_of(self, "system", "prompts", "run", "place", "tokens", "total_s", "cpu_s", "breakdown")
        return own | {"decisions": decisions} | record_of(self.output, *_RECORDED)


@dataclass(frozen=True, slots=True)
class Failure:
    """A group that a system could not answer; `system` is "" where the failure was before any system."""

    system: str
    prompts: tuple[str, ...]
    reason: str

    def describe(self) -> str:
        return f"{self.system}{', ' if self.system else ''}prompt {', '.join(self.prompts)}: {self.reason}"


@dataclass(slots=True)
class Results:
    """The results of a benchmark, also of one that Ctrl-C interrupted; the rows are in the order of running."""

    rows: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False


def grouped(prompts: Sequence[tuple[str, Sequence[int], SamplingParams]], size: int) -> list[Group]:
    """Prompts (name, token ids, options) in groups of `size`, in order; a group has the options of its first prompt."""
    parts = [prompts[first : first + size] for first in range(0, len(prompts), size)]
    return [
        Group(tuple(name for name, _, _ in part), tuple(tuple(ids) for _, ids, _ in part), part[0][2]) for part in parts
    ]


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items in rotated order, so that no item is always first."""
    first = by % len(items)
    return [*items[first:], *items[:first]]


def run_all(
    systems: Sequence[System],
    groups: Sequence[Group],
    *,
    runs: int,
    context_length: int,
    costs: Mapping[str, CurveCosts] | None = None,
    keep: Callable[[Row], None] = lambda row: None,
    progress: Progress = unwatched,
) -> Results:
    """Let all systems answer all groups, of at least one, `runs` times each: A B C, then B C A, and so on.

    The first system changes from group to group, so that none always runs with the caches and clocks that another left.
    Answers are cut where prompt and answer fill the target's context. Ctrl-C ends the run; finished rows are kept.
    `progress` is called with the number of finished answers and the name of the next system.
    """
    results = Results()
    rounds = [(run, number, group) for run in range(runs) for number, group in enumerate(groups)]
    done = 0
    try:
        _warm_up(systems, groups, context_length, progress)
        for run, number, group in rounds:
            cut = dataclasses.replace(group, params=group.cut(context_length))
            for place, system in enumerate(rotated(systems, run * len(groups) + number)):
                progress(done, system.name)
                try:
                    row = take_turn(system, cut, run, place, (costs or {}).get(system.name))
                except TruedraftError as error:
                    results.failures.append(Failure(system.name, group.names, str(error)))
                else:
                    results.rows.append(row)
                    keep(row)
                done += 1
        progress(done, "")
    except KeyboardInterrupt:
        results.interrupted = True
    return results


def take_turn(system: System, group: Group, run: int = 0, place: int = 0, costs: CurveCosts | None = None) -> Row:
    """Let one system answer one group, timed; TruedraftError if it failed."""
    cpu, started = time.process_time(), time.perf_counter()
    output = system.answer(group.prompts, group.params)
    total_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    breakdown = break_down(output.steps, total_s, costs) if output.steps else None
    forward_s = None if costs is None else costs.forward_s
    decisions = Decisions.of(output.steps, forward_s) if output.steps else None
    output = dataclasses.replace(output, steps=())  # summed up, because thousands of runs would fill memory
    return Row(system.name, group.names, run, place, total_s, cpu_s, output, breakdown, decisions)


def _warm_up(systems: Sequence[System], groups: Sequence[Group], context_length: int, progress: Progress) -> None:
    """Keep first-time costs out of the measurement; if a step was not settled, all groups are answered."""
    for system in systems:
        progress(0, f"warm-up: {system.name}")
        if _settles(system, groups[0], groups[0].cut(context_length, _WARM_UP_TOKENS)):
            continue
        for _ in range(_WARM_UPS):
            settled = [_settles(system, group, group.cut(context_length)) for group in groups]
            if all(settled):
                break


def _settles(system: System, group: Group, params: SamplingParams) -> bool:
    try:
        return all(step.settled for step in system.answer(group.prompts, params).steps)
    except TruedraftError:
        return True


def time_without_core(rows: Sequence[Row]) -> float:
    """A lower limit of the fraction of time without a core: 1 - CPU time / wall time, at least 0.

    Decoding on the CPU computes all the time, so a value well above 0 means that other processes used the machine.
    """
    total_s = sum(row.total_s for row in rows)
    return max(0.0, 1.0 - sum(row.cpu_s for row in rows) / total_s) if total_s > 0 else 0.0
