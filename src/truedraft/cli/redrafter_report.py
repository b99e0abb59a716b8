"""What `truedraft train redrafter` says when it is done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from truedraft.training.workspace import duration

if TYPE_CHECKING:
    from truedraft.cli.terminal import Terminal
    from truedraft.training.report import HeadReport, HeadResult

_LOG = Path("work") / "log.jsonl"


def print_result(terminal: Terminal, model: str, result: HeadResult) -> None:
    """What was trained, how often the head is right, what it brings, and what to try next."""
    effort = result.effort
    _say(
        terminal,
        f"trained {effort.steps:,} steps in {duration(effort.elapsed_s)}, on {effort.written_tokens:,} tokens that "
        f"the target wrote; log: {result.folder / _LOG}",
    )
    _print_head(terminal, result.report)
    _say(terminal, f'try it: truedraft generate "PROMPT" --model {model} --drafter redrafter:{result.folder} --compare')


def record_of(model: str, result: HeadResult) -> dict[str, Any]:
    """For JSON."""
    from truedraft.cli.machine import machine_facts

    fixed = {"command": "train redrafter", "model": model, "out": str(result.folder)}
    return fixed | result.as_dict() | {"machine": machine_facts()}


def _print_head(terminal: Terminal, head: HeadReport) -> None:
    """How often the head is right, and the mean acceptance lengths."""
    shares = iter(head.facts["accuracy"].values())
    pairs = ", ".join(f"{first:.2f} / {five:.2f}" for first, five in zip(shares, shares, strict=True))
    _say(terminal, f"right at each place, given the tokens before it, with the first guess / one of five: {pairs}")
    _say(terminal, f"promised: on {head.promised_on}; other text brings more or less")
    table = Table("temperature", "nodes", "beams", "tokens per target call", "promised", box=None, pad_edge=False)
    for each in head.served:
        about = each.about
        promised = "-" if about["promised"] is None else f"{about['promised']:.2f}"
        found = f"{each.stats.mean_acceptance_length:.2f}", promised
        table.add_row(f"{each.temperature:g}", str(about["nodes"]), f"{about['beams']} of {about['length']}", *found)
    terminal.out.print(table)


def _say(terminal: Terminal, line: str) -> None:
    """A line of standard output that a terminal may wrap."""
    terminal.out.print(line, soft_wrap=True)
