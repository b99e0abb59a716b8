"""EAGLE-3 and P-EAGLE heads as other projects publish them: EAGLE, SGLang and SpecForge, and `speculators`.

EAGLE, SGLang and SpecForge have a flat Llama configuration with `draft_vocab_size`; the layer is `midlayer`, and the
embedding is the target's. `speculators` nests the layer's configuration in `transformer_layer_config`, calls the layer
`layers.0`, includes copies of the target's embedding and LM head, and counts positions from 1. NVIDIA's Model Optimizer
writes the flat one with the name `layers.0`, always an LM head, no `t2d`, and flags in `eagle_config`.

Top-level layer numbers, which vLLM and `speculators` read, count inputs of layers: 2 is the output of layer 1. Those in
`eagle_config` count outputs in SpecForge and Model Optimizer (usually 1, n // 2 - 1 and n - 4), and inputs in other
folders; SGLang assumes outputs if they begin with 1. So `Eagle3Config.at_usual_layers` decides when the target is
known, or numbers in both places do: the inner ones are one lower if they count outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from truedraft.drafters.exporting import LLAMACPP, SGLANG_STEPS, Exports, ExportTarget, Way
from truedraft.drafters.heads.head import write_published
from truedraft.drafters.heads.layer_folders import (
    SPECULATORS,
    flat_record,
    kind_named,
    layer_record,
    layer_sizes,
    load_layer_folder,
    weights_of,
    write_speculators,
)
from truedraft.drafters.heads.layers import LayerHead
from truedraft.errors import ModelError, OptionError
from truedraft.kinds import INSTEAD
from truedraft.kinds.eagle.module import Eagle3Config, Eagle3Head, PEagleConfig, PEagleHead

_HEADS = (Eagle3Head, PEagleHead)
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_MODEL_OPTIMIZER = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Supported values in `eagle_config`; other values are other heads."""
kind_in = partial(kind_named, kinds=_HEADS)


def load_published(path: Path, kind: type[Eagle3Head], *, ids_in_d2t: bool = False) -> LayerHead | None:
    """Load a head; arguments, result and errors as of `load_layer_folder`."""

    def sizes(record: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Eagle3Config:
        nested = SPECULATORS in record
        layer = record["transformer_layer_config"] if nested else record
        inner = record.get("eagle_config") or {}
        for name, only in _MODEL_OPTIMIZER.items():
            if (value := inner.get(name)) not in (None, only):
                raise OptionError(f"{name} is {value!r}, and heads are read where it is {only!r}")
        layers, unsettled = _layers(record.get(_LAYERS) or inner.get("layer_ids") or (), inner.get(_LAYERS) or ())
        methods = (record.get("speculators_config") or {}).get("proposal_methods")
        made: Eagle3Config = kind.sizes(
            **layer_sizes(record, layer, weights),
            **{name: bool(inner.get(name, record.get(name, False))) for name in _FLAGS},
            layers=layers,
            layers_unsettled=unsettled,
            reach=methods[0]["speculative_tokens"] if methods else 5,
            query_norms="midlayer.self_attn.q_norm.weight" in weights,
            rope_start=int(record.get(SPECULATORS) == "eagle3"),
            more_layers=layer.get("num_hidden_layers", 1) - 1,
            **({"mask_token": record["mask_token_id"]} if kind.sizes is PEagleConfig else {}),
        )
        return made

    def renamed(name: str) -> str:
        return name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)

    return load_layer_folder(path, kind, _HEADS, sizes, renamed, ids_in_d2t=ids_in_d2t)


