"""Whose turn it is: a lock that threads get in the order in which they asked."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Turns:
    """A lock that is handed over: who has waited longest gets it, before the one who gives it back can ask again.

    Python's own locks go to whoever comes first, mostly the thread that just had it, so others wait by luck. Not
    re-entrant.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._owner = 0
        self._waiting: deque[threading.Lock] = deque()  # each is released when its thread's turn comes

    @property
    def mine(self) -> bool:
        """Whether the calling thread holds it."""
        return self._taken and self._owner == threading.get_ident()

    @property
    def waiting(self) -> int:
        """Threads that wait for it."""
        return len(self._waiting)

    def __enter__(self) -> None:
        """Wait for the turn."""
        with self._guard:
            if not self._taken:
                self._taken, turn = True, None
            else:
                turn = threading.Lock()
                turn.acquire()
                self._waiting.append(turn)
        if turn is not None:
            self._wait(turn)
        self._owner = threading.get_ident()

    def _wait(self, turn: threading.Lock) -> None:
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C
            with self._guard:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._hand_over()
            raise

    def try_now(self) -> bool:
        """Take it if it is free at this moment; never waits, so that it may be called from a finalizer."""
        if not self._guard.acquire(blocking=False):
            return False
        try:
            if self._taken:
                return False
            self._taken, self._owner = True, threading.get_ident()
            return True
        finally:
            self._guard.release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it to who has waited longest."""
        self.give_back()

    def give_back(self) -> None:
        """The same, after `try_now`."""
        with self._guard:
            self._hand_over()

    def _hand_over(self) -> None:
        self._owner = 0
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self._taken = False
