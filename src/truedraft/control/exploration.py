"""How optimistic a controller is about what it knows little of: upper bounds, or a draw from what is possible."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod


class Exploration(ABC):
    """What to hope of an uncertain acceptance rate. Hopes that turn out wrong are paid for out of a bounded credit."""

    @abstractmethod
    def hoped(self, rate: float, doubt: float) -> float:
        """The rate to hope for, from its estimate and standard error, fractions."""


class UpperBound(Exploration):
    """The estimate and so many standard errors: discounted UCB (Garivier and Moulines, arXiv 0805.3415).

    Args:
        width: standard errors.
    """

    def __init__(self, width: float = 1.5) -> None:
        self._width = width

    def hoped(self, rate: float, doubt: float) -> float:
        return min(1.0, rate + self._width * doubt)


class Thompson(Exploration):
    """A draw from a normal distribution about the estimate: discounted Thompson sampling.

    Args:
        seed: of the draws, which share nothing with the noise of requests.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def hoped(self, rate: float, doubt: float) -> float:
        return min(1.0, max(0.0, self._random.gauss(rate, doubt)))
