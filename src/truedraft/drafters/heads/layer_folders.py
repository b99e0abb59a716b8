"""Folders of other projects with heads that have decoder layers: the shared part of EAGLE-3 and block drafters.

A `config.json` with tensors, some of them copies of the target's. If the draft has fewer ids, `d2t` is an offset: the
draft's token j is the target's token j + d2t[j]. No code in a file is run. No folder identifies its target's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from truedraft.drafters.exporting import ExportTarget
from truedraft.drafters.heads.head import (
    FETCH_AGAIN,
    HeadRecord,
    published_tensors,
    reading_sizes,
    unnamed_target,
    write_published,
)
from truedraft.drafters.heads.layers import LayerConfig, LayerHead, is_whole
from truedraft.errors import ModelError, OptionError
from truedraft.files import object_of

CONFIG = "config.json"
SPECULATORS = "speculators_model_type"
_SIZES = {
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "inner",
    "vocab_size": "vocab_size",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def kind_named(path: Path, kinds: Sequence[type[LayerHead]]) -> str | None:
    """The kind of head that a folder's config.json names; None if it names none of `kinds`."""
    found = _named(path, kinds)
    return None if found is None else found.kind


def _named(path: Path, kinds: Sequence[type[LayerHead]]) -> type[LayerHead] | None:
    record = object_of(path / CONFIG)
    word, names = record.get(SPECULATORS), record.get("architectures")
    names = names if isinstance(names, list) else []
    return next(
        (kind for kind in kinds if kind.speculators[0] == word),
        next((kind for kind in kinds if any(each in names for each in kind.architectures)), None),
    )


