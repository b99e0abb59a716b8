"""Output: answers to standard output, all else to standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.color import ColorSystem
from rich.console import Console
from rich.measure import Measurement
from rich.style import Style
from rich.table import Table

from truedraft.cli.streams import json_line, visible
from truedraft.progress import Progress, progress_bar

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

    def note(self, text: str) -> None:
        """Print a line about the answer on standard error."""
        self.err.print(visible(text), style="dim", soft_wrap=True)

    def json(self, record: dict[str, Any]) -> None:
        """Write the last line of standard output."""
        self.end_line()
        self.write(json_line(record))

    def progress(self, what: str, total: int, beside_output: bool = False) -> AbstractContextManager[Progress]:
        """A bar on standard error, if that is a terminal and the work takes over `patience_s`.

        Args:
            beside_output: whether answers are written at the same time; then there is no bar if they go to a terminal.
        """
        shown = self.err.is_terminal and not (beside_output and self.out.is_terminal)
        return progress_bar(self.err, what, total, wanted=shown, patience_s=self.patience_s)


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
