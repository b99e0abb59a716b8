"""EAGLE-3 and P-EAGLE heads as other projects publish them: EAGLE, SGLang and SpecForge, and `speculators`.

Both are a `config.json` with tensors beside it. The former is a flat Llama configuration with `draft_vocab_size`, its
layer is `midlayer`, and the embedding is the target's. The latter nests the layer's configuration in
`transformer_layer_config`, calls the layer `layers.0`, brings copies of the target's embedding and LM head, and counts
positions from 1. Both number the layers that are read by what enters them: 2 is what layer 1 gives. `d2t` is an offset,
not an id: the draft's token j is the target's token j + d2t[j].

Only tensors are read, no code that a file may hold. Neither says for which weights of a target its head is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from truedraft.errors import ModelError, ModelNotFoundError, OptionError
from truedraft.files import object_of
from truedraft.heads.base import HeadRecord, tensors_in, write_published
from truedraft.heads.eagle import Eagle3Config, Eagle3Head
from truedraft.heads.peagle import PEagleConfig, PEagleHead

_CONFIG = "config.json"
_FILES = ("model.safetensors", "pytorch_model.bin")
_AGAIN = "fetch the file again"
_FLAT = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_NESTED = {Eagle3Head.kind: "eagle3", PEagleHead.kind: "peagle"}
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
    nested = config.get("speculators_model_type") in _NESTED.values()
    return nested or any(each in _FLAT for each in architectures)


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
    said = object_of(path / _CONFIG).get("speculators_model_type", "eagle3")
    other = next((each for each in (Eagle3Head, PEagleHead) if _NESTED[each.kind] == said), kind)
    if other.kind != kind.kind:
        raise ModelError(f"{str(path)!r} holds {other.noun}, not {kind.noun}; use {other.kind}:{path}")
    file = next((path / name for name in _FILES if (path / name).is_file()), None)
    if file is None:
        raise ModelNotFoundError(f"{str(path)!r} has neither {' nor '.join(_FILES)}; fetch one of them")
    weights = {name.removeprefix("model."): each for name, each in tensors_in(file, _AGAIN).items()}
    weights = {
        name.replace("layers.0.", "midlayer.", 1): each
        for name, each in weights.items()
        if not name.startswith("verifier_")  # copies of the target's own, to train with
    }
    config = _sizes(path / _CONFIG, weights, kind)
    if ids_in_d2t and "d2t" in weights:
        weights["d2t"] = weights["d2t"] - torch.arange(len(weights["d2t"]))
    ids = draft_ids_of(config, weights, file)
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


def _sizes(path: Path, weights: Mapping[str, Tensor], kind: type[Eagle3Head]) -> Eagle3Config:
    """What config.json says, and what only the names of the weights do.

    Raises:
        ModelError: it says too little, or what makes no head.
    """
    record = object_of(path)
    nested = "speculators_model_type" in record
    layer: dict[str, Any] = record.get("transformer_layer_config", {}) if nested else record
    own = record.get("eagle_config") or {}
    numbers = record.get("eagle_aux_hidden_state_layer_ids") or own.get("eagle_aux_hidden_state_layer_ids") or ()
    methods = (record.get("speculators_config") or {}).get("proposal_methods")
    try:
        if layer.get("hidden_act", "silu") != "silu":
            raise OptionError(f"its activation is {layer['hidden_act']!r}, and such heads have silu")
        if record.get("target_hidden_size") not in (None, layer["hidden_size"]):
            raise OptionError(f"it is {layer['hidden_size']} wide, and its target {record['target_hidden_size']}")
        rope = layer.get("rope_parameters") or (layer.get("rope_scaling") or {"rope_type": "default"})
        more = {"mask_token": record["mask_token_id"]} if kind.sizes is PEagleConfig else {}
        made: Eagle3Config = kind.sizes(
            **{ours: layer[theirs] for theirs, ours in _SIZES.items()},
            head=layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"],
            vocab_size=layer["vocab_size"],
            layers=tuple(number - 1 for number in numbers),
            draft_vocab=record.get("draft_vocab_size") or 0 if "d2t" in weights else 0,
            reach=methods[0]["speculative_tokens"] if methods else 5,
            norm_before_residual=bool(record.get("norm_before_residual", False)),
            norm_before_fc=bool(record.get("norm_before_fc", False)),
            fc_norm=bool(record.get("fc_norm", False)),
            norm_output=bool(record.get("norm_output", False)),
            query_norms="midlayer.self_attn.q_norm.weight" in weights,
            own_output="lm_head.weight" in weights,
            own_embedding="embed_tokens.weight" in weights,
            rope_start=int(record.get("speculators_model_type") == "eagle3"),
            rope={"rope_theta": layer.get("rope_theta", 10000.0), **rope},
            most_positions=layer.get("max_position_embeddings", 4096),
            eps=layer.get("rms_norm_eps", 1e-6),
            more_layers=layer.get("num_hidden_layers", 1) - 1 if nested else 0,
            **more,
        )
        return made
    except KeyError as error:
        raise ModelError(f"{str(path)!r} does not name {error.args[0]!r}; fetch it again") from error
    except (TypeError, ZeroDivisionError, OptionError) as error:
        raise ModelError(f"{str(path)!r} names sizes that make no head ({error}); fetch it again") from error


def draft_ids_of(config: Any, weights: dict[str, Tensor], file: Path) -> Tensor | None:
    """The target's ids of the draft's, `[draft_vocab]`, from offsets; takes both tables from the weights.

    The configuration has `draft_vocab` and `vocab_size`.

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
    unlike = config.norm_before_residual or config.norm_before_fc or config.more_layers
    if config.rope_start or not config.own_output or unlike or head.kind != Eagle3Head.kind:
        raise ModelError(
            "this format is of heads of one layer with an LM head of their own, whose positions count from 0 and whose "
            "vectors are normed behind fc alone; keep this head in truedraft's own folder"
        )
    about = _layer_of(config) | {
        "architectures": list(_FLAT[:1]),
        "draft_vocab_size": config.draft_vocab or config.vocab_size,
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": None if config.rope["rope_type"] == "default" else dict(config.rope),
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "target_model": target,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.layers]},
    }
    write_published(folder, _weights_of(head), about)


