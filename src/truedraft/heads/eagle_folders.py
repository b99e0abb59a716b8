"""EAGLE-3 heads as other projects publish them: those of EAGLE, SGLang and SpecForge, and those of `speculators`.

Both are a `config.json` with tensors beside it. The former is a flat Llama configuration with `draft_vocab_size`, its
layer is `midlayer`, and the embedding is the target's. The latter nests the layer's configuration in
`transformer_layer_config`, calls the layer `layers.0`, brings copies of the target's embedding and LM head, and counts
positions from 1. Both number the layers that are read by what enters them: 2 is what layer 1 gives. `d2t` is an offset,
not an id: the draft's token j is the target's token j + d2t[j].

Only tensors are read, no code that a file may hold. Neither says for which weights of a target its head is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from truedraft.errors import ModelError, ModelNotFoundError, OptionError
from truedraft.files import object_of
from truedraft.heads.base import HeadRecord, tensors_in
from truedraft.heads.eagle import Eagle3Config, Eagle3Head

_CONFIG = "config.json"
_FILES = ("model.safetensors", "pytorch_model.bin")
_AGAIN = "fetch the file again"
_FLAT = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_NESTED = "eagle3"
_SIZES = {
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "inner",
}
_Eagle3 = TypeVar("_Eagle3", bound=Eagle3Head)


def is_eagle_folder(path: Path) -> bool:
    """Whether a folder's config.json says that it is of one of these projects."""
    config = object_of(path / _CONFIG)
    architectures = config.get("architectures") or ()
    return config.get("speculators_model_type") == _NESTED or any(each in _FLAT for each in architectures)


def load_eagle_folder(path: Path, kind: type[_Eagle3], *, ids_in_d2t: bool = False) -> _Eagle3:
    """A head of one of these projects.

    Args:
        path: the folder.
        kind: of ours.
        ids_in_d2t: read a table of ids in place of one of offsets, as damaged folders have it.

    Raises:
        ModelNotFoundError: there are no weights.
        ModelError: a file is damaged, or the weights are not those that config.json names.
    """
    file = next((path / name for name in _FILES if (path / name).is_file()), None)
    if file is None:
        raise ModelNotFoundError(f"{str(path)!r} has neither {' nor '.join(_FILES)}; fetch one of them")
    weights = {name.removeprefix("model."): each for name, each in tensors_in(file, _AGAIN).items()}
    weights = {
        name.replace("layers.0.", "midlayer.", 1): each
        for name, each in weights.items()
        if not name.startswith("verifier_")  # copies of the target's own, to train with
    }
    config = _sizes(path / _CONFIG, weights)
    if ids_in_d2t and "d2t" in weights:
        weights["d2t"] = weights["d2t"] - torch.arange(len(weights["d2t"]))
    ids = _draft_ids(config, weights, file)
    if ids is not None:
        weights["draft_ids"] = ids
    head = kind.with_weights(config, weights, file, None)
    record = object_of(path / _CONFIG)
    verifier = (record.get("speculators_config") or {}).get("verifier") or {}
    name = str(verifier.get("name_or_path") or "")
    head.record = HeadRecord(
        name,
        note=f"{file.name} in {str(path)!r} does not say which weights it was trained for ({name or 'no target'} by "
        "name); it is used because its sizes fit",
    )
    return head


