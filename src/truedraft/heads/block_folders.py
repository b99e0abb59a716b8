"""Block drafters as other projects publish them: z-lab's DFlash, DeepSpec's DSpark, and both kinds of `speculators`.

All are a `config.json` with `model.safetensors` beside it, whose tensors are called as here. z-lab writes a flat
configuration of Qwen 3 with `dflash_config`; embedding and LM head are the target's. DeepSpec's is flat, too, with
copies of both. `speculators` nests the layers' configuration, from which it leaves out what Qwen 3 has by default, and
stores an LM head where the draft has fewer ids, with `d2t`, an offset: the draft's token j is the target's j + d2t[j].

z-lab and DeepSpec number the layers that are read by what they give, as it is done here; `speculators` by what enters
them, so 2 there is 1 here. What transformers shows of the last layer is normed, unlike what it gives: a head that reads
it is refused.

Only tensors are read, no code that a file may hold. None says for which weights of a target its head is.
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
from truedraft.heads.block import BlockConfig, BlockHead, DFlashHead, DSparkHead
from truedraft.heads.eagle_folders import draft_ids_of

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_AGAIN = "fetch the file again"
_SPECULATORS = "speculators_model_type"
_ARCHITECTURES: Mapping[str, type[BlockHead]] = {
    "DFlashDraftModel": DFlashHead,
    "Qwen3DSparkModel": DSparkHead,
}
_NESTED: Mapping[str, type[BlockHead]] = {"dflash": DFlashHead, "dspark": DSparkHead}
_SIZES = {
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head",
    "intermediate_size": "inner",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "most_positions",
    "rms_norm_eps": "eps",
}
_QWEN3 = {  # what transformers leaves out of a configuration, for it is so by default
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
    "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
}  # fmt: skip
_Block = TypeVar("_Block", bound=BlockHead)


def published_kind(path: Path) -> type[BlockHead] | None:
    """The kind of a block drafter that a folder of one of these projects says it holds; None: it is of none."""
    config = object_of(path / _CONFIG)
    named = [_ARCHITECTURES[each] for each in config.get("architectures") or () if each in _ARCHITECTURES]
    return _NESTED.get(config.get(_SPECULATORS, ""), named[0] if named else None)


def load_block_folder(path: Path, kind: type[_Block]) -> _Block:
    """A head of one of these projects.

    Raises:
        ModelNotFoundError: there are no weights.
        ModelError: a file is damaged, it holds a head of another kind, or the weights are not those that config.json
            names.
    """
    found, file = published_kind(path), path / _WEIGHTS
    if found is not None and found is not kind:
        raise ModelError(f"{str(path)!r} holds {found.noun}, not {kind.noun}; use {found.kind}:{path}")
    if not file.is_file():
        raise ModelNotFoundError(f"{str(path)!r} has no {_WEIGHTS}; fetch it")
    record = object_of(path / _CONFIG)
    weights = {
        name: each
        for name, each in tensors_in(file, _AGAIN).items()
        if not name.startswith("verifier_")  # copies of the target's own, to train with
    }
    config = _sizes(path / _CONFIG, record, weights, kind)
    ids = draft_ids_of(config, weights, file)
    if ids is not None:
        weights["draft_ids"] = ids
    head = kind.with_weights(config, weights, file)
    name = str(((record.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path") or "")
    note = (
        f"{file.name} in {str(path)!r} does not say which weights it was trained for ({name or 'no target'} by name); "
        "it is used because its sizes fit"
    )
    head.record = HeadRecord(name, note=note)
    return head


def _sizes(path: Path, record: Mapping[str, Any], weights: Mapping[str, Tensor], kind: type[BlockHead]) -> BlockConfig:
    """What config.json says, and what only the names of the weights do.

    Raises:
        ModelError: it says too little, or what makes no head of ours.
    """
    nested = _SPECULATORS in record
    try:
        layer: dict[str, Any] = _QWEN3 | record["transformer_layer_config"] if nested else dict(record)
        _refuse_other_layers(layer)
        if record.get("target_hidden_size") not in (None, layer["hidden_size"]):
            raise OptionError(f"it is {layer['hidden_size']} wide, and its target {record['target_hidden_size']}")
        named = {**record, **(record.get("dflash_config") or {})}
        rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
        kind_of_rope = rope.pop("rope_type", rope.pop("type", "default"))  # it had the second name before
        markov = record.get("markov_rank", 256) if kind is DSparkHead else 0
        confidence = kind is DSparkHead and bool(record.get("enable_confidence_head", True))
        return BlockConfig(
            **{ours: layer[theirs] for theirs, ours in _SIZES.items()},
            layers=_layers(named, nested),
            block=named["block_size"],
            mask_id=named["mask_token_id"],
            from_anchor=bool(record.get("sample_from_anchor", kind is DSparkHead)),
            draft_vocab=record.get("draft_vocab_size") or 0 if "d2t" in weights else 0,
            markov=markov,
            markov_kind=record.get("markov_head_type", "vanilla"),
            confidence=confidence,
            confidence_reads_token=confidence and bool(record.get("confidence_head_with_markov", True)),
            own_output="lm_head.weight" in weights,
            own_embedding="embed_tokens.weight" in weights,
            rope={"rope_type": kind_of_rope, "rope_theta": layer.get("rope_theta", 10000.0), **rope},
        )
    except KeyError as error:
        raise ModelError(f"{str(path)!r} does not name {error.args[0]!r}; fetch it again") from error
    except (TypeError, OptionError) as error:
        raise ModelError(f"{str(path)!r} names what makes no head here ({error})") from error


def _refuse_other_layers(layer: Mapping[str, Any]) -> None:
    """Refuse layers that are not Qwen 3's with attention to all of the context."""
    if layer.get("hidden_act", "silu") != "silu":
        raise OptionError(f"its activation is {layer['hidden_act']!r}, and such heads have silu")
    if layer.get("attention_bias"):
        raise OptionError("its attention has biases, which is not supported")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise OptionError("some of its layers see a window of the context alone, which is not supported")


