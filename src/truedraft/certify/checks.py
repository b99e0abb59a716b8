"""What a certificate consists of: a stack, checks with their findings, and time limits."""

from __future__ import annotations

import copy
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, TypeVar

from truedraft.core.params import SamplingParams
from truedraft.core.stats import Counters
from truedraft.drafters import Drafter
from truedraft.engine import Answer, Engine, Request
from truedraft.engine.policy import Controller, RoundRobin
from truedraft.errors import DrafterError, ModelError, OptionError
from truedraft.models.base import LanguageModel
from truedraft.verification import Rule, SpeculativeSampling

_PATIENCE = 4.0  # factor of its time that a check may take until it has any useful evidence
_SEEDS = 1 << 64
_Item = TypeVar("_Item")


class Part(Enum):
    """The parts of a certificate, in the order in which they are shown."""

    EXACT = "exact"
    EQUALITY = "greedy and seeded"
    STATISTICAL = "statistical"
    CONTROLS = "negative controls"
    INVARIANCE = "invariance"
    DRAFT_STATE = "draft state"
    DIVERGENCE = "divergence"
    # Of engines certified over their interface.
    SAMPLED = "sampled answers"
    GREEDY = "greedy answers"
    LOGPROBS = "log-probabilities"
    BEHAVIOUR = "stops, lengths and seeds"
    AGAINST = "against another engine"
    # Of samplers that run on worlds with a known exact answer.
    WORLDS = "worlds with a known answer"
    PLACES = "places of tokens"


class Status(Enum):
    """Result of a check."""

    HOLDS = "holds"
    FAILS = "fails"
    MEASURED = "measured"
    NOT_ENOUGH = "not enough evidence"
    DOES_NOT_APPLY = "does not apply"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check, or of a part of it; FAILS and NOT_ENOUGH keep a certificate from being issued."""

    part: Part
    name: str
    status: Status
    summary: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stack:
    """The parts that answer together: what is certified.

    Attributes:
        controller: each engine gets a copy. None drafts up to the limits, with all drafters of a portfolio in turn.
        entropy: of the first engine. Later ones count up, so that drafters that learn from answers meet new noise.
    """

    target: LanguageModel
    drafter: Drafter  # shared by all engines made here, one after the other
    rule: Rule  # for requests with a temperature
    coupled_rule: Rule | None = None  # for greedy and seeded requests; None verifies by comparison, as engines do
    controller: Controller | None = None
    entropy: int = 0
    _engines: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def engine(self, batch: int, entropy: int | None = None) -> Engine:
        return Engine(
            self.target,
            self.drafter,
            self.rule,
            RoundRobin() if self.controller is None else copy.deepcopy(self.controller),
            max_batch=batch,
            coupled_rule=self.coupled_rule,
            entropy=self.entropy + next(self._engines) if entropy is None else entropy,
        )

    def plain(self, batch: int) -> Engine:
        return Engine(self.target, rule=SpeculativeSampling(), max_batch=batch)

    def but(self, **parts: LanguageModel | Drafter | Rule | Controller | int | None) -> Stack:
        return replace(self, **parts)  # type: ignore[arg-type]


ReportProgress = Callable[[float], None]  # callback with the completed fraction


def share_of(tell: ReportProgress, number: int, of: int) -> ReportProgress:
    """The callback for job `number` of several, scaled so that `tell` gets the fraction of all jobs."""
    return lambda done: tell((number + done) / of)


@dataclass(frozen=True, slots=True)
class Context:
    """Input of a check; its time may be exceeded several times if there is little evidence by then."""

    stack: Stack
    prompts: Sequence[Sequence[int]]
    params: SamplingParams  # with a seed, requests get consecutive seeds from it on
    batch: int = 1  # requests in a step
    seconds: float = math.inf
    tell: ReportProgress = field(default=lambda done: None)  # gets the completed fraction
    earlier: Sequence[Finding] = ()
    ends: float = math.inf  # time of `now` at which the check must end in any case

    @property
    def end_s(self) -> float:
        return self.ends - now()

    @property
    def over(self) -> bool:
        return self.end_s <= 0.0

    def deadline(self, times: float = 1.0, leaving: float = 0.0) -> Deadline:
        return Deadline(min(times * self.seconds, self.end_s - leaving * self.seconds))

    def patience(self, share: float = 1.0, leaving: float = 0.0) -> Deadline:
        """The deadline until there is any useful evidence."""
        return self.deadline(_PATIENCE * share, leaving)

    def one_by_one(self, items: Sequence[_Item], work: Callable[[_Item, Deadline], None], share: float = 1.0) -> None:
        """Process items until `work` raises `OutOfTimeError` or the share of time is over; the first may be late."""
        deadline, patience = self.deadline(share), self.patience(share)
        for number, item in enumerate(items):
            try:
                work(item, deadline if number else patience)
            except OutOfTimeError:
                return
            self.tell(max(deadline.fraction, (number + 1) / len(items)))
            if deadline.over:
                return


class Check(ABC):
    """One check of a stack; `extra_s` are seconds in addition to its `share` (a fraction) of the certificate's time."""

    part: ClassVar[Part]
    share: float = 0.0
    extra_s: float = 0.0

    @abstractmethod
    def run(self, context: Context) -> list[Finding]:
        """Check the context's stack.

        Raises DrafterError if the drafter gave up, as plain decoding is no evidence about the stack, TruedraftError if
        the target failed.
        """


