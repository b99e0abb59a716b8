"""A model under another tokenizer, made of the model itself: what assistants with tokenizers of their own are tried on.

The last merges are left out with their tokens, ids are shuffled, and tokens are added that nobody else has. Where text
splits alike, the new model says what the old one said.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from truedraft.errors import ModelError

_WEIGHTS = "model.safetensors"
_ROWS = ("model.embed_tokens.weight", "lm_head.weight")


def save_relabelled(folder: Path, out: Path, *, dropped: int = 0, added: int = 2, seed: int = 0) -> Path:
    """Write a model with a byte-level BPE tokenizer again, under another one.

    Args:
        folder: of the model, with `tokenizer.json` and one safetensors file.
        out: folder that is made.
        dropped: merges left out, from the last on, with their tokens.
        added: tokens that only the new tokenizer has; no text is split into them.
        seed: of the shuffled ids.

    Raises:
        ModelError: the folder lacks these files, or its tokenizer merges nothing that could be left out.
    """
    for name in (_WEIGHTS, "tokenizer.json", "config.json"):
        if not (folder / name).is_file():
            raise ModelError(f"{folder} has no {name}; export the model in one file, with its tokenizer")
    words = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    merges = words["model"]["merges"]
    if dropped > len(merges):
        raise ModelError(f"the tokenizer of {folder} has {len(merges)} merges, so {dropped} cannot be left out")
    kept = merges[: len(merges) - dropped]
    gone = {_merged(pair) for pair in merges[len(kept) :]} - {_merged(pair) for pair in kept}
    old = {token: number for token, number in words["model"]["vocab"].items() if token not in gone}
    new = {f"<|only-here-{number}|>": 0 for number in range(added)} | old
    order = list(range(len(new)))
    random.Random(seed).shuffle(order)
    new = dict(zip(new, order, strict=True))
    words["model"] |= {"vocab": dict(sorted(new.items(), key=lambda item: item[1])), "merges": kept}
    for token in words["added_tokens"]:
        token["id"] = new[token["content"]]
    shutil.copytree(folder, out, dirs_exist_ok=True)
    (out / "tokenizer.json").write_text(json.dumps(words, ensure_ascii=False), encoding="utf-8")
    _relabel_ids(out, {number: new[token] for token, number in old.items()}, len(new))
    _relabel_rows(out, [old.get(token, 0) for token in sorted(new, key=new.__getitem__)])
    return out


def _merged(pair: str | Sequence[str]) -> str:
    return "".join(pair.split(" ")) if isinstance(pair, str) else "".join(pair)


def _relabel_ids(out: Path, ids: Mapping[int, int], vocab_size: int) -> None:
    """Special ids of the model's and of generate's configuration."""
    for name in ("config.json", "generation_config.json"):
        path = out / name
        if not path.is_file():
            continue
        config: dict[str, Any] = json.loads(path.read_text())
        for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = config.get(field)
            if value is not None:
                config[field] = [ids[one] for one in value] if isinstance(value, list) else ids[value]
        if "vocab_size" in config:
            config["vocab_size"] = vocab_size
        path.write_text(json.dumps(config, indent=2))


def _relabel_rows(out: Path, rows: Sequence[int]) -> None:
    weights = load_file(out / _WEIGHTS)
    for name in _ROWS:
        if name in weights:
            weights[name] = weights[name][torch.tensor(rows)].contiguous()
    save_file(weights, out / _WEIGHTS, metadata={"format": "pt"})
