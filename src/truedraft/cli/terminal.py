"""Writing: answers to standard output, everything about them to standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.color import ColorSystem
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.style import Style

from truedraft.cli.visible import json_line, visible

_PATIENCE_S = 2.0


class Terminal:
    """The two streams of a command.

    Attributes:
        out: for people who read standard output.
        err: for people who read standard error.
        patience_s: how long a command may take before it shows a bar.
    """

    def __init__(self) -> None:
        self.out = Console(highlight=False, markup=False, emoji=False)
        self.err = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.patience_s = _PATIENCE_S
        self._at_line_start = True

    @property
    def colour(self) -> bool:
        """Whether standard output shows colours."""
        return self.out.is_terminal and self.out.color_system is not None and not self.out.no_color

    def write(self, text: str) -> None:
        """Write a part of an answer at once; control characters in it are the caller's own."""
        if text:
            self._at_line_start = False  # first, as Ctrl-C may come in between
            sys.stdout.write(text)
            sys.stdout.flush()
            self._at_line_start = text.endswith("\n")

    def dim(self, text: str) -> None:
        """Write text that is no part of the answer."""
        text = visible(text)
        self.write(Style(dim=True).render(text, color_system=ColorSystem.STANDARD) if self.colour else text)

    def end_line(self) -> None:
        """Begin a new line of standard output, unless it has begun."""
        if not self._at_line_start:
            self.write("\n")

    def note(self, text: str) -> None:
        """A line about the answer, on standard error."""
        self.err.print(visible(text), style="dim", soft_wrap=True)

    def json(self, record: dict[str, Any]) -> None:
        """The last line of standard output."""
        self.end_line()
        self.write(json_line(record))

    @contextlib.contextmanager
    def progress(self, what: str, total: int, beside_output: bool = False) -> Iterator[Callable[[int, str], None]]:
        """A bar on standard error, if that is a terminal and it takes over two seconds.

        Gives a function to call with how much is done, and a remark that stands behind the bar.

        Args:
            what: stands before the bar.
            total: how much there is to do.
            beside_output: whether answers are written meanwhile; where they go to a terminal there is no bar.
        """
        bar = self._bar()
        task = bar.add_task(what, total=total, remark="")
        wanted = self.err.is_terminal and not (beside_output and self.out.is_terminal)
        started = time.perf_counter()

        def show(done: int, remark: str) -> None:
            bar.update(task, completed=done, remark=remark)
            if wanted and not bar.live.is_started and time.perf_counter() - started >= self.patience_s:
                bar.start()

        try:
            yield show
        finally:
            if bar.live.is_started:
                bar.stop()

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[remark]}", style="dim"),
            console=self.err,
            transient=True,
            redirect_stdout=False,  # else answers would go to standard error while the bar is shown
            redirect_stderr=False,
        )
