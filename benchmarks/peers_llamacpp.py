"""How surprised llama.cpp is by tokens, for `peers_real.py`; runs in llama.cpp's environment.

    .venv-llamacpp/bin/python benchmarks/peers_llamacpp.py FILE THREADS

Its Python binding is read from the sources, its library from what was built there. Each line of standard input has
pieces of token ids; the answer is the mean of minus the log probability of each token behind the first of its piece.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from llama_cpp import Llama

from common import be_asked


def main() -> None:
    file, threads = sys.argv[1:]

    def make() -> Callable[[dict[str, Any]], float]:
        count = int(threads)
        model = Llama(file, n_ctx=2048, n_batch=512, n_threads=count, n_threads_batch=count, logits_all=True)
        return lambda asked: surprise(model, asked["pieces"])

    be_asked(make)


def surprise(model: Any, pieces: list[list[int]]) -> float:
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
    main()