def _sizes(path: Path, weights: Mapping[str, Tensor]) -> Eagle3Config:
    """What config.json says, and what only the names of the weights do.

    Raises:
        ModelError: it says too little, or what makes no head.
    """
    record = object_of(path)
    nested = record.get("speculators_model_type") == _NESTED
    layer: dict[str, Any] = record.get("transformer_layer_config", {}) if nested else record
    own = record.get("eagle_config") or {}
    numbers = record.get("eagle_aux_hidden_state_layer_ids") or own.get("eagle_aux_hidden_state_layer_ids") or ()
    try:
        if layer.get("hidden_act", "silu") != "silu":
            raise OptionError(f"its activation is {layer['hidden_act']!r}, and such heads have silu")
        if record.get("target_hidden_size") not in (None, layer["hidden_size"]):
            raise OptionError(f"it is {layer['hidden_size']} wide, and its target {record['target_hidden_size']}")
        rope = layer.get("rope_parameters") or (layer.get("rope_scaling") or {"rope_type": "default"})
        return Eagle3Config(
            **{ours: layer[theirs] for theirs, ours in _SIZES.items()},
            head=layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"],
            vocab_size=layer["vocab_size"],
            layers=tuple(number - 1 for number in numbers),
            draft_vocab=record.get("draft_vocab_size") or 0 if "d2t" in weights else 0,
            norm_before_residual=bool(record.get("norm_before_residual", False)),
            norm_before_fc=bool(record.get("norm_before_fc", False)),
            fc_norm=bool(record.get("fc_norm", False)),
            norm_output=bool(record.get("norm_output", False)),
            query_norms="midlayer.self_attn.q_norm.weight" in weights,
            own_output="lm_head.weight" in weights,
            own_embedding="embed_tokens.weight" in weights,
            rope_start=int(nested),
            rope={"rope_theta": layer.get("rope_theta", 10000.0), **rope},
            most_positions=layer.get("max_position_embeddings", 4096),
            eps=layer.get("rms_norm_eps", 1e-6),
        )
    except KeyError as error:
        raise ModelError(f"{str(path)!r} does not name {error.args[0]!r}; fetch it again") from error
    except (TypeError, ZeroDivisionError, OptionError) as error:
        raise ModelError(f"{str(path)!r} names sizes that make no head ({error}); fetch it again") from error


def _draft_ids(config: Eagle3Config, weights: dict[str, Tensor], file: Path) -> Tensor | None:
    """The target's ids of the draft's, `[draft_vocab]`, from offsets; takes both tables from the weights.

    Worked example: offsets 3, 3, 5 are the ids 3, 4, 7.

    Raises:
        ModelError: they name no ids, one twice, or others than the target's side says.
    """
    offsets, known = weights.pop("d2t", None), weights.pop("t2d", None)
    if offsets is None:
        return None
    if offsets.shape != (config.draft_vocab,) or offsets.is_floating_point():
        raise ModelError(f"d2t in {str(file)!r} is no list of {config.draft_vocab} whole numbers; {_AGAIN}")
    ids = offsets.long() + torch.arange(len(offsets))
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) < len(ids)):
        raise ModelError(
            f"d2t in {str(file)!r} does not name {len(ids)} different ids below {config.vocab_size}: it holds offsets, "
            f"the draft's token j is the target's token j + d2t[j]; {_AGAIN}"
        )
    if known is not None and not torch.equal(known.bool().nonzero()[:, 0], ids.sort().values):
        raise ModelError(f"d2t and t2d in {str(file)!r} name different ids; {_AGAIN}")
    return ids


def write_eagle_folder(head: Eagle3Head, folder: Path, *, target: str = "") -> None:
    """Write a head as EAGLE, SGLang, SpecForge and vLLM read it, in the dtype of its weights.

    Args:
        head: that counts positions from 0.
        folder: of its files, made if need be.
        target: what the target is called.

    Raises:
        ModelError: the format has no place for something that the head has, or the files cannot be written.
    """
    config = head.config
    if config.rope_start or not config.own_output or config.norm_before_residual or config.norm_before_fc:
        raise ModelError(
            "this format is of heads with an LM head of their own, whose positions count from 0 and whose vectors are "
            "normed behind fc alone; keep this head in truedraft's own folder"
        )
    weights = {name: weight.contiguous() for name, weight in head.state_dict().items() if name != "draft_ids"}
    if head.draft_ids is not None:
        weights["d2t"] = head.draft_ids - torch.arange(len(head.draft_ids))
        weights["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, head.draft_ids, True)
    about: dict[str, Any] = {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}
    about |= {
        "architectures": list(_FLAT[:1]),
        "model_type": "llama",
        "num_hidden_layers": 1,
        "head_dim": config.head,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab or config.vocab_size,
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": None if config.rope["rope_type"] == "default" else dict(config.rope),
        "max_position_embeddings": config.most_positions,
        "rms_norm_eps": config.eps,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "tie_word_embeddings": False,
        "target_model": target,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.layers]},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / _FILES[0])
        (folder / _CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"cannot write the head into {str(folder)!r} ({error}); make room, or name another folder"
        ) from error