def write_speculators_folder(head: Eagle3Head, folder: Path, *, target: str = "", family: str = "") -> None:
    """Write a head, EAGLE-3's or P-EAGLE's, as `speculators` and vLLM read it, in the dtype of its weights.

    Positions of EAGLE-3 count from 1 there; a rotation sees their differences alone, so a head that counts from 0
    drafts the same. An embedding that the head has not is the target's, which `speculators` looks for at `target`.

    Args:
        head: with an LM head of its own.
        folder: of its files, made if need be.
        target: a folder or a hub name of the target; without one `speculators` does not load the folder.
        family: the target's class, such as "LlamaForCausalLM".

    Raises:
        ModelError: the format has no place for something that the head has, or the files cannot be written.
    """
    config = head.config
    if not config.own_output or not config.layers:
        raise ModelError("this format is of heads with an LM head of their own that name the layers they read")
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": config.reach, "verifier_accept_k": 1, "accept_tolerance": 0.0,
    }  # fmt: skip
    about = {
        "architectures": ["PEagleSpeculator" if isinstance(config, PEagleConfig) else "Eagle3Speculator"],
        "speculators_model_type": _NESTED[head.kind],
        "speculators_version": "0.9.0",
        "transformer_layer_config": _layer_of(config) | {"rope_parameters": dict(config.rope)},
        "draft_vocab_size": config.draft_vocab or config.vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.layers],
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": _NESTED[head.kind],
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target or None, "architectures": [family] if family else []},
        },
    }
    if isinstance(config, PEagleConfig):
        about |= {"mask_token_id": config.mask_token, "embed_requires_grad": True}
    weights = {name.replace("midlayer.", "layers.0.", 1): each for name, each in _weights_of(head).items()}
    write_published(folder, weights, about)


def _layer_of(config: Eagle3Config) -> dict[str, Any]:
    """The layer's own configuration, of transformers' families."""
    return {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()} | {
        "model_type": "qwen3" if config.query_norms else "llama",
        "num_hidden_layers": 1 + config.more_layers,
        "head_dim": config.head,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.most_positions,
        "rms_norm_eps": config.eps,
        "tie_word_embeddings": False,
    }


def _weights_of(head: Eagle3Head) -> dict[str, Tensor]:
    """The head's weights, with both tables where it guesses among fewer ids."""
    weights = {name: weight for name, weight in head.state_dict().items() if name != "draft_ids"}
    if head.draft_ids is not None:
        weights["d2t"] = head.draft_ids - torch.arange(len(head.draft_ids))
        weights["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill_(0, head.draft_ids, True)
    return weights
