"""What the recipes of embedded heads share: the text that the target writes, the training on it, and publishing."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.common import ROOT, command, say
from recipes.stdlib.publish_heads import Published, publish_heads
from recipes.stdlib.sources import load_sources
from truedraft.training.head_config import HeadTrainingConfig
from truedraft.training.heads import train_heads
from truedraft.training.loop import Callbacks
from truedraft.training.texts.answer_writer import WritingConfig
from truedraft.training.texts.data import as_stream
from truedraft.training.texts.prompts import PromptSets, cut_prompts, shipped_prompts, without_pieces
from truedraft.training.texts.tokenizer import load_tokenizer
from truedraft.training.workspace import WORK

TARGET = "embedded:target"
TEXT: dict[str, Any] = {"tokens": 1_000_000, "writing": WritingConfig(temperatures=(0.0, 1.0, 1.0))}
"""How much the target writes, and how; the same for all kinds of heads, so that it writes once."""


@dataclass(frozen=True)
class HeadRecipe:
    """How one kind of embedded heads is made.

    Attributes:
        name: of the kind: of the folder in the package, under `runs/stdlib`, and of the results file.
        settings: from a device to every number of the training.
        published: what is shipped of a folder of trained heads.
        text: a folder whose answers by the target are taken, where there are any.
    """

    name: str
    settings: Callable[[str], HeadTrainingConfig]
    published: Callable[[Path], Published]
    text: Path | None = None

    def main(self, arguments: list[str] | None = None) -> int:
        """Train the heads; an interrupted run goes on from its last checkpoint."""
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
        result = train_heads(TARGET, prompts(config), options.out, config, callbacks=Callbacks(Show()))
        # A run that goes on from a checkpoint counts what its steps took before.
        total_s = max(time.time() - started, float(result.as_dict().get("elapsed_s", 0.0)))
        say(f"finished after {total_s / 60:.1f} minutes: {result.as_dict()}")
        if options.publish is not None:
            heads = self.published(options.out)
            publish_heads(heads, options.publish, options.results, total_s=total_s, device=options.device)


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


class Show:
    """A line every twenty seconds."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, what: str, done: int, total: int, remark: str) -> None:
        """See `OnProgress`."""
        if done == total or time.time() - self._last > 20.0:
            self._last = time.time()
            say(f"{what}: {done} of {total} {remark}")
