"""What a certificate is made of: a stack, checks of it, what each of them found, and the time they may take."""

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
from truedraft.engine.policy import Controller, InTurn
from truedraft.errors import DrafterError, ModelError, OptionError
from truedraft.models.base import LanguageModel
from truedraft.verification import Rule, SpeculativeSampling

PATIENCE = 4.0
"""So many times its time a check may take to come to the least evidence that says anything; then it says so."""
_SEEDS = 1 << 64
_Item = TypeVar("_Item")

# ---------------------------------------------------------------------------------------- checks and their findings


class Part(Enum):
    """The parts of a certificate, in the order in which they are shown."""

    EXACT = "exact"
    EQUALITY = "greedy and seeded"
    STATISTICAL = "statistical"
    CONTROLS = "negative controls"
    INVARIANCE = "invariance"
    DRAFT_STATE = "draft state"
    DIVERGENCE = "divergence"
    # Of engines that are asked from outside.
    SAMPLED = "sampled answers"
    GREEDY = "greedy answers"
    LOGPROBS = "log-probabilities"
    BEHAVIOUR = "stops, lengths and seeds"
    AGAINST = "against another engine"
    # Of samplers that are called on worlds whose exact answer is known.
    WORLDS = "worlds with a known answer"
    PLACES = "places of tokens"


