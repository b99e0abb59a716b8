"""Divides the CPU's threads between forwards and torch's own kernels, and avoids threads that wait for each other.

Threads of torch's kernels synchronise after every product. If another program takes a core, all wait for the thread
that lost it, and a single thread is many times faster (benchmarks/LOG.md). The native forward has its own threads.
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
# Longer parts of prompts keep all threads: in float32 the bits of 128 rows and more depend on the number of threads.
_MOST_ROWS = 32
_JUDGED = 8  # forwards on all threads
_REFERENCES = (3, 6)  # the forwards that run on one thread as a reference
_REFERENCE_EVERY = 200  # and later ones, because contexts grow
_WINS = 5
_CLEARLY = 0.9
_BETWEEN_TRIES = 20.0  # times the duration of a trial of all threads
_LONGEST_FACTOR = 4
_SOON = 64  # forwards


_of_forwards: ContextVar[int | None] = ContextVar("threads of forwards while torch has one", default=None)


def forward_threads() -> int:
    """Threads that a forward may use: torch's number, or the number before `torch_on_one_thread`."""
    return _of_forwards.get() or torch.get_num_threads()


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """Run torch's own kernels on one thread within this context, forwards on as many as before.

    After each kernel, torch's threads spin for milliseconds on processors that the native forward's threads need: a
    step of the embedded target with its draft took half as long again.
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
    """Use all threads again within `torch_on_one_thread`, for forwards that consist of torch's kernels."""
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
    """Runs forwards on all of torch's threads, or on one while measured times say that it is faster.

    Forwards with about as many rows are compared: the last eight on all threads, without the slowest, with the time on
    one. While it is on one thread, all are tried now and then, and must win five times in a row. An idle machine pays
    with one forward in 200.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._on_all: dict[int, deque[float]] = {}
        self._on_one: dict[int, deque[float]] = {}
        self._counts: dict[int, int] = {}
        self._on_single = False
        self._since_s = 0.0  # on one thread, since the last trial of all
        self._wait_s = 0.0  # until the next trial of all
        self._wins = 0
        self._factor = 1
        self._forwards = 0  # since the return to all threads

    def run(self, rows: int, forward: Callable[[], Result]) -> Result:
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
            if one:  # only then, because the call takes time even without a change
                torch.set_num_threads(threads)
        self._note(size, one, self._clock() - began)
        return result

    def _takes_one(self, size: int) -> bool:
        if self._on_single:
            return self._since_s < self._wait_s
        count = self._counts[size] = self._counts.get(size, 0) + 1
        return count in _REFERENCES or count % _REFERENCE_EVERY == 0

    def _note(self, size: int, one: bool, seconds: float) -> None:
        single = self._on_one.setdefault(size, deque(maxlen=3))
        together = self._on_all.setdefault(size, deque(maxlen=_JUDGED))
        (single if one else together).append(seconds)
        if self._on_single and one:
            self._since_s += seconds
        elif self._on_single:
            self._evaluate_trial(seconds, median(single) if single else 0.0)
        else:
            self._forwards += 1
            if len(single) > 1 and len(together) == _JUDGED and fmean(sorted(together)[:-1]) > median(single):
                self._use_single(median(together))

    def _use_single(self, together_s: float) -> None:
        self._on_single = True
        # If the return to all threads was too early, the next one is later.
        self._factor = min(2 * self._factor, _LONGEST_FACTOR) if self._forwards < _SOON else 1
        self._postpone(together_s)

    def _postpone(self, seconds: float) -> None:
        self._since_s, self._wins = 0.0, 0
        self._wait_s = _BETWEEN_TRIES * self._factor * seconds

    def _evaluate_trial(self, seconds: float, single_s: float) -> None:
        if seconds >= _CLEARLY * single_s:
            self._postpone(seconds)
            return
        self._wins += 1
        if self._wins == _WINS:
            self._on_single, self._forwards = False, 0
            self._on_all.clear()