def _layers(entered: Sequence[int], inside: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """The layers that are read, and whether it is open what their numbers count; raises `OptionError` if they differ.

    `entered` count inputs of layers, `inside` are those in `eagle_config`.
    """
    given, within = tuple(number - 1 for number in entered), tuple(inside)
    if not given:
        return within, bool(within)
    if within and within != given and (within != tuple(entered) or within[0] == 1):
        raise OptionError(
            f"{_LAYERS} is {list(entered)}, which counts what enters layers, and {list(within)} in eagle_config, which "
            "is neither one lower nor the same; take the wrong one out"
        )
    return given, False


def write_eagle_folder(head: Eagle3Head, folder: Path, target: ExportTarget) -> None:
    """Write a head with positions from 0 as EAGLE, SGLang, SpecForge and vLLM read it, in the dtype of its weights.

    A head without an LM head gets the target's. Raises `ModelError` for unsupported heads, or if writing fails.
    """
    head = _with_output(head, target, folder)
    config = head.config
    unlike = config.norm_before_residual or config.norm_before_fc or config.more_layers
    if config.rope_start or not config.own_output or unlike or head.kind != Eagle3Head.kind:
        raise ModelError(
            "this format is of heads of one layer with an LM head of their own, whose positions count from 0 and whose "
            "vectors are normed behind fc alone; keep this head in truedraft's own folder"
        )
    about = flat_record(config, 1, _family(config)) | {
        "architectures": [head.architectures[0]],
        "draft_vocab_size": config.draft_vocab or config.vocab_size,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "target_model": target.name,
        _LAYERS: [layer + 1 for layer in config.layers],
        "eagle_config": {_LAYERS: list(config.layers)},
    }
    write_published(folder, weights_of(head), about)


def write_speculators_folder(head: Eagle3Head, folder: Path, target: ExportTarget) -> None:
    """Write a head, EAGLE-3's or P-EAGLE's, as `speculators` and vLLM read it, in the dtype of its weights.

    EAGLE-3 positions count from 1 there, with the same drafts, as rotary embeddings depend only on differences. Raises
    `ModelError` for unsupported heads, or if writing fails. `speculators` loads no folder without the target's name.
    """
    head = _with_output(head, target, folder)
    config = head.config
    if not config.own_output or not config.layers:
        raise ModelError("this format is of heads with an LM head of their own that name the layers they read")
    more = {name: getattr(config, name) for name in _FLAGS}
    more[_LAYERS] = [layer + 1 for layer in config.layers]
    if isinstance(config, PEagleConfig):
        more |= {"mask_token_id": config.mask_token, "embed_requires_grad": True}
    layers = layer_record(config, 1 + config.more_layers, _family(config))
    write_speculators(head, folder, layers, more, target)


def _family(config: Eagle3Config) -> str:
    return "qwen3" if config.query_norms else "llama"


_NO_NORMS = {"fc_norm": False, "norm_output": False}
_NO_QUERY_NORMS = {"query_norms": False}
_ONE_LAYER = {**_NO_NORMS, **_NO_QUERY_NORMS, "more_layers": 0, "windows": ()}


def _with_output(head: Eagle3Head, target: ExportTarget, folder: Path) -> Eagle3Head:
    """With a copy of the target's LM head if it has none."""
    weight = None if head.config.own_output else target.lm_head(head)
    if weight is None:
        return head
    weights = head.state_dict() | {"lm_head.weight": weight.clone()}
    return type(head).with_weights(replace(head.config, own_output=True), weights, folder).with_record(head.record)


_FOR_VLLM: dict[str, Any] = {"flags": tuple(_NO_NORMS), "otherwise": "vLLM reads it: --for vllm"}
EAGLE = Exports(
    {
        "vllm": Way("eagle3", write_speculators_folder),
        "sglang": Way(SGLANG_STEPS.format("EAGLE3"), write_eagle_folder, _NO_QUERY_NORMS, **_FOR_VLLM),
        "llamacpp": Way(LLAMACPP.format("draft-eagle3"), write_speculators_folder, _ONE_LAYER, **_FOR_VLLM),
        "speculators": Way("", write_speculators_folder),
    }
)
P_EAGLE = Exports(
    {
        "vllm": Way("eagle3 parallel_drafting", write_speculators_folder, _NO_NORMS, otherwise=INSTEAD),
        "speculators": Way("", write_speculators_folder),
    },
    {"": INSTEAD},
)
