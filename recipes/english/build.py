"""Make a small target from English prose: `python -m recipes.english.build --text FILE`, from the root."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from recipes.common import ROOT, command, pretraining_loop, run_loop, train_tokenizer
from truedraft.models.architecture import LlamaShape, save_llama
from truedraft.training.drafts import DraftConfig
from truedraft.training.optimizer import WarmupStableDecay
from truedraft.training.texts.data import Curriculum, read_stream, read_texts, write_stream
from truedraft.training.texts.tokenizer import load_tokenizer, save_tokenizer

VOCAB_SIZE, CONTEXT = 4096, 512
SHAPE = LlamaShape(vocab_size=VOCAB_SIZE, width=192, layers=4, heads=3, kv_heads=1, intermediate=512, context=CONTEXT)
CURRICULUM = Curriculum(stable_length=256, decay_length=CONTEXT, tokens_per_step=4096, tokens_per_pass=4096)
HELD_OUT = 0.05  # of each text, its end


def main(arguments: list[str] | None = None) -> int:
    """Train the target; an interrupted run goes on from its last checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, action="append", required=True, help="English prose; may be repeated")
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "english", help="texts, tokenizer, target")
    parser.add_argument("--steps", type=int, nargs=2, default=(500, 150), help="before and in the decay")
    return command(parser, _build, arguments)


def _build(options: argparse.Namespace) -> None:
    run: Path = options.run
    _data(options.text, run)
    config = DraftConfig(schedule=WarmupStableDecay(10, *options.steps), curriculum=CURRICULUM)
    loop = pretraining_loop(SHAPE, config, read_stream(run / "train.bin"), run / "target" / "work")
    run_loop(loop, "target")
    save_llama(loop.model, run / "target")
    save_tokenizer(load_tokenizer(run / "tokenizer"), run / "target")


def _data(paths: list[Path], run: Path) -> None:
    """Cut off the held-out ends, train the tokenizer, write the stream; once."""
    if (run / "train.bin").exists():
        return
    run.mkdir(parents=True, exist_ok=True)
    texts = read_texts(paths)
    cuts = [int(len(text) * (1.0 - HELD_OUT)) for text in texts]
    seen = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    (run / "train.txt").write_text("\n\n".join(seen), encoding="utf-8")
    held_out = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    (run / "heldout.txt").write_text("\n\n".join(held_out), encoding="utf-8")
    tokenizer = train_tokenizer(seen, vocab_size=VOCAB_SIZE, context=CONTEXT)
    save_tokenizer(tokenizer, run / "tokenizer")
    write_stream(seen, tokenizer, run / "train.bin")


if __name__ == "__main__":
    sys.exit(main())