def check_run(prompts: Sequence[Sequence[int]], most_tokens: float, batch: int, seconds: float) -> None:
    """Refuse prompts, batches or times that leave nothing to check; OptionError for an argument out of range."""
    if not prompts:
        raise OptionError("there is nothing to certify with: give at least one prompt")
    if batch < 1:
        raise OptionError(f"must be 1 or more, got {batch}", field="batch")
    if not 0.0 < seconds < math.inf:
        raise OptionError(f"the time must be above 0, got {seconds} seconds")
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= most_tokens:
            most = f"give 1 to {most_tokens}, so that the model has room to answer"
            raise OptionError(f"prompt {number} has {len(prompt)} tokens; {most}")


def now() -> float:
    """Seconds of a monotonic clock; tests replace it."""
    return time.perf_counter()


class OutOfTimeError(Exception):
    """The time was over before an answer was complete; never leaves this package."""


class Deadline:
    """A deadline in `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self._started = now()
        self.seconds = max(seconds, 1e-9)

    @property
    def fraction(self) -> float:
        return min(1.0, (now() - self._started) / self.seconds)

    @property
    def over(self) -> bool:
        return self.fraction >= 1.0

    def step(self, engine: Engine) -> None:
        if self.over:
            raise OutOfTimeError
        engine.step()

    def answer(self, engine: Engine, request: Request) -> Answer:
        """Complete a request of an engine; a failed one has the finish reason "error".

        Raises OutOfTimeError if the time was over before.
        """
        while request.finish_reason is None:
            self.step(engine)
        answer = request.pieces[-1].answer
        assert answer is not None  # it is complete
        return answer

    def answers(
        self, engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[tuple[Request, Answer]]:
        """`answer` for requests that run together; all are cancelled if the time was over before."""
        requests = [engine.submit(list(prompt), own) for prompt, own in zip(prompts, params, strict=True)]
        try:
            return [(request, self.answer(engine, request)) for request in requests]
        finally:
            for request in requests:
                engine.cancel(request)


def numbered(params: SamplingParams, number: int) -> SamplingParams:
    """The options of one of many requests, by number: with its own seed if they have one."""
    return params if params.seed is None else replace(params, seed=(params.seed + number) % _SEEDS)


def open_ended(params: SamplingParams, length: int) -> SamplingParams:
    """The user's options for an answer that ends only by its length."""
    return replace(params, max_tokens=length, ignore_eos=True, stop=(), stop_token_ids=())


def check_sound(answer: Answer, drafter: str) -> None:
    """Refuse what is no evidence about the stack.

    Raises DrafterError if the drafter gave up or failed for a batch, ModelError if the answer ended with an error.
    """
    if answer.finish_reason == "error":
        raise ModelError(f"nothing can be certified while answers fail: {answer.error}")
    failures = [*answer.warnings, *recovered(answer.stats, drafter)]
    if failures:
        raise DrafterError(f"nothing can be certified while parts fail: {failures[0]}")


def recovered(stats: Counters, drafter: str) -> list[str]:
    """A sentence if something failed for a batch: answers are right then, and the failure would be hidden."""
    if not stats.recoveries:
        return []
    return [
        f"with drafter {drafter!r} a step or a proposal failed for several requests together and was repeated "
        f"for each separately, {stats.recoveries} times"
    ]
