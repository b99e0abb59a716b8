"""What runs in llama.cpp's environment: files that it makes, and how surprised it is by tokens.

    .venv-llamacpp/bin/python benchmarks/peers_llamacpp.py convert LLAMA_CPP FOLDER OUT
    .venv-llamacpp/bin/python benchmarks/peers_llamacpp.py surprise FILE THREADS

`convert` makes a GGUF file of a model's folder by llama.cpp's own script, which knows tokenizers by what they make of a
test text and refuses others. How text is split matters nothing where prompts are ids, so one that it knows is named in
its place. `surprise` reads pieces of token ids, a line of JSON each; the answer is the mean of minus the log
probability of each token behind the first of its piece. The Python binding is read from the sources, its library from
what was built there.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from common import be_asked

_PRETOKENIZER = "llama-bpe"


def convert(source: str, folder: str, out: str) -> None:
    place = Path(source).resolve()
    sys.path[:0] = [str(place), str(place / "gguf-py")]
    from conversion import base  # lies beside the script

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: _PRETOKENIZER
    script = str(place / "convert_hf_to_gguf.py")
    sys.argv = [script, str(Path(folder).resolve()), "--outtype", "bf16", "--outfile", str(Path(out).resolve())]
    runpy.run_path(script, run_name="__main__")


def surprise(file: str, threads: str) -> None:
    from llama_cpp import Llama

    def make() -> Callable[[dict[str, Any]], float]:
        count = int(threads)
        model = Llama(file, n_ctx=2048, n_batch=512, n_threads=count, n_threads_batch=count, logits_all=True)
        return lambda asked: _surprise(model, asked["pieces"])

    be_asked(make)


def _surprise(model: Any, pieces: list[list[int]]) -> float:
    """The mean over all pieces, each read from an empty cache."""
    found: list[float] = []
    for ids in pieces:
        model.reset()
        model.eval(ids)
        logits = np.asarray(model.scores[: len(ids) - 1], dtype=np.float64)
        top = logits.max(-1)
        total = top + np.log(np.exp(logits - top[:, None]).sum(-1))
        found += (total - logits[np.arange(len(ids) - 1), ids[1:]]).tolist()
    return float(np.mean(found))


if __name__ == "__main__":
    {"convert": convert, "surprise": surprise}[sys.argv[1]](*sys.argv[2:])
