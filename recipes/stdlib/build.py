"""Make the embedded pair: `python -m recipes.stdlib.build`, from the root of the repository.

Each stage looks at what lies in the run folder and does only what is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from recipes.common import ROOT, command, pretraining_loop, run_loop, say, train_tokenizer
from recipes.stdlib import publish
from recipes.stdlib.settings import CONTEXT, VOCAB_SIZE, Settings
from recipes.stdlib.sources import load_sources, write_prompts
from truedraft.errors import DataError
from truedraft.machine import describe_machine
from truedraft.models.architecture import load_causal_lm, save_llama
from truedraft.training.drafts import DraftConfig, starting_draft, stream_loop
from truedraft.training.loop import CHECKPOINT, TrainingLoop
from truedraft.training.texts.data import load_tokenizer, read_stream, save_tokenizer, write_stream

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from truedraft.models.architecture import LlamaShape


@dataclass(frozen=True)
class Recipe:
    """Where the recipe works, with which settings, and how it reports."""

    run: Path
    settings: Settings
    device: str = "cpu"
    say: Callable[[str], None] = print
    every: int = 20  # steps between two lines of progress

    def data(self) -> None:
        """Check the sources (always), train the tokenizer, write the token streams and the prompts."""
        sources = sorted(load_sources(), key=lambda source: source.sha256)
        corpus = hashlib.sha256("".join(f"{s.path} {s.sha256} {s.held_out}\n" for s in sources).encode()).hexdigest()
        if (self.run / "data.json").exists():
            self._refuse_other_data(corpus)
            return
        train = [source.text for source in sources if not source.held_out]
        held_out = [source.text for source in sources if source.held_out]
        tokenizer = train_tokenizer(train, vocab_size=VOCAB_SIZE, context=CONTEXT)
        save_tokenizer(tokenizer, self.run / "tokenizer")
        facts = {
            "train_files": len(train),
            "train_tokens": write_stream(train, tokenizer, self.run / "train.bin"),
            "held_out_files": len(held_out),
            "held_out_tokens": write_stream(held_out, tokenizer, self.run / "heldout.bin"),
            "held_out_bytes": sum(len(text.encode()) for text in held_out),
            "corpus_sha256": corpus,
        }
        write_prompts((s for s in sources if s.held_out), tokenizer, self.run / "heldout_prompts.jsonl")
        (self.run / "data.json").write_text(json.dumps(facts, indent=1))
        self.say(f"data: {facts}")

    def _refuse_other_data(self, corpus: str) -> None:
        """Refuse to go on with streams that were made of other files, or split otherwise, than now."""
        facts = json.loads((self.run / "data.json").read_text())
        if facts.get("corpus_sha256", corpus) != corpus:
            raise DataError(f"the token streams in {self.run} were made from another manifest: name a new --run folder")

    def first_target(self) -> Path:
        """Train the target through the first part of its stable stretch, branch, and decay the branch."""
        out = self.run / "first-target"
        if not _is_model(out):
            trunk = self._pretrain(
                self.settings.target(self.device), "target", until=self.settings.first_target_stable_steps
            )
            branch = out / "work"
            if not (branch / CHECKPOINT).exists():
                branch.mkdir(parents=True, exist_ok=True)
                shutil.copy(trunk.folder.checkpoint, branch / CHECKPOINT)
            loop = self._pretrain(self.settings.first_target(self.device), "first-target/work")
            self._export(loop, out)
        return out

    def target(self) -> Path:
        """Go on with the target where the branch left it, to the end of its decay."""
        out = self.run / "target"
        if not _is_model(out):
            loop = self._pretrain(self.settings.target(self.device), "target")
            self._export(loop, out)
        return out

    def draft_start(self) -> Path:
        """Train the draft on the text alone, which is cheaper a step than asking the target."""
        out = self.run / "draft-start"
        if not _is_model(out):
            self._export(self._pretrain(self.settings.draft_start(self.device), "draft-start"), out)
        return out

    def first_draft(self, target: Path, start: Path) -> Path:
        return self._distill(self.settings.first_draft(start, self.device), target, "first-draft")

    def draft(self, target: Path, start: Path) -> Path:
        return self._distill(self.settings.draft(start, self.device), target, "draft")

    def publish(self, target: Path, draft: Path, destination: Path) -> dict[str, float]:
        return publish.publish(self.run, target, draft, destination, say=self.say)

    def stream(self) -> NDArray[np.uint32]:
        return read_stream(self.run / "train.bin")

    def _pretrain(self, what: tuple[LlamaShape, DraftConfig], name: str, *, until: int | None = None) -> TrainingLoop:
        loop = pretraining_loop(*what, self.stream(), self.run / name)
        run_loop(loop, name, until=until, every=self.every, say=self.say)
        return loop

    def _distill(self, config: DraftConfig, target: Path, name: str) -> Path:
        out = self.run / name
        if not _is_model(out):
            teacher = load_causal_lm(target, dtype=torch.bfloat16, device=self.device).eval()
            draft = starting_draft(config, teacher, load_tokenizer(target))
            loop = stream_loop(config, teacher, draft, self.stream(), out)
            run_loop(loop, name, every=self.every, say=self.say)
            self._export(loop, out)
        return out

    def _export(self, loop: TrainingLoop, out: Path) -> None:
        save_llama(loop.model, out)
        save_tokenizer(load_tokenizer(self.run / "tokenizer"), out)
        machine = describe_machine(self.device)
        facts = {**vars(loop.progress), "finished": time.strftime("%Y-%m-%d"), "machine": machine}
        (out / "progress.json").write_text(json.dumps(facts))
        self.say(f"{out.name}: finished after {loop.progress.step} steps, {loop.progress.tokens:,} tokens")


def _is_model(folder: Path) -> bool:
    """Whether a stage has finished: its facts are written last."""
    return (folder / "progress.json").exists()


def main(arguments: list[str] | None = None) -> int:
    """Run all stages; what is already done is skipped, what was interrupted goes on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "stdlib", help="checkpoints, streams, logs")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "stdlib" / "out", help="the finished pair")
    parser.add_argument("--device", default="cpu")
    return command(parser, _build, arguments)


def _build(options: argparse.Namespace) -> None:
    recipe = Recipe(options.run, Settings.load(), device=options.device, say=say)
    recipe.data()
    first_target = recipe.first_target()
    first_draft = recipe.first_draft(first_target, recipe.draft_start())
    target = recipe.target()
    draft = recipe.draft(target, first_draft)
    recipe.publish(target, draft, options.out)


if __name__ == "__main__":
    sys.exit(main())
