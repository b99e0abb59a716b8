"""One CPU thread or all of them for a loop of small steps: tried in turns, then the faster."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_STEPS = 25  # that are timed together
_TURNS = 3


class ThreadTrial:
    """Runs the steps of a loop on all of torch's threads and on one, in turns, and then on whichever was faster.

    A step of a small model is a few hundred microseconds in many parts, and threads meet after each; where they share a
    processor core, or wait for one, a second thread makes it slower.

    Args:
        device: only on the CPU there is anything to try.
        clock: seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._all = torch.get_num_threads()
        self._clock = clock
        self._times: dict[int, list[float]] = {self._all: [], 1: []}
        self._turns = [self._all, 1] * _TURNS if device.type == "cpu" and self._all > 1 else []
        self._spent = 0.0
        self._steps = 0

    def run(self, step: Callable[[], int]) -> int:
        """One step; returns what it returns."""
        if not self._turns:
            return step()
        torch.set_num_threads(self._turns[0])
        began = self._clock()
        found = step()
        self._spent += self._clock() - began
        self._steps += 1
        if self._steps == _STEPS:
            self._times[self._turns.pop(0)].append(self._spent)
            self._spent, self._steps = 0.0, 0
            if not self._turns:
                # The best turn of each: the first of all also warms up, and a neighbour may disturb any.
                torch.set_num_threads(min(self._times, key=lambda threads: min(self._times[threads])))
        return found

    def stop(self) -> None:
        """Give torch its threads back."""
        torch.set_num_threads(self._all)
