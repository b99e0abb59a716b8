"""What recipes share: a command, lines of progress, and language models from scratch with their tokenizers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from truedraft.errors import TruedraftError
from truedraft.models.architecture import LlamaShape, new_llama
from truedraft.training.drafts import DraftConfig, stream_loop
from truedraft.training.loop import Callbacks, StepRecord, TrainingLoop
from truedraft.training.losses import CrossEntropy

ROOT = Path(__file__).parents[1]
END_OF_TEXT = "<|endoftext|>"
_EVERY_S = 10.0  # between two lines of progress

# How text is cut before merging. A line break keeps the indentation after it, since in source code the two
# are decided together; a word keeps one sign before it (`.append`, `(self`); numbers come in threes.
CODE_PATTERN = (
    r"(?:[^\S\n]*\n)+[^\S\n]*"  # line breaks, blank lines, and the indentation that follows
    r"|[^\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|[^\S\n]+(?=\S)|[^\S\n]+"
)


def command(
    parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], None], arguments: list[str] | None
) -> int:
    """Parse the arguments, do the work, and give the exit status: 1 after an error of ours, 130 after Ctrl-C."""
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        work(options)
    except TruedraftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def say(message: str) -> None:
    print(time.strftime("%H:%M:%S"), message, flush=True)


def run_loop(loop: TrainingLoop, name: str, *, until: int | None, every: int) -> None:
    last = loop.total_steps if until is None else until
    say(f"{name}: training to step {last} of {loop.total_steps}")

    def report(record: StepRecord) -> None:
        if (record.step + 1) % every == 0:
            values = " ".join(f"{key} {value:.4f}" for key, value in record.values.items())
            rate = record.tokens / max(record.elapsed_s, 1e-9)
            say(f"{name}: step {record.step + 1}/{last} {values} ({rate:.0f} tokens/s)")

    loop.run(until=until, on_step=report)


def told() -> Callbacks:
    """A line on each kind of work every ten seconds and at its end, and notes and plans as they come."""
    last = 0.0

    def progress(what: str, done: int, total: int, remark: str) -> None:
        nonlocal last
        if done == total or time.monotonic() - last > _EVERY_S:
            last = time.monotonic()
            say(f"{what}: {done:,} of {total:,} {remark}")

    return Callbacks(on_progress=progress, on_note=say, on_plan=say)


def pretraining_loop(shape: LlamaShape, config: DraftConfig, stream: NDArray[np.uint32], folder: Path) -> TrainingLoop:
    """A new model and the loop that trains it on the text itself, see `stream_loop`."""
    model = new_llama(shape, seed=config.seed).to(config.device)
    return stream_loop(replace(config, loss=CrossEntropy()), None, model, stream, folder)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Learn byte-level BPE merges from the texts.

    Every string survives encoding and decoding unchanged: no normalisation, no prefix space, all 256 bytes in
    the alphabet. Id 0 is `<|endoftext|>`, which separates documents and ends an answer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CODE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
