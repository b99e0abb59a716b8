"""Ctrl-C between two steps in place of inside one: what is half done cannot be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """An interruption that waits until it is let through.

    Attributes:
        waiting: whether there is one.
    """

    def __init__(self, before: Any) -> None:
        self.waiting = False
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The first one waits; who interrupts again will not wait."""
        if self.waiting:
            self._before(number, frame)
        self.waiting = True

    def let_through(self) -> None:
        """Do now what the interruption would have done, if there was one.

        Raises:
            KeyboardInterrupt: as a rule.
        """
        if self.waiting:
            self.waiting = False
            self._before(signal.SIGINT, None)


@contextmanager
def held_interrupts() -> Iterator[Interrupts]:
    """Hold Ctrl-C back inside the block; where it is ignored, or in a thread that never sees it, nothing changes."""
    before = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts(before)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
