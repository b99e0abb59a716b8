"""Block drafters for vLLM, SGLang, llama.cpp and `speculators`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from truedraft.drafters.exporting import LLAMACPP, SGLANG, Exports, ExportTarget, Way
from truedraft.kinds.block import folders

_VANILLA = {"markov_kind": "vanilla"}
_OTHERWISE = "SGLang reads one that has copies of embedding and LM head; or train one: truedraft train dspark"


def _speculators(head: Any, folder: Path, target: ExportTarget) -> None:
    folders.write_speculators_folder(head, folder, target=target.name, family=target.family)


def _deepspec(head: Any, folder: Path, target: ExportTarget) -> None:
    folders.write_dspark_folder(head, folder, target_layers=target.layers)


def _either(head: Any, folder: Path, target: ExportTarget) -> None:
    (_deepspec if head.config.own_embedding else _speculators)(head, folder, target)


def _flat(head: Any, folder: Path, target: ExportTarget) -> None:
    folders.write_dflash_folder(head, folder, target_layers=target.layers)


DFLASH = Exports(
    {
        "vllm": Way("dflash", _speculators),
        "sglang": Way(SGLANG.format("DFLASH") + "--speculative-num-draft-tokens K+1", _flat),
        "llamacpp": Way(LLAMACPP.format("draft-dflash"), _flat),
        "speculators": Way("", _speculators),
    }
)
DSPARK = Exports(
    {
        "vllm": Way("dspark", _either, _VANILLA, otherwise=_OTHERWISE),
        "sglang": Way(SGLANG.format("DSPARK") + "--speculative-dspark-block-size K", _deepspec),
        "llamacpp": Way(LLAMACPP.format("draft-dspark"), _either, _VANILLA, otherwise=_OTHERWISE),
        "speculators": Way("", _speculators),
    }
)
