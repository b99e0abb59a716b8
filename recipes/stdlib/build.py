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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from recipes.common import ROOT, command, pretraining_loop, run_loop, say, train_tokenizer
from recipes.stdlib.publish import publish
from recipes.stdlib.settings import CONTEXT, STAGES, VOCAB_SIZE, Stage
from recipes.stdlib.sources import load_sources, write_prompts
from truedraft.errors import DataError
from truedraft.machine import describe_machine
from truedraft.models.architecture import load_causal_lm, save_llama
from truedraft.training.drafts import starting_draft, stream_loop
from truedraft.training.loop import CHECKPOINT, TrainingLoop
from truedraft.training.texts.data import load_tokenizer, read_stream, save_tokenizer, write_stream


@dataclass(frozen=True)
class Recipe:
    """Where the recipe works, and with which settings."""

    run: Path
    stages: Mapping[str, Stage]
    device: str = "cpu"
    every: int = 20  # steps between two lines of progress

    def all(self, out: Path) -> dict[str, float]:
        """All stages; what is done is skipped, what was interrupted goes on.

        Returns:
            What `publish` has measured.
        """
        self.data()
        first_target = self.first_target()
        first_draft = self._distilled("first_draft", first_target, self._pretrained("draft_start"))
        target = self._pretrained("target")
        return publish(self.run, target, self._distilled("draft", target, first_draft), out)

    def data(self) -> None:
        """Check the sources (always), train the tokenizer, write the token streams and the prompts."""
        sources = sorted(load_sources(), key=lambda source: source.sha256)
        corpus = hashlib.sha256("".join(f"{s.path} {s.sha256} {s.held_out}\n" for s in sources).encode()).hexdigest()
        if (self.run / "data.json").exists():
            facts = json.loads((self.run / "data.json").read_text())
            if facts.get("corpus_sha256", corpus) != corpus:  # other files, or split otherwise
                raise DataError(
                    f"the token streams in {self.run} were made from another manifest: name a new --run folder"
                )
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
        say(f"data: {facts}")

    def first_target(self) -> Path:
        """Train the target through the first part of its stable stretch, branch, and decay the branch."""
        out = self.run / "first-target"
        if not _is_model(out):
            trunk = self._pretrain("target", "target", until=self.stages["first_target"].stable)
            branch = out / "work"
            if not (branch / CHECKPOINT).exists():
                branch.mkdir(parents=True, exist_ok=True)
                shutil.copy(trunk.folder.checkpoint, branch / CHECKPOINT)
            self._export(self._pretrain("first_target", "first-target/work"), out)
        return out

    def _pretrained(self, stage: str) -> Path:
        """The target, on from where the branch left it, or the draft on the text alone, to the end of the decay."""
        out = self.run / stage.replace("_", "-")
        if not _is_model(out):
            self._export(self._pretrain(stage, out.name), out)
        return out

    def _pretrain(self, stage: str, name: str, *, until: int | None = None) -> TrainingLoop:
        shape, config = self.stages[stage].shape, replace(self.stages[stage].config, device=self.device)
        loop = pretraining_loop(shape, config, read_stream(self.run / "train.bin"), self.run / name)
        run_loop(loop, name, until=until, every=self.every)
        return loop

    def _distilled(self, stage: str, target: Path, start: Path) -> Path:
        out = self.run / stage.replace("_", "-")
        if not _is_model(out):
            config = replace(self.stages[stage].config, start_from=start, device=self.device)
            teacher = load_causal_lm(target, dtype=torch.bfloat16, device=self.device).eval()
            draft = starting_draft(config, teacher, load_tokenizer(target))
            loop = stream_loop(config, teacher, draft, read_stream(self.run / "train.bin"), out)
            run_loop(loop, out.name, until=None, every=self.every)
            self._export(loop, out)
        return out

    def _export(self, loop: TrainingLoop, out: Path) -> None:
        save_llama(loop.model, out)
        save_tokenizer(load_tokenizer(self.run / "tokenizer"), out)
        machine = describe_machine(self.device)
        facts = {**vars(loop.progress), "finished": time.strftime("%Y-%m-%d"), "machine": machine}
        (out / "progress.json").write_text(json.dumps(facts))
        say(f"{out.name}: finished after {loop.progress.step} steps, {loop.progress.tokens:,} tokens")


def _is_model(folder: Path) -> bool:
    """Whether a stage has finished: its facts are written last."""
    return (folder / "progress.json").exists()


def main(arguments: list[str] | None = None) -> int:
    """Run all stages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "stdlib", help="checkpoints, streams, logs")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "stdlib" / "out", help="the finished pair")
    parser.add_argument("--device", default="cpu")

    def work(options: argparse.Namespace) -> None:
        Recipe(options.run, STAGES, options.device).all(options.out)

    return command(parser, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
