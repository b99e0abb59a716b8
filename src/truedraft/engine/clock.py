"""How long the parts of a step take."""

from __future__ import annotations

import time

import torch


class StepClock:
    """Stopped after the decisions, after drafting, after the forward and after the verdicts of one step.

    On a CUDA device drafting and the forward are only queued, so there events in the queue tell how long they took; the
    host reads them after the step's one wait, and does not wait for them itself. Where nothing was waited for, as
    behind a part of a prompt, the seconds are the host's.

    Args:
        device: of the target.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] | None = [] if device.type == "cuda" else None
        self._marks: list[float] = []
        self.lap()

    def lap(self) -> None:
        """A part of the step is over."""
        if self._events is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        self._marks.append(time.perf_counter())

    def seconds(self) -> tuple[float, float, float, float, float]:
        """Of drafting, of the forward, of the verdicts, of the whole step up to now, and of deciding."""
        began, decided, drafted, forwarded, verified = self._marks
        draft_s, target_s = drafted - decided, forwarded - drafted
        if self._events is not None and self._events[3].query():
            _, first, second, third, _ = self._events
            draft_s, target_s = first.elapsed_time(second) / 1e3, second.elapsed_time(third) / 1e3
        verify_s = max(verified - decided - draft_s - target_s, 0.0)
        return draft_s, target_s, verify_s, time.perf_counter() - began, decided - began
