"""Heads of the original Medusa project: loads its weights, and its default tree.

It writes `medusa_lm_head.pt`, a state dict: `{i}.{j}.linear.weight` and `.bias` of block j of head i, and
`{i}.{layers}.weight` of the head's own output, sometimes all with the prefix `medusa_head.`. Its config.json names the
target's folder or hub name; its number of heads is unreliable, so sizes come from the weights. It does not identify the
target's weights.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from truedraft.core.rank_tree import RankTree
from truedraft.drafters.heads.head import HeadRecord, tensors_in
from truedraft.errors import ModelError
from truedraft.files import object_of
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads

_CONFIG = "config.json"
_FILE = "medusa_lm_head.pt"
_PREFIX = "medusa_head."
_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
_Medusa = TypeVar("_Medusa", bound=MedusaHeads)

# The rank paths of the Medusa project's "mc_sim_7b_63", in its order.
_PUBLISHED = """
0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 011
006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
"""


def published_tree() -> RankTree:
    """The tree of 63 nodes, 4 deep, that the original project counted for its 7B model and has as its default."""
    return RankTree(tuple(tuple(map(int, path)) for path in _PUBLISHED.split()))


def is_original(path: Path) -> bool:
    """Whether a path is a file of the original Medusa project, or a folder with one."""
    return (path.is_file() and path.suffix == ".pt") or (path.is_dir() and (path / _FILE).is_file())


def load_original(path: Path, kind: type[_Medusa]) -> _Medusa:
    """Load heads of the original Medusa project, with their own outputs, and the published tree as far as they reach.

    Raises:
        ModelError: the file is damaged, or holds something else.
    """
    file = path / _FILE if path.is_dir() else path
    state = {
        name.removeprefix(_PREFIX): weight
        for name, weight in tensors_in(file, "name a file of the original Medusa project").items()
    }
    heads = _medusa_of(state, file, kind)
    name = _target_name(file.parent / _CONFIG)
    tree = published_tree().within(heads.reach, 1 << 30)
    note = (
        f"{file.name} is of the original Medusa project and does not say which weights it was trained for "
        f"({name or 'no target'} by name); it is used because its sizes fit"
    )
    heads.record = HeadRecord(name, trees={"greedy": tree, "sampled": tree}, note=note)
    return heads


def _medusa_of(state: dict[str, Tensor], file: Path, kind: type[_Medusa]) -> _Medusa:
    outputs = {int(match[1]): int(match[2]) for match in map(_OUTPUT.fullmatch, state) if match}
    layers = next(iter(outputs.values()), 0)
    if set(outputs.values()) != {layers} or layers < 1:
        raise ModelError(f"{str(file)!r} holds no Medusa heads, each with an output; name a file of that project")
    shape = next(weight.shape for name, weight in state.items() if _OUTPUT.fullmatch(name))
    config = MedusaConfig(shape[-1], shape[0], heads=len(outputs), layers=layers, tied=False)
    names = {f"{head}.{layers}.weight": f"heads.{head}.output.weight" for head in range(config.heads)}
    for head, block, part in itertools.product(range(config.heads), range(layers), ("weight", "bias")):
        names[f"{head}.{block}.linear.{part}"] = f"heads.{head}.blocks.{block}.linear.{part}"
    return kind.with_weights(config, state, file, names)


def _target_name(config: Path) -> str:
    return str(object_of(config).get("base_model_name_or_path", ""))
