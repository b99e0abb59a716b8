"""How far answers of keys and values in 8 bits lie from those of a cache in the model's dtype, and what they cost.

Every text is read in pieces of so many tokens, each from an empty cache. Forwards of both are timed in turns, after a
context, by processor time of one thread, which other processes change least. Adds a line of JSON for each dtype.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import RESULTS, Lines
from quantised_weights import compared, log_probabilities
from truedraft import load_model
from truedraft.core.tree import chain_shape
from truedraft.machine import machine_facts
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.cache import RequestCache

_PART = 512  # tokens of a context that are read at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--texts", nargs="+", type=Path, required=True, help="files of plain text")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--pieces", type=int, default=2, help="of each text")
    parser.add_argument("--tokens", type=int, default=1024, help="of a piece")
    parser.add_argument("--context", type=int, default=4000, help="tokens before the forwards that are timed")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8], help="of these forwards")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS / "kv_dtype.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in options.dtypes:
        models = {name: load_model(options.model, dtype=dtype, kv_dtype=name) for name in ("auto", "int8")}
        ids = [read_text(models["auto"], each) for each in options.texts]
        found = {
            "model": options.model,
            "dtype": dtype,
            "texts": [each.name for each in options.texts],
            **distances(models, ids, options.pieces, options.tokens),
            **times(models, torch.cat(ids), options.context, options.rows, options.turns),
            "machine": machine_facts(),
        }
        Lines(options.out).add(found)
        print(json.dumps(found))


def read_text(model: LanguageModel, text: Path) -> Tensor:
    assert model.tokenizer is not None
    return torch.tensor(model.tokenizer.encode(text.read_text(encoding="utf-8")[: 1 << 16]))


def distances(models: dict[str, LanguageModel], ids: Sequence[Tensor], pieces: int, tokens: int) -> dict[str, Any]:
    read = [each[at * tokens : (at + 1) * tokens] for each in ids for at in range(pieces)]
    expected = [log_probabilities(models["auto"], piece) for piece in read]
    ways = {
        name: compared([log_probabilities(model, piece) for piece in read], expected, read)
        for name, model in models.items()
    }
    return {"pieces": len(read), "tokens": tokens, **{f"kv {name}": way for name, way in ways.items()}}


@torch.inference_mode()
def times(
    models: dict[str, LanguageModel], ids: Tensor, context: int, rows: Sequence[int], turns: int
) -> dict[str, Any]:
    """Median milliseconds of a forward, by rows and way, after so many tokens, and bytes of a token in the cache."""
    caches = {name: read(model, ids[:context]) for name, model in models.items()}
    found: dict[str, dict[str, float]] = {}
    for count in rows:
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for turn in range(turns + 2):
            for name in list(models)[:: 1 if turn % 2 else -1]:
                segment = Segment(caches[name], ids[:count], chain_shape(count), range(count))
                began = time.thread_time()
                models[name].forward([segment])
                if turn > 1:
                    seconds[name].append(time.thread_time() - began)
                caches[name].rollback(caches[name].length)
        found[str(count)] = {name: round(1e3 * statistics.median(own), 3) for name, own in seconds.items()}
    bytes_of_token = {name: cache.n_bytes // cache.capacity for name, cache in caches.items()}
    return {"context": len(ids[:context]), "turns": turns, "forward_ms": found, "bytes_of_a_token": bytes_of_token}


def read(model: LanguageModel, ids: Tensor) -> RequestCache:
    cache = model.new_cache()
    for part in ids.split(_PART):
        model.forward([Segment(cache, part, chain_shape(len(part)), (), prompt=len(part))])
        cache.commit(range(len(part)))
    return cache


if __name__ == "__main__":
    main()
