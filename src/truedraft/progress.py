"""How far something has come: what is told, and a bar that shows it."""

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
"""Is told how much is done, a share where no total was agreed on, and a remark that stands behind the bar."""


def told_stage(stage: str) -> None:
    """Say what begins that may take seconds; whoever waits for it listens to this logger.

    Args:
        stage: as "compiling ...".
    """
    STAGES.info(stage)


def unwatched(done: float, remark: str) -> None:
    """Progress that nobody is told of."""


@contextlib.contextmanager
def progress_bar(console: Console, what: str, total: int, *, wanted: bool, patience_s: float) -> Iterator[Progress]:
    """A bar, if it is wanted and takes longer than some patience; gives the function that moves it.

    Args:
        console: to show it on.
        what: stands before the bar.
        total: how much there is to do.
        wanted: else nothing is shown.
        patience_s: how long to wait with it, in seconds.
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
