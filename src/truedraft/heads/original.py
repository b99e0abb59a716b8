"""Heads that the original Medusa project wrote: weights only, and a tree that it published.

`medusa_lm_head.pt` is a state dict: `{i}.{j}.linear.weight` and `.bias` of block j of head i, and
`{i}.{layers}.weight` of the head's own output, all of them sometimes behind `medusa_head.`. Its config.json names the
target's folder or hub name; how many heads it counts is not to be relied on, so sizes are taken from the weights.
"""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from truedraft.core.rank_tree import RankTree
from truedraft.errors import ModelError
from truedraft.heads.medusa import MedusaConfig, MedusaHeads

_FILE = "medusa_lm_head.pt"
_PREFIX = "medusa_head."
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")

# The rank paths of the project's "mc_sim_7b_63", in its order.
_PUBLISHED = """
0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 011
006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
"""


def published_tree() -> RankTree:
    """The tree of 63 nodes, 4 deep, that the original project counted for its 7B model and ships as the default."""
    return RankTree(tuple(tuple(map(int, path)) for path in _PUBLISHED.split()))


def is_original(path: Path) -> bool:
    """Whether a path is a file of the original project, or a folder with one."""
    return (path.is_file() and path.suffix == ".pt") or (path.is_dir() and (path / _FILE).is_file())


def load_original(path: Path) -> tuple[MedusaHeads, str, None, dict[str, RankTree], dict[str, Any], str]:
    """Read heads of the original project; only tensors are read, no code that a file may hold.

    Returns:
        Heads, with outputs of their own; what their config.json calls the target; no fingerprint; the published tree
        as far as the heads reach; no facts; and a note on what could not be checked.

    Raises:
        ModelError: the file is damaged, or holds something else.
    """
    file = path / _FILE if path.is_dir() else path
    state = {name.removeprefix(_PREFIX): weight for name, weight in _read(file).items()}
    heads = _heads_of(state, file)
    name = _target_name(file.parent / "config.json")
    tree = published_tree().within(heads.config.heads, 1 << 30)
    note = (
        f"{file.name} is of the original Medusa project and does not say which weights it was trained for "
        f"({name or 'no target'} by name); it is used because its sizes fit"
    )
    return heads, name, None, {"greedy": tree, "sampled": tree}, {}, note


def _read(file: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"cannot read {str(file)!r} as tensors ({reason}); fetch the file again") from error
    if not isinstance(state, dict) or not all(isinstance(weight, Tensor) for weight in state.values()):
        raise ModelError(f"{str(file)!r} is no dictionary of tensors; name a file of the original Medusa project")
    return state


def _heads_of(state: dict[str, Tensor], file: Path) -> MedusaHeads:
    """Heads with exactly these weights."""
    outputs = {int(match[1]): int(match[2]) for match in map(_OUTPUT.fullmatch, state) if match}
    renamed: dict[str, Tensor] = {}
    for name, weight in state.items():
        block = _BLOCK.fullmatch(name)
        if block:
            renamed[f"heads.{block[1]}.blocks.{block[2]}.linear.{block[3]}"] = weight
        elif _OUTPUT.fullmatch(name):
            renamed[f"heads.{name.partition('.')[0]}.output.weight"] = weight
        else:
            renamed[name] = weight  # of which the heads know nothing
    layers = set(outputs.values())
    if len(layers) != 1 or min(layers) < 1:
        raise ModelError(f"{str(file)!r} holds no Medusa heads, each with an output; name a file of that project")
    shape = next(weight.shape for name, weight in state.items() if _OUTPUT.fullmatch(name))
    config = MedusaConfig(shape[-1], shape[0], heads=len(outputs), layers=layers.pop(), tied=False)
    with torch.device("meta"):
        heads = MedusaHeads(config)
    try:
        heads.load_state_dict(renamed, strict=True, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{str(file)!r} is damaged, or of another kind of heads ({reason})") from error
    return heads.eval().requires_grad_(False)


def _target_name(config: Path) -> str:
    """What a config.json beside the weights calls the target; "" where it does not."""
    try:
        return str(json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
