"""DFlash 2 heads as z-lab publishes them, and of `speculators`.

Both name the same tensors and the same architecture. z-lab writes a flat configuration with `dflash_config`, which
vLLM, SGLang and llama.cpp read; `speculators` has the same entries at the top, and nests the layers' configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from truedraft.drafters.exporting import LLAMACPP, SGLANG, Exports, ExportTarget, Way
from truedraft.drafters.heads.layer_folders import kind_named, load_layer_folder
from truedraft.drafters.heads.layers import LayerHead
from truedraft.errors import ModelError
from truedraft.kinds.block.folders import block_sizes, causal_record, named_in, write_flat, write_speculators_folder
from truedraft.kinds.dflash2.module import DFlash2Config, DFlash2Head

_HEADS = (DFlash2Head,)
_NAMES = {
    "conv_kernel_size": "taps",
    "conv_group_size": "group",
    "selector_rank": "rank",
    "selector_top_k": "candidates",
}
_FACTORS = {
    "input_embedding_scale": ("embedding_scale", 1.0),
    "output_multiplier": ("factor", 1.0),
    "final_logit_softcapping": ("cap", None),
}
kind_in = partial(kind_named, kinds=_HEADS)


def load_published(path: Path, kind: type[DFlash2Head], *, ids_in_d2t: bool = False) -> LayerHead | None:
    """Load a head; result and errors as of `load_layer_folder`. It has all ids, so none in `d2t`."""

    def sizes(record: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DFlash2Config:
        named = named_in(record, {})
        own = {ours: named[theirs] for theirs, ours in _NAMES.items()}
        own |= {ours: named.get(theirs) or usual for theirs, (ours, usual) in _FACTORS.items()}
        return DFlash2Config(**block_sizes(record, named, weights), **own)

    return load_layer_folder(path, kind, _HEADS, sizes, ids_in_d2t=ids_in_d2t)


def write_dflash2_folder(head: DFlash2Head, folder: Path, target: ExportTarget) -> None:
    """Write a head with the target's LM head as z-lab publishes them, in the dtype of its weights.

    Raises `ModelError` for unsupported heads, or if writing fails.
    """
    config = _usual(head)
    inner = {"block_size": config.block, "mask_token_id": config.mask_id, "target_layer_ids": list(config.layers)}
    about = {"is_causal": False, "dflash_config": inner | _record(config) | causal_record(config)}
    write_flat(head, folder, target, about)


def write_speculators(head: DFlash2Head, folder: Path, target: ExportTarget) -> None:
    """Write a head as `speculators` reads it; arguments and errors as of `write_speculators_folder`."""
    write_speculators_folder(head, folder, target, _record(_usual(head)))


def _usual(head: DFlash2Head) -> DFlash2Config:
    config = head.config
    if config.own_output or config.own_embedding or config.from_anchor:
        raise ModelError(
            "these formats are of heads that end in the target's LM head, with masks that guess their own tokens; "
            "train one so: truedraft train dflash2 --tied"
        )
    return config


def _record(config: DFlash2Config) -> dict[str, Any]:
    given = {theirs: ours for theirs, (ours, usual) in _FACTORS.items() if getattr(config, ours) != usual}
    return {theirs: getattr(config, ours) for theirs, ours in {**_NAMES, **given}.items()}


DFLASH2 = Exports(
    {
        "vllm": Way("dflash", write_dflash2_folder),
        "sglang": Way(SGLANG.format("DFLASH") + "--speculative-num-draft-tokens K+1", write_dflash2_folder),
        "llamacpp": Way(LLAMACPP.format("draft-dflash"), write_dflash2_folder),
        "speculators": Way("", write_speculators),
    }
)
