"""How long a part of a certificate may take."""

from __future__ import annotations

import time
from collections.abc import Sequence

from truedraft.core.sampling import SamplingParams
from truedraft.engine import Answer, Engine, Request

PATIENCE = 4.0
"""So many times its time a part may take to come to the least evidence that says anything; then it says so."""


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


def answers_in_time(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], deadline: Deadline
) -> list[Answer]:
    """Answers to prompts that are asked together; a failed one has the finish reason "error".

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
    return [answer_of(request) for request in requests]


def answer_of(request: Request) -> Answer:
    """What a request that is over was answered."""
    answer = request.pieces[-1].answer
    assert answer is not None  # it is over
    return answer
