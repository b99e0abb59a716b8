"""Progress: the callback type, and a bar that shows it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

STAGES = logging.getLogger("truedraft.stages")

Progress: TypeAlias = Callable[[float, str], None]
"""Called with the finished amount (a share, unless a total is defined) and a remark shown after the bar."""


def log_stage(stage: str) -> None:
    """Log the start of something that may take seconds; users who wait for it listen to this logger."""
    STAGES.info(stage)


def unwatched(done: float, remark: str) -> None:
    """Progress that is not shown."""


@contextlib.contextmanager
def progress_bar(console: Console, what: str, total: int, *, wanted: bool, patience_s: float) -> Iterator[Progress]:
    """A bar, if `wanted` and if the work takes longer than `patience_s`; gives the function that moves it.

    Args:
        patience_s: seconds before the bar is shown.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[remark]}", style="dim"),
        console=console,
        transient=True,
        redirect_stdout=False,  # else answers would go to standard error while the bar is shown
        redirect_stderr=False,
    )
    task = bar.add_task(what, total=total, remark="")
    started = time.perf_counter()

    def show(done: float, remark: str) -> None:
        bar.update(task, completed=done, remark=remark)
        if wanted and not bar.live.is_started and time.perf_counter() - started >= patience_s:
            bar.start()

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()
