"""How far a quantised file's distributions, as they are run here, lie from those of the same file made numbers.

The reference is the file dequantised to float32, run by transformers' own modules. Beside it: the file's codes by the
native forward in both dtypes, which quantises inputs of products to 8 bits, and the dequantised weights rounded to
bfloat16, as a Hugging Face folder of them would be run. Every text is read in pieces of so many tokens, each from an
empty cache. llama.cpp's perplexity of the same pieces stands beside ours where its environment is there. Adds a line
of JSON for each file.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import RESULTS, Lines
from truedraft import load_model
from truedraft.core.tree import chain_shape
from truedraft.machine import machine_facts
from truedraft.models.base import LanguageModel, Segment

REFERENCE = "dequantised, float32"
WAYS: dict[str, dict[str, Any]] = {
    REFERENCE: {"dtype": "float32", "fast_paths": False},
    "codes, float32": {"dtype": "float32"},
    "codes, bfloat16": {"dtype": "bfloat16"},
    "dequantised, bfloat16": {"dtype": "bfloat16", "fast_paths": False},
}
_TYPES = ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="GGUF files")
    parser.add_argument("--texts", nargs="+", type=Path, required=True, help="files of plain text")
    parser.add_argument("--pieces", type=int, default=2, help="of each text")
    parser.add_argument("--tokens", type=int, default=256, help="of a piece")
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="the first is always among them"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "quantised_weights.jsonl")
    options = parser.parse_args()
    for file in options.files:
        found = measure(file, options.texts, options.pieces, options.tokens, options.ways)
        Lines(options.out).add(found)
        print(json.dumps(found))


def measure(
    file: Path, texts: Sequence[Path], pieces: int, tokens: int, names: Sequence[str] = tuple(WAYS)
) -> dict[str, Any]:
    """What `main` writes of a file: by way mean and largest KL divergence from the reference, and perplexity."""
    reference = load_model(file, **WAYS[REFERENCE])
    assert reference.tokenizer is not None
    ids = [reference.tokenizer.encode(text.read_text(encoding="utf-8")[: 8 * pieces * tokens]) for text in texts]
    read = [torch.tensor(each[at * tokens : (at + 1) * tokens]) for each in ids for at in range(pieces)]
    expected = [log_probabilities(reference, piece) for piece in read]
    ways: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys((REFERENCE, *names)):
        model = reference if name == REFERENCE else load_model(file, **WAYS[name])
        ways[name] = compared([log_probabilities(model, piece) for piece in read], expected, read)
        ways[name] |= {"fast_paths": model.fast_paths, "weight_bytes": model.weight_bytes}
        del model
    return {
        "file": file.name,
        "types": shares(file),
        "texts": [text.name for text in texts],
        "pieces": len(read),
        "tokens": tokens,
        "ways": ways,
        "llama.cpp": by_llamacpp(file, read),
        "machine": machine_facts(),
    }


def shares(file: Path) -> dict[str, float]:
    from gguf import GGUFReader  # here and below: peers_ours.py measures memory over what it imports of this file

    held: Counter[str] = Counter()
    for tensor in GGUFReader(file).tensors:
        if len(tensor.shape) > 1:
            held[tensor.tensor_type.name] += int(tensor.n_elements)
    return {kind: count / held.total() for kind, count in held.most_common()}


def by_llamacpp(file: Path, read: Sequence[Tensor]) -> dict[str, float] | None:
    from peers_engines import llamacpp_surprise
    from servers import LLAMA_CPP

    if not (LLAMA_CPP / "build").exists():
        return None
    surprise = llamacpp_surprise(file, [piece.tolist() for piece in read], torch.get_num_threads())
    return {"perplexity": math.exp(surprise)}


@torch.inference_mode()
def log_probabilities(model: LanguageModel, ids: Tensor) -> Tensor:
    cache = model.new_cache()
    try:
        logits = model.forward([Segment(cache, ids, chain_shape(len(ids)), range(len(ids)))]).logits
    finally:
        model.release_cache(cache)
    return logits.float().log_softmax(-1)


def compared(found: Sequence[Tensor], expected: Sequence[Tensor], read: Sequence[Tensor]) -> dict[str, float]:
    """Divergences of distributions behind every token, and the perplexity of tokens behind the first of a piece."""
    divergences, surprise, same = [], [], []
    for mine, exact, ids in zip(found, expected, read, strict=True):
        divergences.append((exact.exp() * (exact - mine)).sum(-1))
        surprise.append(-mine[:-1].gather(1, ids[1:, None]))
        same.append(mine.argmax(-1) == exact.argmax(-1))
    kl = torch.cat(divergences)
    return {
        "mean_kl": kl.mean().item(),
        "largest_kl": kl.max().item(),
        "perplexity": math.exp(torch.cat(surprise).mean().item()),
        "same_likeliest": torch.cat(same).float().mean().item(),
    }


if __name__ == "__main__":
    main()
