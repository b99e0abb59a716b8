"""What `truedraft train medusa` says when it is done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from truedraft.training.workspace import duration

if TYPE_CHECKING:
    from truedraft.cli.terminal import Terminal
    from truedraft.training.report import HeadReport, HeadResult

_LOG = Path("work") / "log.jsonl"
_KINDS = {"greedy": "at temperature 0", "sampled": "at temperature 1"}
_TREES = {"likeliest": "chosen at each step", "counted": "counted, one for all"}


def print_result(terminal: Terminal, model: str, result: HeadResult) -> None:
    """What was trained, how often the heads are right, what they bring, and what to try next."""
    effort = result.effort
    say = _Lines(terminal)
    log = result.folder / (_LOG if result.joint is None else Path("work") / "joint" / "log.jsonl")
    say(
        f"trained {effort.steps:,} steps in {duration(effort.elapsed_s)}, on {effort.written_tokens:,} tokens that "
        f"the target wrote; log: {log}"
    )
    _print_heads(terminal, result.report)
    target = model
    if result.joint is not None:
        joint = result.joint
        target = str(joint.target)
        trained = f"LoRA of rank {joint.lora_rank}, merged" if joint.lora_rank else "all weights"
        say(
            f"the target was trained too ({trained}): on {joint.loss_tokens:,} held-out tokens its own loss was "
            f"{joint.loss_before:.4f} nats per token, and is {joint.loss_after:.4f}"
        )
        say("before, with the target as it was:")
        _print_heads(terminal, joint.before)
    say(f'try it: truedraft generate "PROMPT" --model {target} --drafter medusa:{result.folder} --compare')


def record_of(model: str, result: HeadResult) -> dict[str, Any]:
    """For JSON."""
    from truedraft.cli.machine import machine_facts

    fixed = {"command": "train medusa", "model": model, "out": str(result.folder)}
    return fixed | result.as_dict() | {"machine": machine_facts()}


class _Lines:
    """Lines of standard output that a terminal may wrap."""

    def __init__(self, terminal: Terminal) -> None:
        self._out = terminal.out

    def __call__(self, line: str) -> None:
        self._out.print(line, soft_wrap=True)


def _print_heads(terminal: Terminal, heads: HeadReport) -> None:
    """How often the heads are right, and the mean acceptance lengths."""
    say = _Lines(terminal)
    trees = heads.facts["trees"]
    for kind, counted in trees.items():
        shares = ", ".join(f"{ranks[0]:.2f} / {sum(ranks[:5]):.2f}" for ranks in counted["rank_accuracy"])
        say(f"heads right {_KINDS[kind]} with their first guess / one of five: {shares}")
    say("tokens per target call: measured in the engine, promised by the trees, and as if heads erred independently")
    say(f"promised and independent: on {heads.promised_on}; other text brings more or less")
    columns = ("temperature", "nodes", "trees", "measured", "promised", "independent")
    table = Table(*columns, box=None, pad_edge=False)
    for each in heads.served:
        counted, about = trees["sampled" if each.temperature else "greedy"], each.about
        products = {promise["nodes"]: f"{promise['product']:.2f}" for promise in counted["promises"]}
        table.add_row(
            f"{each.temperature:g}",
            str(about["nodes"]),
            _TREES[about["trees"]],
            f"{each.stats.mean_acceptance_length:.2f}",
            f"{about['promised']:.2f}",
            products.get(about["nodes"], "") if about["trees"] == "counted" else "",
        )
    terminal.out.print(table)
    for kind, counted in trees.items():
        if counted["chosen"] == "counted":
            say(f"{_KINDS[kind]} the counted tree is used: on text that neither was fitted to it brought more")
