"""Medusa heads in vLLM's format: a `config.json` of model_type "medusa", and `model.safetensors`.

`blocks.{i}.layers.{j}.weight` is block j of head i, with a bias if `medusa_fc_bias` is true. Each head ends in
`lm_heads.{i}.weight`, or all in one `lm_head.weight` if `original_lm_head` is true. With `truncated_vocab_size` below
the vocabulary, `token_map` holds the ids of the reduced one. vLLM drafts a chain of the likeliest tokens; here the
heads get trees as all others do.

Only tensors are read, no code that a file may hold. The format does not identify the target's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from truedraft.drafters.heads.head import HeadRecord, tensors_in, write_published
from truedraft.errors import ModelError, ModelNotFoundError, OptionError
from truedraft.files import object_of
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.medusa.original import is_original, load_original

_CONFIG, _TYPE = "config.json", "medusa"
_FILES = ("model.safetensors", "pytorch_model.bin")
_AGAIN = "fetch the file again"
_PREFIX = "medusa_heads."
_ONE = ("lm_head.weight", "lm_heads.0.weight")  # names of the output that all heads share
_MAP = "token_map"
_Medusa = TypeVar("_Medusa", bound=MedusaHeads)


def kind_in(path: Path) -> str | None:
    """The kind of heads in a path of this format or of the original project; None if it is neither."""
    return MedusaHeads.kind if is_original(path) or is_vllm_medusa(path) else None


def load_published(path: Path, kind: type[_Medusa]) -> _Medusa | None:
    """Load heads in one of these two formats; None if there are none."""
    if is_original(path):
        return load_original(path, kind)
    return load_vllm_medusa(path, kind) if is_vllm_medusa(path) else None


def is_vllm_medusa(path: Path) -> bool:
    """Whether a folder's config.json is of this format."""
    return object_of(path / _CONFIG).get("model_type") == _TYPE


def load_vllm_medusa(path: Path, kind: type[_Medusa]) -> _Medusa:
    """Load heads in this format, with their own outputs.

    Raises:
        ModelNotFoundError: there are no weights.
        ModelError: a file is damaged, or the weights do not match config.json.
    """
    file = next((path / name for name in _FILES if (path / name).is_file()), None)
    if file is None:
        raise ModelNotFoundError(f"{str(path)!r} has neither {' nor '.join(_FILES)}; fetch one of them")
    weights = {name.replace(_PREFIX, ""): each for name, each in tensors_in(file, _AGAIN).items()}
    record = object_of(path / _CONFIG)
    config = _sizes(path / _CONFIG, record)
    if record.get("original_lm_head"):
        shared = [weights.pop(name) for name in _ONE if name in weights][:1]
        weights |= {f"lm_heads.{head}.weight": each.clone() for head in range(config.heads) for each in shared}
    names = _names(config)
    if config.draft_vocab:
        _check_map(weights, config, file)
        names[_MAP] = "draft_ids"
        for name, each in weights.items():
            if name in names and name.startswith("lm_heads.") and len(each) == config.vocab_size:  # whole ones get cut
                weights[name] = each[weights[_MAP]]
    if not record.get("medusa_fc_bias"):
        number = next((each.dtype for each in weights.values() if each.is_floating_point()), torch.float32)
        weights |= {name: torch.zeros(config.width, dtype=number) for name in names if name.endswith(".bias")}
    heads = kind.with_weights(config, weights, file, names)
    heads.record = HeadRecord(
        note=f"{file.name} in {str(path)!r} does not say which weights it was trained for; it is used because its "
        "sizes fit"
    )
    return heads


def _sizes(path: Path, record: Mapping[str, Any]) -> MedusaConfig:
    try:
        vocab, guessed = record["vocab_size"], record.get("truncated_vocab_size")
        if record.get("logit_scale", 1.0) != 1.0:
            raise OptionError(f"its logits are scaled by {record['logit_scale']}, which these heads are not")
        return MedusaConfig(
            width=record["hidden_size"],
            vocab_size=vocab,
            heads=record["num_heads"],
            layers=record["num_hidden_layers"],
            tied=False,
            draft_vocab=0 if guessed in (None, vocab) else guessed,
        )
    except KeyError as error:
        raise ModelError(f"{str(path)!r} does not name {error.args[0]!r}; fetch it again") from error
    except (TypeError, OptionError) as error:
        raise ModelError(f"{str(path)!r} names sizes that make no heads ({error}); fetch it again") from error


def _names(config: MedusaConfig) -> dict[str, str]:
    """Our names of their tensors: `blocks.0.layers.1.bias` is `heads.0.blocks.1.linear.bias`."""
    names = {f"lm_heads.{head}.weight": f"heads.{head}.output.weight" for head in range(config.heads)}
    for head, block, part in product(range(config.heads), range(config.layers), ("weight", "bias")):
        names[f"blocks.{head}.layers.{block}.{part}"] = f"heads.{head}.blocks.{block}.linear.{part}"
    return names


def _check_map(weights: Mapping[str, Tensor], config: MedusaConfig, file: Path) -> None:
    ids = weights.get(_MAP)
    if ids is None:
        raise ModelError(f"{str(file)!r} lacks {_MAP}, the ids of its truncated vocabulary; {_AGAIN}")
    whole = ids.shape == (config.draft_vocab,) and ids.dtype is torch.int64
    if not whole or int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) < len(ids):
        raise ModelError(
            f"{_MAP} in {str(file)!r} does not name {config.draft_vocab} different ids below {config.vocab_size}; "
            f"{_AGAIN}"
        )


def write_vllm_medusa(heads: MedusaHeads, folder: Path, *, lm_head: Tensor | None = None) -> None:
    """Write heads as vLLM reads them, in the dtype of their weights.

    Args:
        lm_head: `[vocab, width]`: the target's, for tied heads.

    Raises:
        ModelError: the format does not support these heads, or the files cannot be written.
    """
    config, state = heads.config, heads.state_dict()
    if config.reads_token or (config.tied and lm_head is None):
        raise ModelError(
            "vLLM's Medusa heads read no tokens, and the target's LM head lies beside those that end in it; train "
            "heads that read vectors alone, or name the target"
        )
    weights = {theirs: state[ours] for theirs, ours in _names(config).items() if ours in state}
    biases = any(bool(each.any()) for name, each in weights.items() if name.endswith(".bias"))
    if not biases:
        weights = {name: each for name, each in weights.items() if not name.endswith(".bias")}
    outputs = [weights[name] for name in weights if name.startswith("lm_heads.")]
    shared = all(torch.equal(each, outputs[0]) for each in outputs[1:])
    if shared:
        weights = {name: each for name, each in weights.items() if not name.startswith("lm_heads.")}
        weights[_ONE[0]] = outputs[0] if lm_head is None or outputs else lm_head.to(weights["blocks.0.layers.0.weight"])
    if heads.draft_ids is not None:
        weights[_MAP] = heads.draft_ids
    about = {
        "model_type": _TYPE,
        "architectures": ["MedusaModel"],
        "hidden_size": config.width,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab or config.vocab_size,
        "num_heads": config.heads,
        "num_hidden_layers": config.layers,
        "original_lm_head": shared,
        "medusa_fc_bias": biases,
    }
    write_published(folder, weights, about)
