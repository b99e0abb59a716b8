"""Make a small target from English prose: `python -m recipes.english.build --text FILE`, from the root."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from truedraft.errors import TruedraftError
from truedraft.models.architecture import LlamaShape, save_llama
from truedraft.training import PretrainConfig, pretraining_loop
from truedraft.training.loop import StepRecord
from truedraft.training.optimizer import WarmupStableDecay
from truedraft.training.texts.data import Curriculum, read_stream, read_texts, write_stream
from truedraft.training.texts.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

ROOT = Path(__file__).parents[2]
VOCAB_SIZE, CONTEXT = 4096, 512
SHAPE = LlamaShape(vocab_size=VOCAB_SIZE, width=192, layers=4, heads=3, kv_heads=1, intermediate=512, context=CONTEXT)
CURRICULUM = Curriculum(stable_length=256, decay_length=CONTEXT, tokens_per_step=4096, tokens_per_pass=4096)
HELD_OUT = 0.05  # of each text, its end


def config(stable_steps: int, decay_steps: int) -> PretrainConfig:
    """Every number that decides the target."""
    schedule = WarmupStableDecay(10, stable_steps, decay_steps)
    return PretrainConfig(SHAPE, schedule, curriculum=CURRICULUM, seed=0)


def main(arguments: list[str] | None = None) -> int:
    """Train the target; an interrupted run goes on from its last checkpoint."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    run: Path = options.run
    try:
        _data(options.text, run)
        loop = pretraining_loop(config(*options.steps), read_stream(run / "train.bin"), run / "target" / "work")
        loop.run(on_step=_report)
        save_llama(loop.model, run / "target")
        save_tokenizer(load_tokenizer(run / "tokenizer"), run / "target")
    except TruedraftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, action="append", required=True, help="English prose; may be repeated")
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "english", help="texts, tokenizer, target")
    parser.add_argument("--steps", type=int, nargs=2, default=(500, 150), help="before and in the decay")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(arguments)


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


def _report(record: StepRecord) -> None:
    if (record.step + 1) % 20 == 0:
        values = " ".join(f"{name} {value:.4f}" for name, value in record.values.items())
        print(time.strftime("%H:%M:%S"), f"step {record.step + 1} {values} {record.elapsed_s:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
