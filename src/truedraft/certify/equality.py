"""Greedy and coupled answers with speculation, held against plain decoding bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from truedraft.certify.clock import PATIENCE, Deadline, OutOfTimeError, answers_in_time
from truedraft.certify.findings import Finding, Part, Status
from truedraft.certify.near_ties import Parting, parting_of, same_answer
from truedraft.certify.rounding import Rounding, measure_rounding
from truedraft.certify.sampling_runs import recovered
from truedraft.certify.stack import Stack
from truedraft.core.counters import Counters
from truedraft.core.sampling import SamplingParams
from truedraft.engine import Answer, Engine

_MOST_FAULTS = 4
"""Faults that are traced; one is enough to fail, and a broken stack parts from plain decoding everywhere."""
_ROUNDING_TEXTS = 8
_ROUNDING_PLACES = 8
"""Of each text. A text costs a dozen shapes of so many places, and a certificate with little time has one text."""
_ROUNDING_SHARE = 0.15  # of the time


def equality_findings(
    stack: Stack,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    batch: int,
    tell: Callable[[float], None],
    *,
    label: str,
    seconds: float = float("inf"),
) -> list[Finding]:
    """Compare answers with speculation, alone and in batches, with plain decoding's: tokens and reasons for the end.

    Greedy answers are always compared; coupled ones where `params` asks for them. Every divergence is traced to its
    first differing token and is a near tie or a fault (`near_ties`). Stop texts are left out: they act on tokens that
    are already decided.

    Args:
        stack: what is certified.
        prompts: token ids, at least one prompt. Fewer than `batch` are repeated from later starts on.
        params: the user's options. Seeds of coupled requests count up from its seed.
        batch: requests of a step; 1 leaves out what is the same then.
        tell: called with the fraction that is done.
        label: of the target's dtype or other setting, for the names of the findings.
        seconds: how long to go on; several times as long until the first group of `batch` prompts is compared.

    Returns:
        What rounding was measured, then one finding for each kind of request and size of batch; NOT_ENOUGH where the
        first group was not compared in time.
    """
    prompts = enough_prompts(prompts, batch)
    kinds = {"greedy": as_greedy(params)}
    if params.coupled and not params.greedy:
        kinds["coupled"] = dataclasses.replace(params, stop=(), seed=params.seed or 0)
    share = seconds * (1.0 - _ROUNDING_SHARE) / len(kinds)
    findings: list[Finding] = []
    texts: list[list[int]] = []
    for number, (kind, options) in enumerate(kinds.items()):
        if kind == "greedy" and not stack.rule.lossless:
            findings.append(_lossy(stack, label))
            continue
        run = _Run(stack, prompts, options, batch)
        for done in run.groups(share):
            tell((number + done) / len(kinds) * (1.0 - _ROUNDING_SHARE))
        findings += run.findings(kind, label)
        texts += run.texts
    if texts:
        rounding = measure_rounding(
            stack.target,
            sorted(texts, key=len, reverse=True)[:_ROUNDING_TEXTS],
            batch,
            params,
            stack.drafter.limits,
            positions=_ROUNDING_PLACES,
            seconds=seconds * _ROUNDING_SHARE,
        )
        findings.insert(0, rounding_finding(rounding, label))
    tell(1.0)
    return findings


def rounding_finding(rounding: Rounding, label: str) -> Finding:
    """What a measurement of rounding says by itself: drafted rows that leave plain ones by more are a fault."""
    status = Status.HOLDS if rounding.bitwise else Status.MEASURED if rounding.is_rounding else Status.FAILS
    told = rounding.describe()
    return Finding(Part.EQUALITY, f"rounding, {label}", status, f"{told[0].upper()}{told[1:]}.", rounding.as_dict())


def as_greedy(params: SamplingParams) -> SamplingParams:
    """The same request at temperature 0, without stop texts."""
    return SamplingParams(
        params.max_tokens, stop_token_ids=params.stop_token_ids, ignore_eos=params.ignore_eos, seed=params.seed or 0
    )


def enough_prompts(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """At least `count` prompts: the given ones, then the same from their second token on, and so on.

    Repeated prompts differ, since equal neighbours would hide it if one were answered with another's rows.
    """
    found = [list(prompt) for prompt in prompts]
    for number in range(count - len(prompts)):
        prompt, later = prompts[number % len(prompts)], 1 + number // len(prompts)
        found.append(list(prompt[min(later, len(prompt) - 1) :]))
    return found


@dataclass
class _Outcome:
    """What came of one size of batch.

    Attributes:
        compared: tokens of plain answers.
        answers: how many.
        partings: those that were traced.
        untraced: divergences after several faults.
        stats: counts of the answers with speculation.
        warnings: of these answers.
    """

    compared: int = 0
    answers: int = 0
    partings: list[Parting] = field(default_factory=list)
    untraced: int = 0
    stats: Counters = field(default_factory=Counters)
    warnings: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[Parting]:
        """Divergences that rounding does not explain."""
        return [parting for parting in self.partings if parting.fault]

    @property
    def traces(self) -> bool:
        """Whether the next divergence is traced."""
        return len(self.faults) < _MOST_FAULTS


class _Run:
    """Answers of one kind, group by group."""

    def __init__(self, stack: Stack, prompts: Sequence[Sequence[int]], params: SamplingParams, batch: int) -> None:
        self._stack = stack
        self._prompts = prompts
        self._each = [dataclasses.replace(params, seed=(params.seed or 0) + i) for i in range(len(prompts))]
        self._batch = batch
        self._plain = stack.plain(1)
        self._engines = {size: stack.engine(size) for size in sorted({1, batch})}
        self._outcomes = {size: _Outcome() for size in self._engines}
        self.texts: list[list[int]] = []

    def groups(self, seconds: float) -> Iterator[float]:
        """Compare group after group while there is time; gives the fraction that is done."""
        deadline, patience = Deadline(seconds), Deadline(PATIENCE * seconds)
        for first in range(0, len(self._prompts), self._batch):
            group = range(first, min(first + self._batch, len(self._prompts)))
            try:
                self._compare_group(group, deadline if first else patience)
            except OutOfTimeError:
                return
            yield max(deadline.fraction, (group[-1] + 1) / len(self._prompts))
            if deadline.over:
                return

    def _compare_group(self, group: Sequence[int], deadline: Deadline) -> None:
        """Each prompt plainly and by itself, then all of them together."""

        def answers(engine: Engine, numbers: Sequence[int]) -> list[Answer]:
            prompts, each = [self._prompts[i] for i in numbers], [self._each[i] for i in numbers]
            return answers_in_time(engine, prompts, each, deadline)

        expected: list[Answer] = []
        for number in group:
            expected += answers(self._plain, [number])
            self.texts.append([*self._prompts[number], *expected[-1].token_ids])
            self._compare(1, [number], expected[-1:], answers(self._engines[1], [number]))
        if self._batch > 1:
            self._compare(self._batch, group, expected, answers(self._engines[self._batch], group))

    def _compare(self, size: int, group: Sequence[int], expected: Sequence[Answer], found: Sequence[Answer]) -> None:
        outcome = self._outcomes[size]
        for number, plain, other in zip(group, expected, found, strict=True):
            outcome.answers += 1
            outcome.compared += len(plain.token_ids)
            outcome.stats += other.stats
            outcome.warnings += other.warnings
            if not outcome.traces:
                outcome.untraced += not same_answer(plain, other)
                continue
            parting = parting_of(
                self._stack.target,
                self._prompts,
                number,
                self._each[number],
                (plain, other),
                size,
                self._stack.drafter.limits,
            )
            if parting is not None:
                outcome.partings.append(parting)

    def findings(self, kind: str, label: str) -> list[Finding]:
        """What was found, one finding for each size of batch."""
        return [
            _finding(f"{kind}, batch {size}, {label}", outcome, self._stack, least=size)
            for size, outcome in self._outcomes.items()
        ]


def _finding(name: str, outcome: _Outcome, stack: Stack, least: int) -> Finding:
    """What is said of one size of batch; fewer than `least` answers, or no token at all, say nothing."""
    near = [parting for parting in outcome.partings if not parting.fault]
    faults = len(outcome.faults) + outcome.untraced
    too_few = outcome.answers < least or not outcome.compared
    told = f"{outcome.compared} tokens of {outcome.answers} answers compared with plain decoding's"
    if faults:
        summary = f"{told}: {_count(faults, 'fault')}, the first at {outcome.faults[0].describe()}"
    elif too_few:
        summary = f"{told}, which says too little; give more minutes"
    elif near:
        summary = f"{told}: {_count(len(near), 'near tie')} and no fault; the first at {near[0].describe()}"
    else:
        summary = f"{told}: bit for bit equal"
    told_of = [*outcome.warnings, *recovered(outcome.stats, stack.drafter.name)]
    if told_of:
        summary += f"; {_count(len(told_of), 'warning')}, the first: {told_of[0]}"
    facts: dict[str, Any] = {
        "dtype": str(stack.target.dtype).removeprefix("torch."),
        "answers": outcome.answers,
        "tokens_compared": outcome.compared,
        "identical": not outcome.partings and not outcome.untraced,
        "near_ties": [parting.as_dict() for parting in near],
        "faults": [parting.as_dict() for parting in outcome.faults],
        "untraced": outcome.untraced,
        "draft_tokens": outcome.stats.draft_tokens,
        "accepted_tokens": outcome.stats.accepted_tokens,
        "recoveries": outcome.stats.recoveries,
        "warnings": outcome.warnings,
    }
    # A drafter that gave up leaves plain decoding, which equals itself.
    status = Status.FAILS if faults or told_of else Status.NOT_ENOUGH if too_few else Status.HOLDS
    return Finding(Part.EQUALITY, name, status, f"{summary}.", facts)


def _lossy(stack: Stack, label: str) -> Finding:
    return Finding(
        Part.EQUALITY,
        f"greedy, {label}",
        Status.DOES_NOT_APPLY,
        f"The rule {stack.rule.spec!r} is lossy: at temperature 0 too it may keep tokens that are not the likeliest.",
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
