"""A neighbour that reads memory at a steady rate and can be stopped, and decoding in short slices beside it."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from types import TracebackType
from typing import TYPE_CHECKING, Any

from truedraft.bench.turns import Clock, median_interval

if TYPE_CHECKING:
    from deciding_sets import Asked
    from truedraft import Engine
    from truedraft.engine import Request, StepRecord

PHASES = (("quiet", 8), ("loaded", 8), ("quiet again", 8))
"""What happens in one repeat, with its seconds: windows of one second each."""
SETTLING = 2  # windows behind each change that are not counted
_SLICE_S = 0.25
_ORDER = ((0, 1, 1, 0), (1, 0, 0, 1))  # whose slice it is within a window; the other one next time
_ANSWER = 256  # tokens

# Reads a chunk, then waits until its time at the wanted rate is over. It makes up for what others held it up by, as far
# as the last tenth of a second goes, and never for the time in which it was stopped.
_READER = """
import json, os, signal, sys, time
import numpy
core, rate = int(sys.argv[1]), float(sys.argv[2])
os.sched_setaffinity(0, {core})
block = numpy.ones(1 << 25)
chunk = 1 << 22
read, awake, due = 0, 0.0, 0.0
def tell(*_):
    print(json.dumps([read, awake]), flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, tell)
print("ready", flush=True)
while True:
    for first in range(0, len(block), chunk):
        began = time.perf_counter()
        block[first:first + chunk].sum()
        now = time.perf_counter()
        due = max(due, now - 0.1) + chunk * 8 / rate
        if due > now:
            time.sleep(due - now)
        took = time.perf_counter() - began
        if took < 0.5:
            read, awake = read + chunk * 8, awake + took
"""


class Neighbour:
    """Processes, one on each core, that together read memory at a steady rate while they are let.

    Args:
        bytes_per_s: of all of them.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._wanted = bytes_per_s
        cores = sorted(os.sched_getaffinity(0))
        command = [sys.executable, "-c", _READER]
        rate = str(bytes_per_s / len(cores))
        self._processes = [
            subprocess.Popen([*command, str(core), rate], stdout=subprocess.PIPE, text=True) for core in cores
        ]

    def __enter__(self) -> Neighbour:
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.readline()
        self.leave()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def come(self) -> None:
        """Begin to read."""
        for process in self._processes:
            process.send_signal(signal.SIGCONT)

    def leave(self) -> None:
        """Stop, at once."""
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)

    def bytes_per_s(self) -> float:
        """End it, and tell what it read a second while it was let; less than wanted where others read too."""
        rate = 0.0
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
            said, _ = process.communicate(timeout=10)
            read, awake = json.loads(said.splitlines()[-1])
            rate += read / awake if awake else 0.0
        return rate


class Stream:
    """One request after another through an engine, a slice at a time; steps that read prompts are not counted.

    Args:
        engine: that answers.
        asked: requests, again and again.
        clock: seconds.
    """

    def __init__(self, engine: Engine, asked: Sequence[Asked], clock: Clock) -> None:
        self._engine, self._clock, self._asked = engine, clock, asked
        self._next: Iterator[Asked] = cycle(asked)
        self._request: Request | None = None
        self._records: list[StepRecord] = []
        self._keep = self._records.append
        engine.listeners.append(self._keep)

    def run(self, seconds: float) -> tuple[int, float]:
        """Decode for so long; tokens and seconds of the steps that decoded."""
        tokens, counted, end = 0, 0.0, self._clock() + seconds
        while (began := self._clock()) < end:
            if self._request is None or self._request.closed:
                asked = next(self._next)
                self._request = self._engine.submit(list(asked.prompt), replace(asked.params, max_tokens=_ANSWER))
            self._records.clear()
            self._engine.step()
            took = self._clock() - began
            if self._records and not any(record.prefill for record in self._records):
                tokens += sum(record.counters.emitted_tokens for record in self._records)
                counted += took
        return tokens, counted

    def restart(self) -> None:
        """Begin with the first request again, so that windows differ by the machine and not by what is written."""
        if self._request is not None and not self._request.closed:
            self._engine.cancel(self._request)
        self._request, self._next = None, cycle(self._asked)

    def close(self) -> None:
        """Give up what is running."""
        self.restart()
        self._engine.listeners.remove(self._keep)


@dataclass(slots=True)
class Windows:
    """Ratios of tokens per second, default over plain, by second of a repeat.

    Attributes:
        ratios: for each second those of all repeats.
    """

    ratios: list[list[float]] = field(default_factory=lambda: [[] for _ in range(sum(s for _, s in PHASES))])

    def as_dict(self) -> dict[str, Any]:
        """Medians by second with their intervals, and by phase; the two behind each change are not counted."""
        return {
            "medians": [round(statistics.median(own), 4) if own else None for own in self.ratios],
            "intervals": [_interval(own) for own in self.ratios],
            "repeats": max(map(len, self.ratios)),
            "phases": {
                name: {"median": round(statistics.median(own), 4), "interval": _interval(own)}
                for name, own in self.by_phase().items()
                if own
            },
        }

    def by_phase(self) -> dict[str, list[float]]:
        """All counted ratios of each phase."""
        return {name: [ratio for place in counted for ratio in self.ratios[place]] for name, counted in places()}


def places() -> Iterator[tuple[str, range]]:
    """Of each phase, the windows that count."""
    first = 0
    for number, (name, seconds) in enumerate(PHASES):
        yield name, range(first + (SETTLING if number else 0), first + seconds)
        first += seconds


def _interval(values: Sequence[float]) -> list[float] | None:
    """Of the median, where there are enough."""
    if len(values) < 5:
        return None
    return [round(each, 4) for each in median_interval(values)]


def watch(
    run: Sequence[Callable[[float], tuple[int, float]]],
    begin: Callable[[str], None],
    most_s: float,
    clock: Clock,
) -> Windows:
    """Repeat the phases as long as there is time, default and plain decoding in slices within each window.

    Args:
        run: the default's `Stream.run` and plain decoding's.
        begin: is told the phase when a window begins.
        most_s: seconds; two repeats are made in any case, the first of which warms up.
        clock: seconds.
    """
    found, began, repeats = Windows(), clock(), 0
    one = float(sum(seconds for _, seconds in PHASES))
    while repeats < 2 or clock() - began + one <= most_s:
        window = 0
        for name, seconds in PHASES:
            for _ in range(seconds):
                begin(name)
                tokens, took = [0, 0], [0.0, 0.0]
                for side in _ORDER[window % 2]:
                    emitted, counted = run[side](_SLICE_S)
                    tokens[side] += emitted
                    took[side] += counted
                if repeats and all(tokens):
                    found.ratios[window].append(tokens[0] / took[0] / (tokens[1] / took[1]))
                window += 1
        repeats += 1
    return found
