"""Which thread steps an engine: a caller that is alone does it itself, several share a driver."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

from truedraft.errors import TruedraftError


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


class Loop:
    """Steps an engine for all who wait for something.

    A caller that is alone steps in its own thread: nothing is handed over. As soon as a second one waits, a driver
    thread steps for all of them, until the engine has nothing left to do; so threads do not hand the engine over at
    every step, and one that takes its tokens slowly, or never, holds nobody up. For who waits in an event loop the
    driver steps from the first one on.

    Args:
        step: one step of the engine; says whether any request is left. It takes its turn itself.
        turns: of the threads that step, which a user's own calls of `step` also take.
    """

    def __init__(self, step: Callable[[], bool], turns: Turns) -> None:
        self._step = step
        self._turns = turns
        self._news = threading.Condition()
        self._waiting = 0  # callers in `run_until`
        self._driver: threading.Thread | None = None
        self._failure: BaseException | None = None  # what ended the last driver
        self._wakes: list[Callable[[], object]] = []  # of those who wait in event loops

    def run_until(self, done: Callable[[], bool]) -> None:
        """Return when `done` says so; until then the engine steps, in this thread or in the driver.

        Raises:
            TruedraftError: called from inside a step.
            BaseException: what a step raised, a listener's error for one.
        """
        if self._turns.mine:
            raise TruedraftError("a step was asked for from inside a step; ask for it when `step` is over")
        with self._news:
            self._waiting += 1
            self._news.notify_all()
        try:
            while not done():
                if self._waiting == 1 and self._driver is None and not self._wakes:
                    self._step()
                else:
                    self._wait(done)
        finally:
            with self._news:
                self._waiting -= 1
                self._news.notify_all()

    def _wait(self, done: Callable[[], bool]) -> None:
        """Let the driver step until `done`, or until there is none any more."""
        with self._news:
            self._begin_driving()
            self._news.wait_for(lambda: done() or self._driver is None)
            if self._failure is not None and not done():
                raise self._failure

    async def until(self, done: Callable[[], bool]) -> None:
        """Return when `done` says so, which the driver's steps bring about; the event loop runs on meanwhile.

        Raises:
            BaseException: what a step raised, a listener's error for one.
        """
        there, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed: nobody waits there any more
                loop.call_soon_threadsafe(there.set)

        with self._news:
            self._wakes.append(wake)
        try:
            while not done():
                with self._news:
                    self._begin_driving()
                await there.wait()
                there.clear()
                if not done() and self._driver is None and self._failure is not None:
                    raise self._failure
        finally:
            with self._news:
                self._wakes.remove(wake)

    def _begin_driving(self) -> None:
        """Start the driver unless it runs; the lock is held."""
        if self._driver is None:
            self._failure = None
            run = contextvars.copy_context().run  # the caller's choice of threads for torch is the driver's
            self._driver = threading.Thread(target=run, args=(self._drive,), name="truedraft-driver", daemon=True)
            self._driver.start()

    def _drive(self) -> None:
        try:
            while self._step():
                with self._news:
                    self._tell_all()
        except BaseException as error:
            with self._news:
                self._failure = error
        finally:
            with self._news:
                self._driver = None
                self._tell_all()

    def _tell_all(self) -> None:
        """Something may have come; the lock is held."""
        self._news.notify_all()
        for wake in self._wakes:
            wake()
