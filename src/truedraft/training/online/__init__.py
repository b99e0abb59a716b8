"""Drafters that learn while they serve, in the background on the engine's answers.

A trained copy replaces the served module where replay of held-out answers shows, with a stated error probability, that
it gives more tokens per target call, and is rolled back where later answers show the opposite. Answers do not change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from truedraft.lazy import loads

if TYPE_CHECKING:
    from truedraft.training.online.learner import Learner as Learner

_HOMES = {"Learner": "truedraft.training.online.learner"}
__all__ = list(_HOMES)
__getattr__ = loads(__name__, _HOMES)
