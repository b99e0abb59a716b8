"""Medusa heads on disk: their files (see `storage`), and in `trees.json` their counted trees and what else is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from truedraft.core.rank_tree import RankTree
from truedraft.errors import ModelError, OptionError
from truedraft.heads.medusa import MedusaConfig, MedusaHeads
from truedraft.heads.original import is_original, load_original
from truedraft.heads.storage import AGAIN, HeadFiles, NamedTarget, expanded, read_json

_FILES = HeadFiles("medusa", MedusaConfig, MedusaHeads)
_TREES, _FACTS = "trees.json", "facts"


@dataclass(frozen=True, slots=True)
class MedusaCheckpoint:
    """Medusa heads, and what is known about them.

    Attributes:
        heads: in evaluation mode, without gradients, on the CPU, in the dtype in which they were written.
        target_name: what the target was called when they were trained.
        fingerprint: of that target; None where the file does not say.
        trees: "greedy" for requests at temperature 0, "sampled" for others; either may be missing.
        facts: whatever was measured of them.
        note: what a user should know of a file that cannot say which target it is for.
    """

    heads: MedusaHeads
    target_name: str
    fingerprint: str | None
    trees: Mapping[str, RankTree] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    note: str | None = None


def save_medusa(
    folder: Path | str,
    heads: MedusaHeads,
    target_name: str,
    fingerprint: str,
    trees: Mapping[str, RankTree],
    facts: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write heads into a folder; what an earlier checkpoint left there is replaced.

    Args:
        folder: is made if it does not exist.
        heads: any device and dtype.
        target_name: what the target is called.
        fingerprint: of the target, by `fingerprint_of` or `LanguageModel.fingerprint`.
        trees: by the kind of requests, see `MedusaCheckpoint`.
        facts: anything that JSON can hold.
        dtype: of the written weights: bfloat16, float16 or float32.

    Raises:
        ModelError: the files cannot be written.
    """
    counted = {kind: tree.as_dict() for kind, tree in trees.items()} | {_FACTS: dict(facts or {})}
    target = NamedTarget(target_name, fingerprint)
    _FILES.save(Path(folder), heads, heads.config, target, {_TREES: counted}, dtype)


def load_medusa(folder: Path | str) -> MedusaCheckpoint:
    """Read Medusa heads: a folder by `save_medusa`, or a folder or file of the original Medusa project.

    Raises:
        ModelNotFoundError: there is no such folder, or no heads in it.
        ModelError: a file is damaged, does not fit the others, or holds a recurrent drafter.
    """
    path = expanded(folder)
    if is_original(path):
        return MedusaCheckpoint(*load_original(path))
    heads, target = _FILES.load(path)
    counted = read_json(path / _TREES)
    facts = counted.pop(_FACTS, {})
    try:
        trees = {kind: RankTree.of(tree) for kind, tree in counted.items()}
    except (OptionError, TypeError) as error:
        raise ModelError(f"{str(path / _TREES)!r} is damaged ({error}); {AGAIN}") from error
    return MedusaCheckpoint(heads, target.name, target.fingerprint, trees, facts)
