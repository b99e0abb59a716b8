"""Tiny random models with a byte-level tokenizer, and the command in a process of its own."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and one that ends the text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={END: 0} | {char: i for i, char in enumerate(alphabet, start=1)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, clean_up_tokenization_spaces=False)


def save_tiny_llama(folder: Path, seed: int, layers: int, chat: bool = False) -> str:
    """A model folder whose greedy answers do not repeat one token."""
    tokenizer = tiny_tokenizer()
    if chat:
        tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.25, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def ok(self) -> Result:
        """Itself, of a command that did what it was to do."""
        assert self.status == 0, self.err
        return self

    @property
    def silent(self) -> Result:
        """Itself, of one that also said nothing but how far it was."""
        assert (self.status, self.complaint) == (0, ""), self.out
        return self

    def refused(self, *phrases: str) -> Result:
        """Itself, of unusable arguments, where all of this is said."""
        assert self.status == 2 and all(each in self.err for each in phrases), self.err
        return self

    @property
    def complaint(self) -> str:
        """Standard error without the lines that say what a training or a plan will take and how far it is."""
        lines = [each for each in self.err.splitlines(keepends=True) if ": tried on " not in each]
        return "".join(line for line in lines if not line.startswith(("truedraft: note: ", "truedraft: step ")))

    @property
    def record(self) -> dict[str, Any]:
        """The JSON object in the last line of standard output."""
        return json.loads(self.out.splitlines()[-1])


def prompts_in(folder: Path, *prompts: str | dict[str, Any]) -> str:
    """A new file of prompts: a text a line, or objects, which may be written out."""
    objects = any(isinstance(each, dict) or each.startswith("{") for each in prompts)
    file = folder / ("prompts.jsonl" if objects else "prompts.txt")
    file.write_text("\n".join(json.dumps(each) if isinstance(each, dict) else each for each in prompts))
    return str(file)


Run = Callable[..., Result]
"""The command in this process, by the words that are typed."""


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", "import sys; from truedraft.cli.main import main; sys.exit(main())", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    # A shell that runs the tests in the background lets them ignore Ctrl-C, and they would hand that on.
    options = {"preexec_fn": functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)} | options
    return subprocess.Popen(command, text=True, env=environment, **(pipes | options))
