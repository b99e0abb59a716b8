"""Medusa heads for vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from truedraft.drafters.exporting import Exports, ExportTarget, Way
from truedraft.kinds.medusa.folders import write_vllm_medusa


def _write(heads: Any, folder: Path, target: ExportTarget) -> None:
    tied = heads.config.tied and not heads.config.reads_token
    write_vllm_medusa(heads, folder, lm_head=target.lm_head(heads) if tied else None)


EXPORTS = Exports({"vllm": Way("medusa", _write)}, {"": "train an EAGLE-3 head in its place: truedraft train eagle"})
