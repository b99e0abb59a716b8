"""Tables of text on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

if TYPE_CHECKING:
    from truedraft.bench import TextTable


def print_table(text: TextTable, to: Console) -> None:
    """Print a table without cutting cells: a terminal that is too narrow breaks the lines instead."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(text.headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in text.rows:
        table.add_row(*row)
    endless = Console(width=10_000)
    width = max(to.width, Measurement.get(endless, endless.options, table).maximum)
    Console(file=to.file, highlight=False, markup=False, emoji=False, width=width).print(table)
