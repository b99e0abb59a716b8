"""All that a function of keyed noise can do, with the probability of each: it is run in every cell of its noise."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from truedraft.core.noise import Noise

Key = tuple[Hashable, ...]
Result = TypeVar("Result", bound=Hashable)
_HALVINGS = 44


class CellNoise:
    """Answers from a script, one half for what is not in it, and writes down what was asked.

    Args:
        script: numbers by key.
        asked: keys in the order in which they were first asked for; that of other levels is shared.
        where: the turns and depths on the way to this level of a cascade, and where its first token stands.
    """

    def __init__(
        self, script: dict[Key, float], asked: Counter[Key] | None = None, where: Key = (), at: int = 0
    ) -> None:
        self.script = script
        self.asked: Counter[Key] = Counter() if asked is None else asked
        self._where = where
        self._at = at

    def uniform(self, purpose: object, depth: int, index: int = 0) -> float:
        key = (*self._where, purpose, self._at + depth, index)
        self.asked[key] += 1
        return self.script.get(key, 0.5)

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> None:
        raise AssertionError("draws are decided by uniform numbers")

    def inside(self, turn: int, depth: int) -> Noise:
        return CellNoise(self.script, self.asked, (*self._where, "inside", turn), self._at + depth)


def every_result(run: Callable[[CellNoise], tuple[Hashable, Result]]) -> dict[Result, float]:
    """The distribution of what a function gives, over its noise.

    Args:
        run: gives what it decided on its way, in which every decision must show, and the result. A decision that is
            taken by one number gives each way in one interval of it.
    """
    found: defaultdict[Result, float] = defaultdict(float)

    def visit(script: dict[Key, float], mass: float) -> None:
        noise = CellNoise(script)
        _, result = run(noise)
        key = next((key for key in noise.asked if key not in script), None)
        if key is None:
            found[result] += mass
            return

        def way(number: float) -> Hashable:
            return run(CellNoise({**script, key: number}))[0]

        start = 0.0
        while start < 1.0:
            own, end = way(start + 1e-13), 1.0
            if way(1.0 - 1e-13) != own:
                low, high = start, 1.0
                for _ in range(_HALVINGS):
                    middle = (low + high) / 2
                    low, high = (middle, high) if way(middle) == own else (low, middle)
                end = high
            visit({**script, key: (start + end) / 2}, mass * (end - start))
            start = end

    visit({}, 1.0)
    return dict(found)
