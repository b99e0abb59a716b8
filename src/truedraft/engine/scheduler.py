"""Which requests take part in the next step."""

from __future__ import annotations

from collections import deque

from truedraft.engine.request import Request


class Scheduler:
    """Requests join and leave between steps; first come, first served.

    Prompts are prefilled in parts of `chunk` tokens that start at multiples of `chunk`, so that where a prompt is
    cut does not depend on the other requests.

    Args:
        max_batch: most requests in one step.
        chunk: most tokens of one prompt in one step.
        max_prefill: most prompt tokens in one step, over all requests.
    """

    def __init__(self, max_batch: int = 32, chunk: int = 256, max_prefill: int = 1024) -> None:
        self._max_batch = max_batch
        self._max_prefill = max_prefill
        self.chunk = chunk
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Let waiting requests in while there is room; returns the new ones."""
        admitted: list[Request] = []
        while self.waiting and len(self.running) < self._max_batch:
            request = self.waiting.popleft()
            self.running.append(request)
            admitted.append(request)
        return admitted

    def next(self) -> list[Request]:
        """The requests of the next step: all that decode, and prefills while their tokens fit."""
        batch: list[Request] = []
        prefill = 0
        for request in self.running:
            count = self.chunk_of(request)
            if request.uncached > 1 or request.emitted == 0:
                if prefill and prefill + count > self._max_prefill:
                    continue
                prefill += count
            batch.append(request)
        return batch

    def chunk_of(self, request: Request) -> int:
        """Tokens of a request that the next forward feeds."""
        return min(request.uncached, self.chunk)

    def remove(self, request: Request) -> None:
        """A request is over, wherever it was."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self.waiting and not self.running
