"""Which requests take part in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from truedraft.engine.batch import Batch, StepItem
from truedraft.engine.request import Request


class Scheduler:
    """Requests join and leave between steps; first come, first served.

    While answers are being written, no step reads more of prompts than one part of `chunk` tokens, so that they go on.

    Args:
        max_batch: most requests in one step.
        chunk: most tokens of one prompt in one step.
        max_prefill: most prompt tokens in one step over all requests, while no answer is being written.
    """

    def __init__(self, max_batch: int = 32, chunk: int = 256, max_prefill: int = 1024) -> None:
        self.max_batch = max_batch
        self._max_prefill = max_prefill
        self.chunk = chunk
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def admit(self, fits: Callable[[Sequence[Request], Request], bool]) -> list[Request]:
        """Let waiting requests in while there is room; returns the new ones.

        Args:
            fits: whether there is memory for a request beside those that run.
        """
        admitted: list[Request] = []
        while self.waiting and len(self.running) < self.max_batch and fits(self.running, self.waiting[0]):
            request = self.waiting.popleft()
            self.running.append(request)
            admitted.append(request)
        return admitted

    def next(self) -> Batch:
        """The next step: all requests that decode, and parts of prompts while they fit."""
        items: list[StepItem] = []
        prefill = 0
        decode = [request.decodes for request in self.running]
        most = self.chunk if True in decode else self._max_prefill
        for request, decodes in zip(self.running, decode, strict=True):
            if request.leader is not None or request.finish_reason is not None:
                continue
            # Parts end at multiples of their size, whatever was copied before them.
            fed = 1 if decodes else min(request.uncomputed, self.chunk - request.computed % self.chunk)
            if request.inputs is not None and not request.computed:
                fed = request.prompt_tokens  # what images gave a token is known while the whole prompt is read
            if not decodes:
                if prefill and prefill + fed > most:
                    continue
                prefill += fed
            items.append(StepItem(request, fed))
        return Batch(items)

    def put_back(self, request: Request) -> None:
        """A request that ran waits again, before all others."""
        self.running.remove(request)
        self.waiting.appendleft(request)

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
