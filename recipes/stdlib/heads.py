"""The embedded Medusa heads: `python -m recipes.stdlib.heads`, from the root of the repository.

With what recipes of embedded heads share: the text that the target writes, the training on it, and publishing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.common import ROOT, command, say, told
from recipes.stdlib.publish import LICENSE_NOTE, keep_log
from recipes.stdlib.sources import load_sources
from truedraft.kinds.medusa.training import MedusaTrainingConfig
from truedraft.machine import describe_machine
from truedraft.training.head_config import HeadTrainingConfig
from truedraft.training.heads import train_heads
from truedraft.training.report import Card, evaluation_facts, training_facts
from truedraft.training.texts.answer_writer import WritingConfig
from truedraft.training.texts.data import as_stream, load_tokenizer
from truedraft.training.texts.prompts import PromptSets, cut_prompts, shipped_prompts, without_pieces
from truedraft.training.workspace import WORK

TARGET = "embedded:target"
TEXT: dict[str, Any] = {"tokens": 1_000_000, "writing": WritingConfig(temperatures=(0.0, 1.0, 1.0))}
"""How much the target writes, and how; the same for all kinds of heads, so that it writes once."""


@dataclass(frozen=True)
class HeadRecipe:
    """How one kind of embedded heads is made, and what is said about them.

    Attributes:
        name: of the kind: of the folder in the package, under `runs/stdlib`, of the results file, and of the kept log.
        command: the module that makes them.
        settings: from a device to every number of the training.
        title: of the card.
        summary: of the card.
        files: that are shipped.
        text: a folder whose answers by the target are taken, where there are any.
    """

    name: str
    command: str
    settings: Callable[[str], HeadTrainingConfig]
    title: str
    summary: str
    files: tuple[str, ...]
    text: Path | None = None

    def main(self, arguments: list[str] | None = None) -> int:
        parser = argparse.ArgumentParser(description=f"Train the embedded heads of `--drafter {self.name}`.")
        runs, results = ROOT / "runs" / "stdlib", ROOT / "benchmarks" / "results"
        parser.add_argument("--out", type=Path, default=runs / self.name, help="heads and work")
        parser.add_argument("--text", type=Path, default=self.text, help="heads whose target's answers are taken")
        parser.add_argument("--publish", type=Path, help="the package's folder for the finished heads")
        parser.add_argument(
            "--results", type=Path, default=results / f"{self.name}_heads.json", help="written with --publish"
        )
        parser.add_argument("--device", default="cpu")
        return command(parser, self._train, arguments)

    def _train(self, options: argparse.Namespace) -> None:
        started = time.time()
        config = self.settings(options.device)
        if options.text is not None:
            share_text(options.text, options.out)
        result = train_heads(TARGET, prompts(config), options.out, config, callbacks=told())
        # A run that goes on from a checkpoint counts what its steps took before.
        total_s = max(time.time() - started, float(result.as_dict().get("elapsed_s", 0.0)))
        say(f"finished after {total_s / 60:.1f} minutes: {result.as_dict()}")
        if options.publish is not None:
            self.publish(options.out, options.publish, options.results, total_s=total_s, device=options.device)

    def publish(self, folder: Path, destination: Path, results: Path, *, total_s: float, device: str) -> None:
        heads, machine = self.settings(device).head.load(folder), describe_machine(device)
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
        for name in self.files:
            shutil.copy(folder / name, partial / name)
        Card(self.title, self.summary, rows | evaluation_facts(facts["served"]), notes=notes).write(partial)
        shutil.rmtree(destination, ignore_errors=True)
        partial.replace(destination)
        size = (destination / "heads.safetensors").stat().st_size
        record = {"command": self.command, "parameters": parameters, "bytes": size, "total_s": total_s}
        results.write_text(json.dumps(record | {"machine": machine, **facts}) + "\n", encoding="utf-8")
        keep_log(folder / WORK / "log.jsonl", self.name)


def share_text(written: Path, folder: Path) -> None:
    """Let a training read what the target wrote for another, where that wrote anything."""
    (folder / WORK).mkdir(parents=True, exist_ok=True)
    for path in [*(written / WORK).glob("train.*"), *(written / WORK).glob("tree.*")]:
        if not (folder / WORK / path.name).exists():
            shutil.copy(path, folder / WORK / path.name)


def prompts(config: HeadTrainingConfig) -> PromptSets:
    """Prompts from files that the target was trained on; for the tree from held-out files; the shipped ones as test."""
    tokenizer = load_tokenizer(TARGET)
    sources = sorted(load_sources(), key=lambda source: source.path)
    pieces = [str(record["text"]) for record in shipped_prompts()]
    seen = [source.text for source in sources if not source.held_out]
    held_out = [part for source in sources if source.held_out for part in without_pieces(source.text, pieces)]
    counts = config.prompts
    return PromptSets(
        cut_prompts(seen, tokenizer, counts.train, config.prompt_tokens),
        cut_prompts(held_out, tokenizer, counts.tree, config.prompt_tokens),
        [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces[: counts.test]],
        as_stream(held_out, tokenizer),
        source="Python's standard library",
    )


def settings(device: str = "cpu") -> MedusaTrainingConfig:
    """Every number that decides the heads."""
    return MedusaTrainingConfig(
        **TEXT,
        heads=4,
        layers=3,
        epochs=2.5,
        decay_share=0.9,
        window=4,
        seed=0,
        device=device,
    )


RECIPE = HeadRecipe(
    "medusa",
    "recipes.stdlib.heads",
    settings,
    title="truedraft embedded Medusa heads",
    summary="Heads on the embedded target's last vector, and trees of their guesses: `--drafter medusa`.",
    files=("config.json", "heads.safetensors", "trees.json"),
)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
