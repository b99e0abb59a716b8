"""What `truedraft bench` prints for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from truedraft.bench.rows import time_without_core
from truedraft.bench.summary import differing_answers
from truedraft.bench.table import TextTable, all_tables
from truedraft.cli.differences import find_difference
from truedraft.cli.visible import visible

if TYPE_CHECKING:
    from truedraft.bench.lineup import Lineup
    from truedraft.bench.record import Circumstances
    from truedraft.bench.run import Group, Results
    from truedraft.bench.summary import Summary
    from truedraft.cli.terminal import Terminal

_SHOWN_DIFFERENCES = 5
_DISTURBED = 0.1


def print_summaries(
    summaries: Sequence[Summary], circumstances: Circumstances, notes: Sequence[str], terminal: Terminal
) -> None:
    """The tables for people, with what they were measured on and what to know about them."""
    terminal.out.print()
    terminal.out.print(circumstances.line(), style="dim", soft_wrap=True)
    for text in all_tables(summaries, circumstances):
        _print_whole(_table(text), terminal)
    if circumstances.costs_kept:
        notes = [*notes, "cost curves are of an earlier run; --refresh-costs measures them now"]
    for note in notes:
        terminal.out.print(visible(f"note: {note}"), style="dim", soft_wrap=True)


def _table(text: TextTable) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(text.headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in text.rows:
        table.add_row(*row)
    return table


def _print_whole(table: Table, terminal: Terminal) -> None:
    """Print without cutting cells: a terminal that is too narrow breaks the lines instead."""
    endless = Console(width=10_000)
    width = max(terminal.out.width, Measurement.get(endless, endless.options, table).maximum)
    Console(highlight=False, markup=False, emoji=False, width=width).print(table)


def disturbance(results: Results, device: str) -> list[str]:
    """A sentence if this process often had to wait for a core."""
    waited = time_without_core(results.rows)
    if not device.startswith("cpu") or waited < _DISTURBED:
        return []
    return [f"for {waited:.2f} of the time this process had no core: others use this machine, and times are too long"]


def differences(lineup: Lineup, results: Results, groups: Sequence[Group], circumstances: Circumstances) -> list[str]:
    """Where our engines' tokens part from plain decoding, though they must not; the first few, a sentence each."""
    if not circumstances.must_agree:
        return []
    prompts = {name: ids for group in groups for name, ids in zip(group.names, group.prompts, strict=True)}
    differing = differing_answers(results.rows, [each.name for each in lineup.ours])
    found = (
        (contestant, name, find_difference(lineup.target, prompts[name], list(plain), list(other)))
        for contestant, name, plain, other in differing[:_SHOWN_DIFFERENCES]
    )
    told = [f"{contestant}, prompt {name} {each.describe()}" for contestant, name, each in found if each is not None]
    rest = len(differing) - _SHOWN_DIFFERENCES
    return [*told, f"and {rest} more"] if rest > 0 else told
