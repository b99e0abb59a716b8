"""Copy trained heads, with their card, into a folder of the package, and write down what was measured of them."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from recipes.stdlib.publish import LICENSE_NOTE, keep_log
from truedraft.heads.checkpoint import load_medusa
from truedraft.training.cards import Card, training_facts
from truedraft.training.machine import describe_machine

_SHIPPED = ("config.json", "heads.safetensors", "trees.json")


def publish_heads(trained: Path, first: Path, destination: Path, results: Path, *, total_s: float, device: str) -> None:
    """Write `destination` (replaced) and `results`, one JSON object.

    Args:
        trained: the folder that the last pass wrote.
        first: that of the first pass.
        destination: the folder of the package.
        results: what was measured, for docs.
        total_s: seconds from the first prompt to the last measurement.
        device: where it was trained.
    """
    checkpoint = load_medusa(trained)
    facts = dict(checkpoint.facts)
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in _SHIPPED:
        shutil.copy(trained / name, partial / name)
    parameters = sum(weight.numel() for weight in checkpoint.heads.parameters())
    _card(parameters, facts, total_s, device).write(partial)
    shutil.rmtree(destination, ignore_errors=True)
    partial.replace(destination)
    size = (destination / "heads.safetensors").stat().st_size
    record = {"command": "recipes.stdlib.heads", "parameters": parameters, "bytes": size, "total_s": total_s}
    record["first_pass"] = dict(load_medusa(first).facts)
    results.write_text(json.dumps(record | {"machine": describe_machine(device)} | facts) + "\n", encoding="utf-8")
    keep_log(first / "work" / "log.jsonl", "medusa-first")
    keep_log(trained / "work" / "log.jsonl", "medusa")


def _card(parameters: int, facts: dict[str, Any], total_s: float, device: str) -> Card:
    rows = training_facts(
        parameters=parameters,
        data=f"{facts['written_tokens']:,} tokens that the target wrote, at temperatures 0 and 1",
        steps=facts["steps"],
        tokens=facts["positions"],
        elapsed_s=facts["elapsed_s"],
        machine=describe_machine(device),
    )
    rows["from the first prompt to the last measurement"] = f"{total_s / 60:.0f} minutes"
    rows["finished"] = time.strftime("%Y-%m-%d")
    for served in facts["served"]:
        name = f"tokens per target call, temperature {served['temperature']:g}, {served['nodes']} nodes"
        rows[name] = f"{served['mean_acceptance_length']:.2f} (promised {served['promised']:.2f})"
    return Card(
        title="truedraft embedded Medusa heads",
        summary="Heads on the embedded target's last vector, and trees of their guesses: `--drafter medusa`.",
        facts=rows,
        notes="Steps, tokens and time are those of the second pass, which goes on from the heads of the first.\n"
        "Acceptance was measured in the engine, on the 32 shipped prompts.\n" + LICENSE_NOTE,
    )