class Status(Enum):
    """What came of a check."""

    HOLDS = "holds"
    FAILS = "fails"
    MEASURED = "measured"
    NOT_ENOUGH = "not enough evidence"
    DOES_NOT_APPLY = "does not apply"


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one check, or of a part of it.

    Attributes:
        part: the heading that it stands under.
        name: what was checked, in a few words.
        status: what came of it; FAILS and NOT_ENOUGH keep a certificate from being issued.
        summary: one sentence, with the numbers that matter.
        facts: all numbers, for programs; plain values, lists and dictionaries.
    """

    part: Part
    name: str
    status: Status
    summary: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stack:
    """Parts that answer together: what is certified.

    Attributes:
        target: the model that decides.
        drafter: guesses; engines made here share it, one after the other.
        rule: judges requests at a temperature.
        coupled_rule: judges greedy and seeded requests; None compares, as engines do.
        controller: says how much is drafted; each engine gets a copy of it. None is all that the drafter may, and every
            drafter of a portfolio in turn (`InTurn`).
        entropy: of the first engine; the others' count up, for drafters that learn from answers must not meet the noise
            that these were drawn by.
    """

    target: LanguageModel
    drafter: Drafter
    rule: Rule
    coupled_rule: Rule | None = None
    controller: Controller | None = None
    entropy: int = 0
    _engines: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def engine(self, batch: int, entropy: int | None = None) -> Engine:
        """An engine with speculation, of at most `batch` requests in a step; `entropy` in place of its own."""
        return Engine(
            self.target,
            self.drafter,
            self.rule,
            InTurn() if self.controller is None else copy.deepcopy(self.controller),
            max_batch=batch,
            coupled_rule=self.coupled_rule,
            entropy=self.entropy + next(self._engines) if entropy is None else entropy,
        )

    def plain(self, batch: int) -> Engine:
        """An engine without a drafter: the answers that speculation must not change."""
        return Engine(self.target, rule=SpeculativeSampling(), max_batch=batch)

    def but(self, **parts: LanguageModel | Drafter | Rule | Controller | int | None) -> Stack:
        """The same with other parts."""
        return replace(self, **parts)  # type: ignore[arg-type]


Tell = Callable[[float], None]
"""Is told the fraction that is done."""


def share_of(tell: Tell, number: int, of: int) -> Tell:
    """What one of several jobs, by number, tells its progress to, so that `tell` hears of all of them."""
    return lambda done: tell((number + done) / of)


@dataclass(frozen=True, slots=True)
class Context:
    """What a check works with.

    Attributes:
        stack: what is certified.
        prompts: token ids, at least one prompt.
        params: the user's options. Where they have a seed, seeds of requests count up from it.
        batch: requests of a step.
        seconds: how long the check may take; several times as long where little could be seen by then.
        ends: by `now`, when it must be over whatever could be seen.
        tell: is told the fraction of the check that is done.
        earlier: what the checks before this one found.
    """

    stack: Stack
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    batch: int = 1
    seconds: float = math.inf
    tell: Tell = field(default=lambda done: None)
    earlier: Sequence[Finding] = ()
    ends: float = math.inf

    @property
    def end_s(self) -> float:
        """Seconds until its end."""
        return self.ends - now()

    @property
    def over(self) -> bool:
        """Whether its end is reached."""
        return self.end_s <= 0.0

    def left_s(self, times: float = 1.0, leaving: float = 0.0) -> float:
        """So many times the check's seconds, and never more than are left until its end.

        Args:
            times: of `seconds`.
            leaving: of `seconds`, what must be left then.
        """
        return min(times * self.seconds, self.end_s - leaving * self.seconds)

    def deadline(self, times: float = 1.0, leaving: float = 0.0) -> Deadline:
        """The same as a time from now."""
        return Deadline(self.left_s(times, leaving))


class Check(ABC):
    """One check of a stack.

    Attributes:
        part: the heading of its findings.
        share: of the time for a certificate, what it may take.
        apart_s: seconds that it takes beside its share.
    """

    part: ClassVar[Part]
    share: float = 0.0
    apart_s: float = 0.0

    @abstractmethod
    def run(self, context: Context) -> list[Finding]:
        """Check the context's stack.

        Raises:
            DrafterError: the drafter gave up, which leaves plain decoding and says nothing of the stack.
            TruedraftError: the target failed.
        """


def check_run(prompts: Sequence[Sequence[int]], most_tokens: float, batch: int, seconds: float) -> None:
    """Refuse what leaves nothing to check, or no time.

    Args:
        prompts: token ids.
        most_tokens: of a prompt, so that the model has room to answer.
        batch: requests that are answered together.
        seconds: that it may take.

    Raises:
        OptionError: says what.
    """
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


# ---------------------------------------------------------------------------------------- time, and answers within it


def now() -> float:
    """Seconds of a clock that only goes forward; tests put another in its place."""
    return time.perf_counter()


class OutOfTimeError(Exception):
    """The time was over before an answer was; never leaves this package."""


class Deadline:
    """A time from now.

    Args:
        seconds: until it is over.
    """

    def __init__(self, seconds: float) -> None:
        self._started = now()
        self._seconds = max(seconds, 1e-9)

    @property
    def fraction(self) -> float:
        """How much of the time is gone, at most 1."""
        return min(1.0, (now() - self._started) / self._seconds)

    @property
    def over(self) -> bool:
        """Whether it is over."""
        return self.fraction >= 1.0

    def step(self, engine: Engine) -> None:
        """One step of an engine, if there is time for it.

        Raises:
            OutOfTimeError: there is none.
        """
        if self.over:
            raise OutOfTimeError
        engine.step()


def one_by_one(
    items: Sequence[_Item], context: Context, share: float, work: Callable[[_Item, Deadline], None], tell: Tell
) -> None:
    """Do some work on one item after another while there is time, of which the first may have several times as much.

    Args:
        items: in their order.
        context: says how much time there is.
        share: of it, for all items.
        work: on an item until a deadline; where that raises `OutOfTimeError` it is over.
        tell: is told the fraction that is done.
    """
    deadline, patience = context.deadline(share), context.deadline(PATIENCE * share)
    for number, item in enumerate(items):
        try:
            work(item, deadline if number else patience)
        except OutOfTimeError:
            return
        tell(max(deadline.fraction, (number + 1) / len(items)))
        if deadline.over:
            return


def answered_in_time(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], deadline: Deadline
) -> list[Request]:
    """Requests that are asked together and are over; a failed one has the finish reason "error".

    Raises:
        OutOfTimeError: the time was over before they were; nothing is left of them.
    """
    requests = [engine.submit(list(prompt), own) for prompt, own in zip(prompts, params, strict=True)]
    try:
        while any(request.finish_reason is None for request in requests):
            deadline.step(engine)
    finally:
        for request in requests:
            engine.cancel(request)
    return requests


def answers_in_time(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], deadline: Deadline
) -> list[Answer]:
    """The same as answers."""
    return [answer_of(request) for request in answered_in_time(engine, prompts, params, deadline)]


def answer_of(request: Request) -> Answer:
    """What a request that is over was answered."""
    answer = request.pieces[-1].answer
    assert answer is not None  # it is over
    return answer


def numbered(params: SamplingParams, number: int) -> SamplingParams:
    """The options of one of many requests, by number: with a seed of its own where they have one."""
    return params if params.seed is None else replace(params, seed=(params.seed + number) % _SEEDS)


def open_ended(params: SamplingParams, length: int) -> SamplingParams:
    """The user's options for an answer that ends by its length alone."""
    return replace(params, max_tokens=length, ignore_eos=True, stop=(), stop_token_ids=())


def check_sound(answer: Answer, drafter: str) -> None:
    """Raise where an answer, or its drafter, failed: what is left says nothing of the stack.

    Args:
        answer: with speculation.
        drafter: its name.

    Raises:
        DrafterError: the drafter gave up, and the answer went on without it, or batches failed.
        ModelError: the answer ended with an error.
    """
    if answer.finish_reason == "error":
        raise ModelError(f"nothing can be certified while answers fail: {answer.error}")
    told = [*answer.warnings, *recovered(answer.stats, drafter)]
    if told:
        raise DrafterError(f"nothing can be certified while parts fail: {told[0]}")


def recovered(stats: Counters, drafter: str) -> list[str]:
    """A sentence if something failed for a batch: answers are right then, and a fault is out of sight."""
    if not stats.recoveries:
        return []
    return [
        f"with drafter {drafter!r} a step or a proposal failed for several requests together and was asked for again "
        f"for them apart, {stats.recoveries} times"
    ]
