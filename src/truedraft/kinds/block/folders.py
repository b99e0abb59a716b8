"""Block drafters as other projects publish them: z-lab's DFlash, DeepSpec's DSpark, and both kinds of `speculators`.

z-lab writes a flat configuration of Qwen 3 with `dflash_config`; embedding and LM head are the target's. DeepSpec's is
also flat, with copies of both. `speculators` nests the layers' configuration, without Qwen 3's defaults.

z-lab and DeepSpec number layers by their outputs, as here; `speculators` by their inputs, so 2 there is 1 here.
transformers normalizes the last layer's output, so a head that reads it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from truedraft.drafters.exporting import LLAMACPP, SGLANG, Exports, ExportTarget, Way
from truedraft.drafters.heads.head import write_published
from truedraft.drafters.heads.layer_folders import (
    SPECULATORS,
    flat_record,
    kind_named,
    layer_record,
    layer_sizes,
    load_layer_folder,
    write_speculators,
)
from truedraft.drafters.heads.layers import LayerHead
from truedraft.errors import ModelError, OptionError
from truedraft.kinds.block.module import BlockConfig, BlockHead, DFlashHead, DSparkHead

_HEADS = (DFlashHead, DSparkHead)
_FAMILY = "qwen3"
_QWEN3 = {  # defaults that transformers omits from a configuration
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
    "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
}  # fmt: skip
_ONLY = {
    "is_causal": False, "is_neox_style": True, "rope_is_neox_style": True,
    "attention_sink_bias": False, "add_swa_attention_sink_bias": False, "use_aux_hidden_state": True,
}  # fmt: skip
"""Further options in such folders, with the only supported value."""
_OF_DFLASH2 = {
    "input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None, "conv_kernel_size": None,
    "selector_rank": None,
}  # fmt: skip
kind_in = partial(kind_named, kinds=_HEADS)


def load_published(path: Path, kind: type[BlockHead], *, ids_in_d2t: bool = False) -> LayerHead | None:
    """Load a head; arguments, result and errors as of `load_layer_folder`."""

    def sizes(record: Mapping[str, Any], weights: Mapping[str, Tensor]) -> BlockConfig:
        dspark, named = kind is DSparkHead, named_in(record, _OF_DFLASH2)
        confidence = dspark and bool(named.get("enable_confidence_head", True))
        return BlockConfig(
            **block_sizes(record, named, weights, from_anchor=dspark),
            markov=named.get("markov_rank", 256) if dspark else 0,
            markov_kind=named.get("markov_head_type", "vanilla"),
            confidence=confidence,
            confidence_reads_token=confidence and bool(named.get("confidence_head_with_markov", True)),
        )

    return load_layer_folder(path, kind, _HEADS, sizes, ids_in_d2t=ids_in_d2t)


def named_in(record: Mapping[str, Any], only: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of config.json with those of its `dflash_config`; raises `OptionError` if both have one, unlike, or if
    one differs from the only supported value, of further ones in `only`."""
    inner = record.get("dflash_config") or {}
    if unlike := [name for name in inner if record.get(name, inner[name]) != inner[name]]:
        raise OptionError(
            f"{unlike[0]} is {record[unlike[0]]!r} there, and {inner[unlike[0]]!r} in its dflash_config; take the "
            "wrong one out"
        )
    named = {**record, **inner}
    for name, supported in {**_ONLY, **only}.items():
        if (value := named.get(name)) is not None and value != supported:
            raise OptionError(f"{name} is {value!r}, and heads are read where it is {supported!r}")
    return named


def block_sizes(
    record: Mapping[str, Any], named: Mapping[str, Any], weights: Mapping[str, Tensor], *, from_anchor: bool = False
) -> dict[str, Any]:
    """Entries of `BlockConfig` that all kinds of blocks have, from config.json, its `named_in`, and weights.

    `from_anchor` is the kind's default. Raises `OptionError` for unsupported layers.
    """
    nested = SPECULATORS in record
    layer: Mapping[str, Any] = _QWEN3 | record["transformer_layer_config"] if nested else record
    entries = layer_sizes(record, layer, weights)
    if named.get("use_swa"):  # Model Optimizer and MiMo: of all layers
        entries["windows"] = (named["swa_window_size"],)
    causal = named.get("causal", nested and not named.get("sliding_window_non_causal", False))
    if not entries["windows"] and named.get("causal"):
        raise OptionError("causal is True, and heads are read where it is False, or with windows")
    return {
        **entries,
        "window_causal": bool(entries["windows"] and causal),
        "layers": _layers(named, nested),
        "depth": layer["num_hidden_layers"],
        "block": named["block_size"],
        "mask_id": named["mask_token_id"],
        "from_anchor": bool(named.get("sample_from_anchor", from_anchor)),
    }


def _layers(named: Mapping[str, Any], nested: bool) -> tuple[int, ...]:
    if nested:
        return tuple(number - 1 for number in named["aux_hidden_state_layer_ids"])
    if entered := named.get("layer_ids"):
        return tuple(number - 1 for number in entered)
    layers, count = tuple(named["target_layer_ids"]), named.get("num_target_layers")
    if count is not None and max(layers, default=0) >= count - 1:
        raise OptionError(
            f"it reads layer {max(layers)} of {count}, the last, with vectors that are normed there, and not here"
        )
    return layers


