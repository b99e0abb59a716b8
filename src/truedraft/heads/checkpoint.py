"""Heads on disk: one folder, which names the target that they were trained for.

`config.json` holds the sizes and the target, `heads.safetensors` the weights, and `trees.json` the trees that were
counted for them, beside what else was found out about them. `config.json` is written last, so that half a checkpoint
is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from truedraft.core.rank_tree import RankTree
from truedraft.errors import ModelError, ModelNotFoundError, OptionError
from truedraft.heads.medusa import MedusaConfig, MedusaHeads
from truedraft.heads.original import is_original, load_original

_KIND = "medusa"
_VERSION = 1
_CONFIG, _WEIGHTS, _TREES = "config.json", "heads.safetensors", "trees.json"
_FACTS = "facts"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


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
    path = Path(folder)
    name = str(dtype).removeprefix("torch.")
    record = {"kind": _KIND, "version": _VERSION, "target": {"name": target_name, "fingerprint": fingerprint}}
    record |= {"dtype": name, **asdict(heads.config)}
    weights = {part: weight.detach().to("cpu", dtype).contiguous() for part, weight in heads.state_dict().items()}
    counted = {kind: tree.as_dict() for kind, tree in trees.items()} | {_FACTS: dict(facts or {})}
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / _CONFIG).unlink(missing_ok=True)
        save_file(weights, path / _WEIGHTS)
        (path / _WEIGHTS).chmod(0o644)  # safetensors writes files that only their owner can read
        (path / _TREES).write_text(json.dumps(counted) + "\n", encoding="utf-8")
        (path / _CONFIG).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"cannot write the heads into {str(path)!r} ({error}); make room, or name another folder"
        ) from error


def load_medusa(folder: Path | str) -> MedusaCheckpoint:
    """Read Medusa heads: a folder by `save_medusa`, or a folder or file of the original Medusa project.

    Raises:
        ModelNotFoundError: there is no such folder, or no heads in it.
        ModelError: a file is damaged, or does not fit the others.
    """
    try:
        path = Path(folder).expanduser()
    except RuntimeError as error:
        raise ModelNotFoundError(f"there is no home for the ~ of {str(folder)!r}; check the path") from error
    if is_original(path):
        return MedusaCheckpoint(*load_original(path))
    if not path.is_dir():
        raise ModelNotFoundError(f"there is no folder {str(folder)!r} with Medusa heads; check the path")
    if not (path / _CONFIG).is_file():
        raise ModelNotFoundError(
            f"the folder {str(folder)!r} has no {_CONFIG}, so it holds no Medusa heads; name one that `truedraft train "
            "medusa` wrote"
        )
    record = _read_json(path / _CONFIG)
    config, target, dtype = _checked(record, path / _CONFIG)
    heads = _read_heads(path / _WEIGHTS, config, dtype)
    counted = _read_json(path / _TREES)
    facts = counted.pop(_FACTS, {})
    try:
        trees = {kind: RankTree.of(tree) for kind, tree in counted.items()}
    except (OptionError, TypeError) as error:
        raise ModelError(f"{str(path / _TREES)!r} is damaged ({error}); fetch or train the heads again") from error
    return MedusaCheckpoint(heads, str(target["name"]), str(target["fingerprint"]), trees, facts)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{str(path)!r} is missing; fetch or train the heads again") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {str(path)!r} ({error}); fetch or train the heads again") from error
    if not isinstance(record, dict):
        raise ModelError(f"{str(path)!r} does not hold a JSON object; fetch or train the heads again")
    return record


def _checked(record: dict[str, Any], path: Path) -> tuple[MedusaConfig, dict[str, Any], torch.dtype]:
    """Sizes, target and dtype of a config.json that is ours."""
    kind, version = record.get("kind"), record.get("version")
    if kind != _KIND:
        raise ModelError(
            f"{str(path)!r} is not of Medusa heads (its kind is {kind!r}); name a folder with Medusa heads"
        )
    if version != _VERSION:
        raise ModelError(
            f"{str(path)!r} is of version {version!r}, and this truedraft reads version {_VERSION}; train the heads "
            "again, or install the truedraft that wrote them"
        )
    try:
        config = MedusaConfig(**{each.name: record[each.name] for each in fields(MedusaConfig)})
        target = {"name": record["target"]["name"], "fingerprint": record["target"]["fingerprint"]}
        return config, target, _DTYPES[record["dtype"]]
    except (KeyError, TypeError, OptionError) as error:
        raise ModelError(f"{str(path)!r} is damaged ({error}); fetch or train the heads again") from error


def _read_heads(path: Path, config: MedusaConfig, dtype: torch.dtype) -> MedusaHeads:
    """Heads with all of their weights and no others."""
    if not path.is_file():
        raise ModelNotFoundError(f"{str(path)!r} is missing; fetch or train the heads again")
    with torch.device("meta"):
        heads = MedusaHeads(config)
    try:
        weights = load_file(path)
        heads.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, strict=True, assign=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{str(path)!r} is damaged, or not of the sizes that {_CONFIG} names ({reason}); fetch or train the heads "
            "again"
        ) from error
    return heads.eval().requires_grad_(False)
