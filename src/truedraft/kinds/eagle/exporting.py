"""EAGLE-3 and P-EAGLE heads for vLLM, SGLang, llama.cpp and `speculators`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from truedraft.drafters.exporting import LLAMACPP, SGLANG_STEPS, Exports, ExportTarget, Way
from truedraft.kinds.eagle import folders
from truedraft.kinds.eagle.module import Eagle3Head

_NO_NORMS = {"fc_norm": False, "norm_output": False}
_NO_QUERY_NORMS = {"query_norms": False}
_ONE_LAYER = {**_NO_NORMS, **_NO_QUERY_NORMS, "more_layers": 0}


def _with_output(head: Eagle3Head, target: ExportTarget, folder: Path) -> Eagle3Head:
    """The head with a copy of the target's LM head if it has none."""
    weight = None if head.config.own_output else target.lm_head(head)
    if weight is None:
        return head
    weights = head.state_dict() | {"lm_head.weight": weight.clone()}
    return type(head).with_weights(replace(head.config, own_output=True), weights, folder).with_record(head.record)


def _flat(head: Any, folder: Path, target: ExportTarget) -> None:
    folders.write_eagle_folder(_with_output(head, target, folder), folder, target=target.name)


def _speculators(head: Any, folder: Path, target: ExportTarget) -> None:
    whole = _with_output(head, target, folder)
    folders.write_speculators_folder(whole, folder, target=target.name, family=target.family)


_FLAGS = tuple(_NO_NORMS)
_OTHERWISE = "vLLM reads it: --for vllm"
_INSTEAD = "train an EAGLE-3 head in its place: truedraft train eagle"
EXPORTS = Exports(
    {
        "vllm": Way("eagle3", _speculators),
        "sglang": Way(SGLANG_STEPS.format("EAGLE3"), _flat, _NO_QUERY_NORMS, _FLAGS, _OTHERWISE),
        "llamacpp": Way(LLAMACPP.format("draft-eagle3"), _speculators, _ONE_LAYER, _FLAGS, _OTHERWISE),
        "speculators": Way("", _speculators),
    }
)
P_EAGLE = Exports(
    {
        "vllm": Way("eagle3 parallel_drafting", _speculators, _NO_NORMS, otherwise=_INSTEAD),
        "speculators": Way("", _speculators),
    },
    {"": _INSTEAD},
)
