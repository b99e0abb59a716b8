"""What `truedraft train redrafter` says when it is done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from truedraft.training.budget import duration

if TYPE_CHECKING:
    from truedraft.cli.terminal import Terminal
    from truedraft.training.redrafter_results import RedrafterResult, TrainedRedrafter

_LOG = Path("work") / "log.jsonl"


def print_result(terminal: Terminal, model: str, result: RedrafterResult) -> None:
    """What was trained, how often the head is right, what it brings, and what to try next."""
    effort = result.effort
    _say(
        terminal,
        f"trained {effort.steps:,} steps in {duration(effort.elapsed_s)}, on {effort.written_tokens:,} tokens that "
        f"the target wrote; log: {result.folder / _LOG}",
    )
    _print_head(terminal, result.head)
    _say(terminal, f'try it: truedraft generate "PROMPT" --model {model} --drafter redrafter:{result.folder} --compare')


def record_of(model: str, result: RedrafterResult) -> dict[str, Any]:
    """For JSON."""
    from truedraft.cli.machine import machine_facts

    fixed = {"command": "train redrafter", "model": model, "out": str(result.folder)}
    return fixed | result.as_dict() | {"machine": machine_facts()}


def _print_head(terminal: Terminal, head: TrainedRedrafter) -> None:
    """How often the head is right, and the mean acceptance lengths."""
    shares = iter(head.accuracy.values())
    pairs = ", ".join(f"{first:.2f} / {five:.2f}" for first, five in zip(shares, shares, strict=True))
    _say(terminal, f"right at each place, given the tokens before it, with the first guess / one of five: {pairs}")
    _say(terminal, f"promised: on {head.promised_on}; other text brings more or less")
    table = Table("temperature", "nodes", "beams", "tokens per target call", "promised", box=None, pad_edge=False)
    for each in head.served:
        beams = f"{each.beams} of {each.length}"
        found = f"{each.mean_acceptance_length:.2f}", "-" if each.promised is None else f"{each.promised:.2f}"
        table.add_row(f"{each.temperature:g}", str(each.nodes), beams, *found)
    terminal.out.print(table)


def _say(terminal: Terminal, line: str) -> None:
    """A line of standard output that a terminal may wrap."""
    terminal.out.print(line, soft_wrap=True)