def write_dflash_folder(head: DFlashHead, folder: Path, target: ExportTarget) -> None:
    """Write a head with the target's LM head as z-lab's DFlash reads it, in the dtype of its weights.

    Raises `ModelError` for unsupported heads, or if writing fails.
    """
    config = head.config
    if config.own_output or config.own_embedding or config.from_anchor or config.markov or config.confidence:
        raise ModelError(
            "this format is of DFlash heads that end in the target's LM head (train with --draft-vocab 0) and whose "
            "masks guess their own tokens; write this one as speculators and vLLM read it: --for vllm"
        )
    inner = {"mask_token_id": config.mask_id, "target_layer_ids": list(config.layers)}
    write_flat(head, folder, target, {"dflash_config": inner | causal_record(config)})


def write_dspark_folder(head: DSparkHead, folder: Path, target: ExportTarget) -> None:
    """Write a head with its own embedding and full LM head as DeepSpec reads it, in the dtype of its weights.

    Raises `ModelError` for unsupported heads, or if writing fails.
    """
    config = head.config
    if not config.own_output or not config.own_embedding or config.draft_vocab or not config.from_anchor:
        raise ModelError(
            "this format is of heads with copies of the target's embedding and LM head, over all ids, whose anchor "
            "guesses; write this one as speculators and vLLM read it: --for vllm"
        )
    about = {"mask_token_id": config.mask_id, "target_layer_ids": list(config.layers), "num_anchors": 512}
    write_flat(head, folder, target, _markov_record(config) | about | causal_record(config))


def write_flat(head: BlockHead, folder: Path, target: ExportTarget, about: Mapping[str, Any]) -> None:
    """Write a head with further entries of its config.json; raises `ModelError` if writing fails."""
    config = head.config
    record = {
        **flat_record(config, config.depth, _FAMILY),
        **_attention(config),
        "architectures": [head.architectures[0]],
        "block_size": config.block,
        "num_target_layers": target.layers,
    }
    write_published(folder, head.state_dict(), {**record, **about})


def write_speculators_folder(
    head: BlockHead, folder: Path, target: ExportTarget, more: Mapping[str, Any] | None = None
) -> None:
    """Write a head as `speculators` and vLLM read it, in the dtype of its weights.

    Raises `ModelError` for unsupported heads, or if writing fails.

    Args:
        head: with its own LM head exactly if its vocabulary is reduced.
        more: further entries of config.json.
    """
    config = head.config
    if config.own_output != bool(config.draft_vocab) or config.own_embedding:
        raise ModelError(
            "this format takes embedding and LM head from the target, but for an LM head over fewer ids; train one so: "
            f"truedraft train {head.kind} --tied"
        )
    about = {
        "block_size": config.block,
        "mask_token_id": config.mask_id,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.layers],
        "sample_from_anchor": config.from_anchor,
        **(_markov_record(config) if head.kind == "dspark" else {}),
        **({"sliding_window_non_causal": not config.window_causal} if config.windows else {}),
        **(more or {}),
    }
    layers = layer_record(config, config.depth, _FAMILY) | _attention(config)
    write_speculators(head, folder, layers, about, target)


def _attention(config: BlockConfig) -> dict[str, Any]:
    types = {} if config.windows else {"layer_types": ["full_attention"] * config.depth}
    return {"attention_bias": False, **types}


def causal_record(config: BlockConfig) -> dict[str, Any]:
    """What flat formats say of blocks that are causal in layers with a window; else nothing."""
    return {"causal": True} if config.window_causal else {}


def _markov_record(config: BlockConfig) -> dict[str, Any]:
    return {
        "markov_rank": config.markov,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_reads_token,
    }


_VANILLA = {"markov_kind": "vanilla"}
_OTHERWISE = "SGLang reads one that has copies of embedding and LM head; or train one: truedraft train dspark"


def _either(head: Any, folder: Path, target: ExportTarget) -> None:
    (write_dspark_folder if head.config.own_embedding else write_speculators_folder)(head, folder, target)


DFLASH = Exports(
    {
        "vllm": Way("dflash", write_speculators_folder),
        "sglang": Way(SGLANG.format("DFLASH") + "--speculative-num-draft-tokens K+1", write_dflash_folder),
        "llamacpp": Way(LLAMACPP.format("draft-dflash"), write_dflash_folder),
        "speculators": Way("", write_speculators_folder),
    }
)
DSPARK = Exports(
    {
        "vllm": Way("dspark", _either, _VANILLA, otherwise=_OTHERWISE),
        "sglang": Way(SGLANG.format("DSPARK") + "--speculative-dspark-block-size K", write_dspark_folder),
        "llamacpp": Way(LLAMACPP.format("draft-dspark"), _either, _VANILLA, otherwise=_OTHERWISE),
        "speculators": Way("", write_speculators_folder),
    }
)
