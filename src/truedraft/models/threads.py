"""Who gets the CPU's threads: forwards, torch's own kernels between them, or nobody while they wait for each other.

The threads of torch's own kernels meet after every product. Where another program takes a core, all wait for the one
thread that lost it, dozens of times in a forward, and one thread alone is many times faster (benchmarks/LOG.md). The
native forward has its own threads and needs none of this.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from statistics import fmean, median
from typing import TypeVar

import torch

Result = TypeVar("Result")
# Longer parts of prompts keep all threads: in float32 the bits of 128 rows and more depend on how many there are.
_MOST_ROWS = 32
_JUDGED = 8  # forwards on all threads
_REFERENCES = (3, 6)  # forwards that run on one thread to know what it takes,
_REFERENCE_EVERY = 200  # and again, as contexts grow
_WINS = 5
_CLEARLY = 0.9
_BETWEEN_TRIES = 20.0  # times what a try of all threads took
_LONGEST_FACTOR = 4
_SOON = 64  # forwards


_of_forwards: ContextVar[int | None] = ContextVar("threads of forwards while torch has one", default=None)


def forward_threads() -> int:
    """Threads that a forward may use: torch's number, or what it was before `torch_on_one_thread`."""
    return _of_forwards.get() or torch.get_num_threads()


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """Torch's own kernels on one thread for a while, forwards on as many as before.

    Behind each kernel that they share, torch's threads look for the next one for milliseconds, on processors that the
    threads of the native forward need: a step of the embedded target with its draft took half as long again.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    token = _of_forwards.set(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _of_forwards.reset(token)


@contextmanager
def torch_on_all_threads() -> Iterator[None]:
    """Within `torch_on_one_thread`, all of them again: for forwards that are made of torch's kernels."""
    threads = _of_forwards.get()
    if threads is None:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)


class ThreadChoice:
    """Runs forwards on all of torch's threads, or on one while their times say that it is faster.

    Forwards of about as many rows are compared. On all threads the last eight, their slowest left out, are held to what
    one thread takes; while it is on one thread, all are tried now and then, and must win five times in a row. An idle
    machine pays with one forward of 200.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._on_all: dict[int, deque[float]] = {}
        self._on_one: dict[int, deque[float]] = {}
        self._counts: dict[int, int] = {}
        self._alone = False
        self._since_s = 0.0  # on one thread, since all were tried
        self._wait_s = 0.0  # until all are tried again
        self._wins = 0
        self._factor = 1
        self._forwards = 0  # since all threads were taken again

    def run(self, rows: int, forward: Callable[[], Result]) -> Result:
        """A forward of so many rows; returns what it returns."""
        threads = torch.get_num_threads()
        if threads == 1 or rows > _MOST_ROWS:
            return forward()
        size = rows.bit_length()
        one = self._takes_one(size)
        began = self._clock()
        if one:
            torch.set_num_threads(1)
        try:
            result = forward()
        finally:
            if one:  # not otherwise: it takes a while even where nothing changes
                torch.set_num_threads(threads)
        self._note(size, one, self._clock() - began)
        return result

    def _takes_one(self, size: int) -> bool:
        if self._alone:
            return self._since_s < self._wait_s
        count = self._counts[size] = self._counts.get(size, 0) + 1
        return count in _REFERENCES or count % _REFERENCE_EVERY == 0

    def _note(self, size: int, one: bool, seconds: float) -> None:
        alone = self._on_one.setdefault(size, deque(maxlen=3))
        together = self._on_all.setdefault(size, deque(maxlen=_JUDGED))
        (alone if one else together).append(seconds)
        if self._alone and one:
            self._since_s += seconds
        elif self._alone:
            self._judge_try(seconds, median(alone) if alone else 0.0)
        else:
            self._forwards += 1
            if len(alone) > 1 and len(together) == _JUDGED and fmean(sorted(together)[:-1]) > median(alone):
                self._go_alone(median(together))

    def _go_alone(self, together_s: float) -> None:
        self._alone = True
        # Where all threads were taken back too soon, the next time is later.
        self._factor = min(2 * self._factor, _LONGEST_FACTOR) if self._forwards < _SOON else 1
        self._put_off(together_s)

    def _put_off(self, seconds: float) -> None:
        self._since_s, self._wins = 0.0, 0
        self._wait_s = _BETWEEN_TRIES * self._factor * seconds

    def _judge_try(self, seconds: float, alone_s: float) -> None:
        """After a forward on all threads while one is preferred."""
        if seconds >= _CLEARLY * alone_s:
            self._put_off(seconds)
            return
        self._wins += 1
        if self._wins == _WINS:
            self._alone, self._forwards = False, 0
            self._on_all.clear()
