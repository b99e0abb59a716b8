"""Copy trained heads, with their card, into a folder of the package, and write down what was measured of them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.stdlib.publish import LICENSE_NOTE, keep_log
from truedraft.machine import describe_machine
from truedraft.training.report import Card, evaluation_facts, training_facts

_WEIGHTS = "heads.safetensors"
_LOG = Path("work") / "log.jsonl"


@dataclass(frozen=True)
class Published:
    """Trained heads, with what is said about them.

    Attributes:
        folder: where they lie.
        name: of the kind, and of the kept log.
        command: the module that made them.
        title: of the card.
        summary: of the card.
        files: that are shipped.
        parameters: how many.
        facts: what was measured of them.
    """

    folder: Path
    name: str
    command: str
    title: str
    summary: str
    files: tuple[str, ...]
    parameters: int
    facts: Mapping[str, Any]


def publish_heads(heads: Published, destination: Path, results: Path, *, total_s: float, device: str) -> None:
    """Write `destination` (replaced) and `results`, one JSON object.

    Args:
        heads: what is published.
        destination: the folder of the package.
        results: what was measured, for docs.
        total_s: seconds from the first prompt to the last measurement.
        device: where they were trained.
    """
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in heads.files:
        shutil.copy(heads.folder / name, partial / name)
    card_of(heads, total_s, device).write(partial)
    shutil.rmtree(destination, ignore_errors=True)
    partial.replace(destination)
    size = (destination / _WEIGHTS).stat().st_size
    record = {"command": heads.command, "parameters": heads.parameters, "bytes": size, "total_s": total_s}
    record |= {"machine": describe_machine(device), **heads.facts}
    results.write_text(json.dumps(record) + "\n", encoding="utf-8")
    keep_log(heads.folder / _LOG, heads.name)


def card_of(heads: Published, total_s: float, device: str) -> Card:
    """The card of heads; arguments as in `publish_heads`."""
    facts = heads.facts
    rows = training_facts(
        parameters=heads.parameters,
        data=f"{facts['written_tokens']:,} tokens that the target wrote, at temperatures 0 and 1",
        steps=facts["steps"],
        tokens=facts["positions"],
        elapsed_s=facts["elapsed_s"],
        machine=describe_machine(device),
    )
    rows["from the first prompt to the last measurement"] = f"{total_s / 60:.0f} minutes"
    rows["finished"] = time.strftime("%Y-%m-%d")
    rows |= evaluation_facts(facts["served"])
    return Card(
        title=heads.title,
        summary=heads.summary,
        facts=rows,
        notes="Acceptance was measured in the engine, on the 32 shipped prompts.\n" + LICENSE_NOTE,
    )
