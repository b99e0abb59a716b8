"""Progress callbacks, and the log of stages that may take seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

STAGES = logging.getLogger("truedraft.stages")

Progress: TypeAlias = Callable[[float, str], None]
"""Called with the finished amount (a share, unless a total is defined) and a remark shown after the bar."""


def log_stage(stage: str) -> None:
    """Log the start of something that may take seconds; users who wait for it listen to this logger."""
    STAGES.info(stage)


def unwatched(done: float, remark: str) -> None:
    """Progress that is not shown."""
