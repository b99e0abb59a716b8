"""Medusa heads of other projects: the original Medusa project's, and vLLM's.

The original project writes `medusa_lm_head.pt`, a state dict: `{i}.{j}.linear.weight` and `.bias` of block j of head i,
and `{i}.{layers}.weight` of the head's own output, sometimes all with the prefix `medusa_head.`. Its config.json names
the target's folder or hub name; its number of heads is unreliable, so sizes come from the weights.

vLLM reads a `config.json` of model_type "medusa", and `model.safetensors`. `blocks.{i}.layers.{j}.weight` is block j of
head i, with a bias if `medusa_fc_bias` is true. Each head ends in `lm_heads.{i}.weight`, or all in one `lm_head.weight`
if `original_lm_head` is true; `token_map` holds the ids of a reduced vocabulary. Neither identifies the target's
weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from truedraft.core.rank_tree import RankTree
from truedraft.drafters.exporting import Exports, ExportTarget, Way
from truedraft.drafters.heads.head import (
    FETCH_AGAIN,
    HeadRecord,
    published_tensors,
    reading_sizes,
    tensors_in,
    unnamed_target,
    write_published,
)
from truedraft.errors import ModelError, OptionError
from truedraft.files import object_of
from truedraft.kinds import INSTEAD
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads

_CONFIG, _TYPE, _ORIGINAL = "config.json", "medusa", "medusa_lm_head.pt"
_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
_ONE = ("lm_head.weight", "lm_heads.0.weight")  # names of the output that all heads share
_MAP = "token_map"

# The rank paths of the Medusa project's "mc_sim_7b_63", in its order.
_PUBLISHED = """
0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 011
006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
"""


def published_tree() -> RankTree:
    """The tree of 63 nodes, 4 deep, that the original project counted for its 7B model."""
    return RankTree(tuple(tuple(map(int, path)) for path in _PUBLISHED.split()))


def kind_in(path: Path) -> str | None:
    """The kind of heads in a path; None if it has none."""
    return MedusaHeads.kind if _is_original(path) or _is_vllm(path) else None


def load_published(path: Path, kind: type[MedusaHeads], *, ids_in_d2t: bool = False) -> MedusaHeads | None:
    """Load heads in one of these formats; None if there are none. Raises `ModelError` for damaged or other files."""
    if _is_original(path):
        return _load_original(path / _ORIGINAL if path.is_dir() else path, kind)
    return _load_vllm(path, kind) if _is_vllm(path) else None


def _is_original(path: Path) -> bool:
    return (path.is_file() and path.suffix == ".pt") or (path.is_dir() and (path / _ORIGINAL).is_file())


def _is_vllm(path: Path) -> bool:
    return object_of(path / _CONFIG).get("model_type") == _TYPE


def _load_original(file: Path, kind: type[MedusaHeads]) -> MedusaHeads:
    """With their own outputs, and the published tree as far as they reach."""
    tensors = tensors_in(file, "name a file of the original Medusa project")
    state = {name.removeprefix("medusa_head."): weight for name, weight in tensors.items()}
    outputs = {int(match[1]): int(match[2]) for match in map(_OUTPUT.fullmatch, state) if match}
    layers = next(iter(outputs.values()), 0)
    if set(outputs.values()) != {layers} or layers < 1:
        raise ModelError(f"{str(file)!r} holds no Medusa heads, each with an output; name a file of that project")
    shape = next(weight.shape for name, weight in state.items() if _OUTPUT.fullmatch(name))
    config = MedusaConfig(shape[-1], shape[0], heads=len(outputs), layers=layers, tied=False)
    heads = kind.with_weights(config, state, file, _names(config, "{0}.{1}.linear", f"{{}}.{layers}.weight"))
    name = str(object_of(file.parent / _CONFIG).get("base_model_name_or_path", ""))
    tree = published_tree().within(heads.reach, 1 << 30)
    note = unnamed_target(f"{file.name} is of the original Medusa project and", name or "no target")
    heads.record = HeadRecord(name, trees={"greedy": tree, "sampled": tree}, note=note)
    return heads


def _load_vllm(path: Path, kind: type[MedusaHeads]) -> MedusaHeads:
    file, tensors = published_tensors(path)
    weights = {name.replace("medusa_heads.", ""): each for name, each in tensors.items()}
    record = object_of(path / _CONFIG)
    with reading_sizes(path / _CONFIG):
        vocab, guessed = record["vocab_size"], record.get("truncated_vocab_size")
        if record.get("logit_scale", 1.0) != 1.0:
            raise OptionError(f"its logits are scaled by {record['logit_scale']}, which these heads are not")
        config = MedusaConfig(
            width=record["hidden_size"],
            vocab_size=vocab,
            heads=record["num_heads"],
            layers=record["num_hidden_layers"],
            tied=False,
            draft_vocab=0 if guessed in (None, vocab) else guessed,
        )
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
    heads.record = HeadRecord(note=unnamed_target(f"{file.name} in {str(path)!r}"))
    return heads


def _names(
    config: MedusaConfig, block: str = "blocks.{}.layers.{}", output: str = "lm_heads.{}.weight"
) -> dict[str, str]:
    """`blocks.0.layers.1.bias` is `heads.0.blocks.1.linear.bias`."""
    names = {output.format(head): f"heads.{head}.output.weight" for head in range(config.heads)}
    for head, number, part in product(range(config.heads), range(config.layers), ("weight", "bias")):
        names[f"{block.format(head, number)}.{part}"] = f"heads.{head}.blocks.{number}.linear.{part}"
    return names


def _check_map(weights: Mapping[str, Tensor], config: MedusaConfig, file: Path) -> None:
    ids = weights.get(_MAP)
    if ids is None:
        raise ModelError(f"{str(file)!r} lacks {_MAP}, the ids of its truncated vocabulary; {FETCH_AGAIN}")
    whole = ids.shape == (config.draft_vocab,) and ids.dtype is torch.int64
    if not whole or int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) < len(ids):
        raise ModelError(
            f"{_MAP} in {str(file)!r} does not name {config.draft_vocab} different ids below {config.vocab_size}; "
            f"{FETCH_AGAIN}"
        )


def write_vllm_medusa(heads: MedusaHeads, folder: Path, target: ExportTarget) -> None:
    """Write heads as vLLM reads them, in the dtype of their weights; tied ones with the target's LM head.

    Raises `ModelError` for unsupported heads, or if writing fails.
    """
    config, state = heads.config, heads.state_dict()
    lm_head = target.lm_head(heads) if config.tied and not config.reads_token else None
    if config.reads_token or (config.tied and lm_head is None):
        raise ModelError(
            "vLLM's Medusa heads read no tokens, and need the target's LM head for those that end in it; train "
            "heads that read only vectors, or name the target"
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


MEDUSA = Exports({"vllm": Way("medusa", write_vllm_medusa)}, {"": INSTEAD})
