"""Drafters that learn while they serve: heads and draft models train in the background on what was answered.

A copy takes the place of what is served where replay of answers that nobody trained on shows, with a stated
probability of error, that it brings more; and gives it back where later answers show the opposite. What is answered
never depends on it, only how fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from truedraft.lazy import loads

if TYPE_CHECKING:
    from truedraft.training.online.learner import Learner as Learner

_HOMES = {"Learner": "truedraft.training.online.learner"}
__all__ = list(_HOMES)
__getattr__ = loads(__name__, _HOMES)
