"""Which thread steps an engine: a single caller does it itself, several share a driver thread."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

from truedraft.errors import TruedraftError


class FairLock:
    """A lock that the longest waiting thread gets; not re-entrant."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._owner = 0
        self._waiting: deque[threading.Lock] = deque()  # each is released when its thread gets the lock

    @property
    def mine(self) -> bool:
        return self._taken and self._owner == threading.get_ident()

    def refuse_mine(self) -> None:
        if self.mine:
            raise TruedraftError("this was called from inside a step, as by a listener; call it when the step is over")

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def __enter__(self) -> None:
        self.refuse_mine()
        with self._guard:
            if not self._taken:
                self._taken, ticket = True, None
            else:
                ticket = threading.Lock()
                ticket.acquire()
                self._waiting.append(ticket)
        if ticket is not None:
            self._wait(ticket)
        self._owner = threading.get_ident()

    def _wait(self, ticket: threading.Lock) -> None:
        try:
            ticket.acquire()
        except BaseException:  # Ctrl-C
            with self._guard:
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
                else:
                    self._hand_over()
            raise

    def try_now(self) -> bool:
        """Acquire the lock if it is free; never blocks, so that finalizers may call it."""
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
        self.give_back()

    def give_back(self) -> None:
        with self._guard:
            self._hand_over()

    def _hand_over(self) -> None:
        self._owner = 0
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self._taken = False


class Loop:
    """Steps an engine for all waiting callers.

    A single caller steps in its own thread. As soon as a second one waits, and for event loops, a driver thread steps
    for all of them until the engine is idle, so that threads do not pass the engine on at every step. `step` returns
    whether any request is left; it acquires `lock` itself.
    """

    def __init__(self, step: Callable[[], bool], lock: FairLock) -> None:
        self._step = step
        self._lock = lock
        self._changed = threading.Condition()
        self._waiting = 0  # callers in `run_until`
        self._driver: threading.Thread | None = None
        self._failure: BaseException | None = None  # what ended the last driver
        self._wakes: list[Callable[[], object]] = []  # of callers in event loops

    def run_until(self, done: Callable[[], bool]) -> None:
        """Step the engine, in this thread or in the driver, until `done` returns True."""
        self._lock.refuse_mine()
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
        try:
            while not done():
                if self._waiting == 1 and self._driver is None and not self._wakes:
                    self._step()
                else:
                    self._wait(done)
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._changed:
            self._begin_driving()
            self._changed.wait_for(lambda: done() or self._driver is None)
            if self._failure is not None and not done():
                raise self._failure

    async def until(self, done: Callable[[], bool]) -> None:
        """`run_until` for an event loop, which continues to run while the driver steps; raises what a step raises."""
        there, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(there.set)

        with self._changed:
            self._wakes.append(wake)
        try:
            while not done():
                with self._changed:
                    self._begin_driving()
                await there.wait()
                there.clear()
                if not done() and self._driver is None and self._failure is not None:
                    raise self._failure
        finally:
            with self._changed:
                self._wakes.remove(wake)

    def _begin_driving(self) -> None:
        if self._driver is None:
            self._failure = None
            run = contextvars.copy_context().run  # so that torch uses the caller's number of threads
            self._driver = threading.Thread(target=run, args=(self._drive,), name="truedraft-driver", daemon=True)
            self._driver.start()

    def _drive(self) -> None:
        try:
            while self._step():
                with self._changed:
                    self._notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = error
        finally:
            with self._changed:
                self._driver = None
                self._notify_all()

    def _notify_all(self) -> None:
        self._changed.notify_all()
        for wake in self._wakes:
            wake()
