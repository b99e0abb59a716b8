"""Output: answers to standard output, all else to standard error."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.color import ColorSystem
from rich.console import Console
from rich.measure import Measurement
from rich.rule import Rule
from rich.style import Style
from rich.table import Table

from truedraft.cli.streams import json_line, visible
from truedraft.progress import Progress

if TYPE_CHECKING:
    from truedraft.core.intervals import Interval

_PATIENCE_S = 2.0


class Terminal:
    """The two output streams of a command.

    Attributes:
        patience_s: seconds before a bar is shown.
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
        """Write a part of an answer at once; control characters in it are not escaped."""
        if text:
            self._at_line_start = False  # first, because Ctrl-C may interrupt the write
            sys.stdout.write(text)
            sys.stdout.flush()
            self._at_line_start = text.endswith("\n")

    def dim(self, text: str) -> None:
        """Write text that is not part of the answer."""
        text = visible(text)
        self.write(Style(dim=True).render(text, color_system=ColorSystem.STANDARD) if self.colour else text)

    def end_line(self) -> None:
        """End the current line of standard output, if it is not empty."""
        if not self._at_line_start:
            self.write("\n")

    def heading(self, text: str) -> None:
        """Print a line with a rule, before an answer of several."""
        self.end_line()
        self.out.print(Rule(visible(text), align="left", style="dim"))

    def note(self, text: str) -> None:
        """Print a line about the answer on standard error."""
        self.err.print(visible(text), style="dim", soft_wrap=True)

    def json(self, record: dict[str, Any]) -> None:
        """Write the last line of standard output."""
        self.end_line()
        self.write(json_line(record))

    @contextlib.contextmanager
    def progress(self, what: str, total: int, during_output: bool = False) -> Iterator[Progress]:
        """A bar on standard error, if that is a terminal and the work takes over `patience_s`.

        Args:
            during_output: whether answers are written at the same time; then there is no bar if they go to a terminal.
        """
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        bar = Bar(
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
        task = bar.add_task(what, total=total, remark="")
        visible_from = time.perf_counter() + self.patience_s
        is_shown = self.err.is_terminal and not (during_output and self.out.is_terminal)

        def show(done: float, remark: str) -> None:
            bar.update(task, completed=done, remark=remark)
            if is_shown and not bar.live.is_started and time.perf_counter() >= visible_from:
                bar.start()

        try:
            yield show
        finally:
            if bar.live.is_started:
                bar.stop()

    def print(self, text: str, style: str | None = None) -> None:
        """Print a line on standard output; the terminal wraps it."""
        self.out.print(visible(text), style=style, soft_wrap=True)

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table on standard output."""
        print_table(headings, rows, self.out)


def interval_text(found: Interval | Mapping[str, float | None] | None) -> str:
    """A number with its interval, if it has one: "1.52 [1.40, 1.66]"."""
    if found is None:
        return ""
    values = found if isinstance(found, Mapping) else dataclasses.asdict(found)
    value, low, high = values["value"], values["low"], values["high"]
    return f"{value:.2f}" if low is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], to: Console) -> None:
    """Print a table without truncating cells: a narrow terminal wraps the lines instead."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    endless = Console(width=10_000)
    width = max(to.width, Measurement.get(endless, endless.options, table).maximum)
    Console(file=to.file, highlight=False, markup=False, emoji=False, width=width).print(table)