def load_layer_folder(
    path: Path,
    kind: type[LayerHead],
    kinds: Sequence[type[LayerHead]],
    sizes: Callable[[Mapping[str, Any], Mapping[str, Tensor]], LayerConfig],
    renamed: Callable[[str], str] = str,
    *,
    ids_in_d2t: bool,
) -> LayerHead | None:
    """Load a head of another project; None if the folder names none of `kinds`.

    Args:
        sizes: computes the sizes from config.json and the weights.
        renamed: maps a weight's name there to the name here.
        ids_in_d2t: read ids instead of offsets, as in damaged folders.

    Raises:
        ModelNotFoundError: there are no weights.
        ModelError: a file is damaged, it holds a head of another kind, or the weights do not match config.json.
    """
    found = _named(path, kinds)
    if found is None:
        return None
    if found is not kind:
        raise ModelError(f"{str(path)!r} holds {found.noun}, not {kind.noun}; use {found.kind}:{path}")
    file, tensors = published_tensors(path)
    weights = {name: each for there, each in tensors.items() if not (name := renamed(there)).startswith("verifier_")}
    record = object_of(path / CONFIG)
    with reading_sizes(path / CONFIG):
        config = sizes(record, weights)
        target = str(((record.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path") or "")
        if (ids := _draft_ids(config, weights, file, ids_in_d2t)) is not None:
            weights["draft_ids"] = ids
        head = kind.with_weights(config, weights, file)
        head.rotary(torch.zeros(1))
    head.record = HeadRecord(target, note=unnamed_target(f"{file.name} in {str(path)!r}", target or "no target"))
    return head


def layer_sizes(record: Mapping[str, Any], layer: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Entries of `LayerConfig` that all of these folders have, from the part `layer` about layers, and weights.

    Raises:
        KeyError: an entry is missing.
        OptionError: layers of another kind, or of another width than the target's.
    """
    if layer.get("hidden_act", "silu") != "silu":
        raise OptionError(f"its activation is {layer['hidden_act']!r}, and such heads have silu")
    for name in ("attention_bias", "qkv_bias", "mlp_bias", "quantization_config"):
        if value := record.get(name) or layer.get(name):
            raise OptionError(f"{name} is {value!r}, which is not supported")
    if (scale := record.get("logit_scale", 1.0)) != 1.0:
        raise OptionError(f"logit_scale is {scale!r}, and heads are read where it is 1.0")
    if record.get("target_hidden_size") not in (None, layer["hidden_size"]):
        raise OptionError(f"it is {layer['hidden_size']} wide, and its target {record['target_hidden_size']}")
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    older = rope.pop("type", "default")  # the older name
    return {
        **{ours: layer[theirs] for theirs, ours in _SIZES.items()},
        "head": layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"],
        "draft_vocab": record.get("draft_vocab_size") or 0 if "d2t" in weights else 0,
        "own_output": "lm_head.weight" in weights,
        "own_embedding": "embed_tokens.weight" in weights,
        "rope": {"rope_type": older, "rope_theta": layer.get("rope_theta", 10000.0), **rope},
        "most_positions": layer.get("max_position_embeddings", 4096),
        "eps": layer.get("rms_norm_eps", 1e-6),
        "windows": _windows(layer),
    }


def _windows(layer: Mapping[str, Any]) -> tuple[int, ...]:
    """The window of each layer, 0 where it sees all; () if all layers do."""
    count, window = layer.get("num_hidden_layers", 1), layer.get("sliding_window")
    slides = layer.get("use_sliding_window", window is not None)
    first = layer.get("max_window_layers", 0) if slides else count
    types = layer.get("layer_types") or [_FULL] * min(first, count) + [_SLIDING] * (count - first)
    if unknown := sorted({*types} - {_FULL, _SLIDING}):
        raise OptionError(f"its layers are of the type {unknown[0]!r}, and heads are read with {_FULL} and {_SLIDING}")
    if _SLIDING not in types:
        return ()
    if window is None or not is_whole(window, 1):
        raise OptionError(f"some of its layers are {_SLIDING}, and its sliding_window is {window!r}")
    return tuple(window if each == _SLIDING else 0 for each in types)


def _windows_record(config: LayerConfig) -> dict[str, Any]:
    """The windows of layers in transformers' format, {} without any; ModelError if it has no words for them."""
    sizes = sorted({*config.windows} - {0})
    if config.sink or len(sizes) > 1:
        raise ModelError(
            "this format has one window for all layers with one, which sees no first tokens beside it; keep this head "
            "in truedraft's own folder, or train one without --sink"
        )
    types = [_SLIDING if each else _FULL for each in config.windows]
    return {"layer_types": types, "sliding_window": sizes[0], "use_sliding_window": True} if sizes else {}


def _draft_ids(config: LayerConfig, weights: dict[str, Tensor], file: Path, ids_in_d2t: bool) -> Tensor | None:
    """The target's ids of the draft's, `[draft_vocab]`; removes both tables from the weights.

    Worked example: offsets 3, 3, 5 are the ids 3, 4, 7. Raises `ModelError` for invalid ids, or others than in `t2d`.
    """
    offsets, known = weights.pop("d2t", None), weights.pop("t2d", None)
    if offsets is None:
        return None
    if offsets.shape != (config.draft_vocab,) or offsets.is_floating_point():
        raise ModelError(f"d2t in {str(file)!r} is no list of {config.draft_vocab} whole numbers; {FETCH_AGAIN}")
    ids = offsets.long() if ids_in_d2t else offsets.long() + torch.arange(len(offsets))
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) < len(ids)):
        raise ModelError(
            f"d2t in {str(file)!r} does not name {len(ids)} different ids below {config.vocab_size}: it holds offsets, "
            f"the draft's token j is the target's token j + d2t[j]; {FETCH_AGAIN}"
        )
    if known is not None and not torch.equal(known.bool().nonzero()[:, 0], ids.sort().values):
        raise ModelError(f"d2t and t2d in {str(file)!r} name different ids; {FETCH_AGAIN}")
    return ids


def layer_record(config: LayerConfig, count: int, family: str) -> dict[str, Any]:
    """`count` layers in transformers' format."""
    return {
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "model_type": family,
        "num_hidden_layers": count,
        "head_dim": config.head,
        "hidden_act": "silu",
        "max_position_embeddings": config.most_positions,
        "rms_norm_eps": config.eps,
        "rope_parameters": dict(config.rope),
        "tie_word_embeddings": False,
        **_windows_record(config),
    }


def flat_record(config: LayerConfig, count: int, family: str) -> dict[str, Any]:
    """Also for transformers before 5, which has other names for the rotation."""
    scaling = None if config.rope["rope_type"] == "default" else dict(config.rope)
    rope = {"rope_theta": config.rope["rope_theta"], "rope_scaling": scaling}
    return layer_record(config, count, family) | rope


def speculators_record(word: str, reach: int, target: str, family: str) -> dict[str, Any]:
    """Entries that `speculators` needs in addition to the layers; `target` and its class may be ""."""
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": reach, "verifier_accept_k": 1, "accept_tolerance": 0.0,
    }  # fmt: skip
    return {
        SPECULATORS: word,
        "speculators_version": "0.9.0",
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": word,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target or None, "architectures": [family] if family else []},
        },
    }


def write_speculators(
    head: LayerHead, folder: Path, layers: Mapping[str, Any], more: Mapping[str, Any], target: ExportTarget
) -> None:
    """Write a head as `speculators` and vLLM read it, in the dtype of its weights; raises `ModelError` if that fails.

    `layers` is the configuration of its layers (`layer_record`).
    """
    word, architecture = head.speculators
    about = speculators_record(word, head.reach, target.name, target.family) | {
        "architectures": [architecture],
        "draft_vocab_size": head.config.draft_vocab or head.config.vocab_size,
        "transformer_layer_config": layers,
        **more,
    }
    weights = {name.replace("midlayer.", "layers.0.", 1): each for name, each in weights_of(head).items()}
    write_published(folder, weights, about)


def weights_of(head: LayerHead) -> dict[str, Tensor]:
    """With both id tables if the vocabulary is reduced."""
    weights = {name: weight for name, weight in head.state_dict().items() if name != "draft_ids"}
    if (ids := head.draft_ids) is not None:
        weights["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        known = torch.zeros(head.config.vocab_size, dtype=torch.bool, device=ids.device)
        weights["t2d"] = known.index_fill_(0, ids, True)
    return weights
