"""Which requests take part in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from truedraft.engine.batch import Batch, StepItem
from truedraft.engine.reading import PromptReading
from truedraft.engine.request import Request


class Scheduler:
    """Requests join and leave between steps; first come, first served.

    Args:
        reading: decides how many prompt tokens a step reads.

    Attributes:
        waiting: requests that have not started or were preempted.
        running: requests that take part in steps, in order of arrival.
    """

    def __init__(self, max_batch: int, reading: PromptReading) -> None:
        self.max_batch = max_batch
        self.reading = reading
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def admit(self, fits: Callable[[Sequence[Request], Request], bool]) -> list[Request]:
        """Admit waiting requests while there is room; returns the new ones."""
        admitted: list[Request] = []
        while self.waiting and len(self.running) < self.max_batch and fits(self.running, self.waiting[0]):
            request = self.waiting.popleft()
            self.running.append(request)
            admitted.append(request)
        return admitted

    def next(self) -> Batch:
        """The next step: all requests that decode, and parts of prompts."""
        ready = [each for each in self.running if each.leader is None and each.finish_reason is None]
        reading = [request for request in ready if not request.decodes]
        parts = self.reading.parts(reading, len(reading) < len(ready)) if reading else ()
        fed = dict(zip(reading, parts, strict=True))
        return Batch([StepItem(request, tokens) for request in ready if (tokens := fed.get(request, 1))])

    def put_back(self, request: Request) -> None:
        """Move a running request to the front of the queue."""
        self.running.remove(request)
        self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """Remove a request, running or waiting."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running
