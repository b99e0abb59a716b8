"""Heads of the original Medusa project: its weights in our module, and the tree that it ships.

It writes `medusa_lm_head.pt`, a state dict: `{i}.{j}.linear.weight` and `.bias` of block j of head i, and
`{i}.{layers}.weight` of the head's own output, all of them sometimes behind `medusa_head.`. Its config.json names the
target's folder or hub name; how many heads it counts is not to be relied on, so sizes are taken from the weights. It
does not say for which weights of a target its heads are.
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
    """The tree of 63 nodes, 4 deep, that the original project counted for its 7B model and ships as the default."""
    return RankTree(tuple(tuple(map(int, path)) for path in _PUBLISHED.split()))


def is_original(path: Path) -> bool:
    """Whether a path is a file of the original Medusa project, or a folder with one."""
    return (path.is_file() and path.suffix == ".pt") or (path.is_dir() and (path / _FILE).is_file())


def load_original(path: Path, kind: type[_Medusa]) -> _Medusa:
    """Heads of the original Medusa project, with outputs of their own, and the published tree as far as they reach.

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
    """Heads with exactly these weights."""
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
    """What a config.json beside the weights calls the target; "" where it does not."""
    return str(object_of(config).get("base_model_name_or_path", ""))
