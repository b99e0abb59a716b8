"""A recurrent head on disk: its files (see `storage`), and in `facts.json` what was found out about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from truedraft.heads.apple import is_apple, load_apple
from truedraft.heads.redrafter import RedrafterConfig, RedrafterHead
from truedraft.heads.storage import HeadFiles, NamedTarget, expanded, read_json

_FILES = HeadFiles("redrafter", RedrafterConfig, RedrafterHead)
_FACTS = "facts.json"


@dataclass(frozen=True, slots=True)
class RedrafterCheckpoint:
    """A recurrent head, and what is known about it.

    Attributes:
        head: in evaluation mode, without gradients, on the CPU, in the dtype in which it was written.
        target_name: what the target was called when it was trained.
        fingerprint: of that target; None where the file does not say.
        facts: whatever was measured of it.
        note: what a user should know of a file that cannot say which target it is for.
    """

    head: RedrafterHead
    target_name: str
    fingerprint: str | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    note: str | None = None


def save_redrafter(
    folder: Path | str,
    head: RedrafterHead,
    target_name: str,
    fingerprint: str,
    facts: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a recurrent head into a folder; what an earlier checkpoint left there is replaced.

    Args:
        folder: is made if it does not exist.
        head: any device and dtype.
        target_name: what the target is called.
        fingerprint: of the target, by `fingerprint_of` or `LanguageModel.fingerprint`.
        facts: anything that JSON can hold.
        dtype: of the written weights: bfloat16, float16 or float32.

    Raises:
        ModelError: the files cannot be written.
    """
    target = NamedTarget(target_name, fingerprint)
    _FILES.save(Path(folder), head, head.config, target, {_FACTS: dict(facts or {})}, dtype)


def load_redrafter(folder: Path | str) -> RedrafterCheckpoint:
    """Read a recurrent head: a folder by `save_redrafter`, or one of Apple's `Drafter` format.

    Raises:
        ModelNotFoundError: there is no such folder, or no recurrent head in it.
        ModelError: a file is damaged, does not fit the others, or holds Medusa heads.
    """
    path = expanded(folder)
    if is_apple(path):
        return RedrafterCheckpoint(*load_apple(path))
    head, target = _FILES.load(path)
    return RedrafterCheckpoint(head, target.name, target.fingerprint, read_json(path / _FACTS))
