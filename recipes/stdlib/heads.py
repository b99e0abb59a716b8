"""The embedded heads: `python -m recipes.stdlib.heads medusa` and `redrafter`, from the root of the repository.

Both learn from the same text, which the target writes for the first of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from recipes.common import ROOT, command, say, told
from recipes.stdlib.publish import LICENSE_NOTE, keep_log
from truedraft.kinds.medusa.training import MedusaTrainingConfig
from truedraft.kinds.redrafter.training import RedrafterTrainingConfig
from truedraft.machine import describe_machine
from truedraft.training.head_config import HeadTrainingConfig
from truedraft.training.heads import train_heads
from truedraft.training.report import Card, evaluation_facts, training_facts
from truedraft.training.texts.answer_writer import WritingConfig
from truedraft.training.workspace import WORK

TARGET = "embedded:target"
RUNS, RESULTS = ROOT / "runs" / "stdlib", ROOT / "benchmarks" / "results"
_WRITING = WritingConfig(temperatures=(0.0, 1.0, 1.0))


class HeadRecipe(NamedTuple):
    """Every number that decides the heads of a kind, the words of its card, and the files that are shipped."""

    config: HeadTrainingConfig
    title: str
    summary: str
    files: tuple[str, ...]


RECIPES = {
    "medusa": HeadRecipe(
        MedusaTrainingConfig(
            tokens=1_000_000, writing=_WRITING, heads=4, layers=3, epochs=2.5, decay_share=0.9, window=4, seed=0
        ),
        "truedraft embedded Medusa heads",
        "Heads on the embedded target's last vector, and trees of their guesses: `--drafter medusa`.",
        ("config.json", "heads.safetensors", "trees.json"),
    ),
    "redrafter": HeadRecipe(  # 1.4 M weights
        RedrafterTrainingConfig(
            tokens=1_000_000, writing=_WRITING, length=5, state=512, layers=4, loss="kl", steps=1000, decay_share=0.9,
            window=4, seed=0,
        ),
        "truedraft embedded recurrent head",
        "A recurrent head on the embedded target's last vector (ReDrafter): `--drafter redrafter`.",
        ("config.json", "heads.safetensors", "facts.json"),
    ),
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=RECIPES)
    parser.add_argument(
        "--out", type=Path, help="heads and work; without it a folder of the kind's name in runs/stdlib"
    )
    parser.add_argument("--text", type=Path, default=RUNS / "medusa", help="heads whose target's answers are taken")
    parser.add_argument("--publish", type=Path, help="the package's folder for the finished heads, with results")
    parser.add_argument("--device", default="cpu")
    return command(parser, _train, arguments)


def _train(options: argparse.Namespace) -> None:
    started, out = time.time(), options.out or RUNS / options.kind
    share_text(options.text, out)
    config = replace(RECIPES[options.kind].config, device=options.device)
    result = train_heads(TARGET, (), out, config, callbacks=told())
    # A run that goes on from a checkpoint counts what its steps took before.
    total_s = max(time.time() - started, float(result.as_dict().get("elapsed_s", 0.0)))
    say(f"finished after {total_s / 60:.1f} minutes: {result.as_dict()}")
    if options.publish is not None:
        results = RESULTS / f"{options.kind}_heads.json"
        publish(options.kind, out, options.publish, results, total_s=total_s, device=options.device)


def publish(kind: str, folder: Path, destination: Path, results: Path, *, total_s: float, device: str) -> None:
    recipe, machine = RECIPES[kind], describe_machine(device)
    heads = recipe.config.head.load(folder)
    parameters, facts = sum(weight.numel() for weight in heads.parameters()), heads.record.facts
    rows = training_facts(
        parameters=parameters,
        data=f"{facts['written_tokens']:,} tokens that the target wrote, at temperatures 0 and 1",
        steps=facts["steps"],
        tokens=facts["positions"],
        elapsed_s=facts["elapsed_s"],
        machine=machine,
    )
    rows["from the first prompt to the last measurement"] = f"{total_s / 60:.0f} minutes"
    rows["finished"] = time.strftime("%Y-%m-%d")
    notes = "Acceptance was measured in the engine, on the 32 shipped prompts.\n" + LICENSE_NOTE
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in recipe.files:
        shutil.copy(folder / name, partial / name)
    Card(recipe.title, recipe.summary, rows | evaluation_facts(facts["served"]), notes=notes).write(partial)
    shutil.rmtree(destination, ignore_errors=True)
    partial.replace(destination)
    size = (destination / "heads.safetensors").stat().st_size
    record = {"command": f"recipes.stdlib.heads {kind}", "parameters": parameters, "bytes": size, "total_s": total_s}
    results.write_text(json.dumps(record | {"machine": machine, **facts}) + "\n", encoding="utf-8")
    keep_log(folder / WORK / "log.jsonl", kind)


def share_text(written: Path, folder: Path) -> None:
    """Let a training read what the target wrote for another, where that wrote anything."""
    (folder / WORK).mkdir(parents=True, exist_ok=True)
    for path in [*(written / WORK).glob("train.*"), *(written / WORK).glob("tree.*")]:
        if not (folder / WORK / path.name).exists():
            shutil.copy(path, folder / WORK / path.name)


if __name__ == "__main__":
    sys.exit(main())