def _layers(named: Mapping[str, Any], nested: bool) -> tuple[int, ...]:
    """The layers that are read, by what they give."""
    if nested:
        return tuple(number - 1 for number in named["aux_hidden_state_layer_ids"])
    layers, count = tuple(named["target_layer_ids"]), named.get("num_target_layers")
    if count is not None and max(layers, default=0) >= count - 1:
        raise OptionError(
            f"it reads layer {max(layers)} of {count}, the last, whose vectors are normed there, and are not here"
        )
    return layers


def write_dflash_folder(head: DFlashHead, folder: Path, *, target_layers: int) -> None:
    """Write a head as z-lab's DFlash reads it, in the dtype of its weights.

    Args:
        head: that ends in the target's LM head.
        folder: of its files, made if need be.
        target_layers: that the target has.

    Raises:
        ModelError: the format has no place for something that the head has, or the files cannot be written.
    """
    config = head.config
    if config.own_output or config.own_embedding or config.from_anchor or config.markov or config.confidence:
        raise ModelError(
            "this format is of DFlash heads that end in the target's LM head (train with --draft-vocab 0) and whose "
            "masks guess their own tokens; write this one as speculators reads it"
        )
    about = _layer_record(config) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block,
        "num_target_layers": target_layers,
        "dflash_config": {"mask_token_id": config.mask_id, "target_layer_ids": list(config.layers)},
    }
    _write(folder, about, dict(head.state_dict()))


def write_dspark_folder(head: DSparkHead, folder: Path, *, target_layers: int) -> None:
    """Write a head as DeepSpec reads it, in the dtype of its weights.

    Args:
        head: that has an embedding and an LM head of its own, over all ids.
        folder: of its files, made if need be.
        target_layers: that the target has.

    Raises:
        ModelError: the format has no place for something that the head has, or the files cannot be written.
    """
    config = head.config
    if not config.own_output or not config.own_embedding or config.draft_vocab or not config.from_anchor:
        raise ModelError(
            "this format is of heads with copies of the target's embedding and LM head, over all ids, whose anchor "
            "guesses; write this one as speculators reads it"
        )
    about = _layer_record(config) | _markov_record(config) | {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": config.block,
        "mask_token_id": config.mask_id,
        "target_layer_ids": list(config.layers),
        "num_target_layers": target_layers,
        "num_anchors": 512,
    }  # fmt: skip
    _write(folder, about, dict(head.state_dict()))


def write_speculators_folder(head: BlockHead, folder: Path, *, target: str = "") -> None:
    """Write a head as `speculators` and vLLM read it, in the dtype of its weights.

    Args:
        head: with an LM head of its own exactly where it has fewer ids than the target.
        folder: of its files, made if need be.
        target: what the target is called there.

    Raises:
        ModelError: the format has no place for something that the head has, or the files cannot be written.
    """
    config, kind = head.config, head.kind
    if config.own_output != bool(config.draft_vocab) or config.own_embedding:
        raise ModelError(
            "this format takes embedding and LM head from the target, but for an LM head over fewer ids; write this "
            "head as DeepSpec reads it"
        )
    weights = {name: each for name, each in head.state_dict().items() if name != "draft_ids"}
    if head.draft_ids is not None:
        weights["d2t"] = head.draft_ids - torch.arange(len(head.draft_ids))
        weights["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, head.draft_ids, True)
    method = {"proposal_type": "greedy", "speculative_tokens": config.reach}
    about = {
        "architectures": [{"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}[kind]],
        _SPECULATORS: kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": _layer_record(config) | {"model_type": "qwen3"},
        "draft_vocab_size": config.draft_vocab or config.vocab_size,
        "block_size": config.block,
        "mask_token_id": config.mask_id,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.layers],
        "sample_from_anchor": config.from_anchor,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }
    _write(folder, about | (_markov_record(config) if kind == "dspark" else {}), weights)


def _layer_record(config: BlockConfig) -> dict[str, Any]:
    """The layers' configuration, as transformers names it."""
    return {
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["full_attention"] * config.depth,
        "rope_parameters": dict(config.rope),
        "tie_word_embeddings": False,
    }


def _markov_record(config: BlockConfig) -> dict[str, Any]:
    return {
        "markov_rank": config.markov,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_reads_token,
    }


def _write(folder: Path, about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: each.contiguous() for name, each in weights.items()}, folder / _WEIGHTS)
        (folder / _CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"cannot write the head into {str(folder)!r} ({error}); make room, or name another folder"
        ) from error
