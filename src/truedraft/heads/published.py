"""Heads that other projects published: their weights in our modules, and what is said beside them.

The original Medusa project writes `medusa_lm_head.pt`, a state dict: `{i}.{j}.linear.weight` and `.bias` of block j of
head i, and `{i}.{layers}.weight` of the head's own output, all of them sometimes behind `medusa_head.`. Its config.json
names the target's folder or hub name; how many heads it counts is not to be relied on, so sizes are taken from the
weights.

Apple's recurrent-drafting project writes weights only, in its `Drafter` format. config.json has `model_type`
"recurrent_drafting_drafter", `hidden_size`, `exit_dim`, `num_draft_layers`, `rnn` and `vocab_size`. The weights are
`input_proj` (where twice the hidden size is not `exit_dim`), `lm_head.{i}.linear` of each residual block,
`lm_head.{num_draft_layers}.weight` of the output, and, of a recurrent one, `rnn_u` and `rnn_w.weight`.

Folders of vLLM's Medusa are `truedraft.heads.medusa_folders`, EAGLE-3 heads `truedraft.heads.eagle_folders`.

Only tensors are read, no code that a file may hold. Neither project says for which weights of a target its heads are.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from truedraft.core.rank_tree import RankTree
from truedraft.errors import ModelError, ModelNotFoundError, OptionError
from truedraft.files import object_of
from truedraft.heads.base import Head, HeadRecord, tensors_in
from truedraft.heads.block import BlockHead
from truedraft.heads.block_folders import block_kind, load_block_folder
from truedraft.heads.eagle import Eagle3Head
from truedraft.heads.eagle_folders import eagle_kind, load_eagle_folder
from truedraft.heads.medusa import MedusaConfig, MedusaHeads
from truedraft.heads.medusa_folders import is_vllm_medusa, load_vllm_medusa
from truedraft.heads.mtp import MtpHead, is_mtp_folder
from truedraft.heads.redrafter import RedrafterConfig, RedrafterHead

_CONFIG = "config.json"
_MEDUSA_FILE = "medusa_lm_head.pt"
_MEDUSA_PREFIX = "medusa_head."
_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
_APPLE_TYPE = "recurrent_drafting_drafter"
_APPLE_FILES = ("model.safetensors", "pytorch_model.bin")
_Medusa = TypeVar("_Medusa", bound=MedusaHeads)
_Redrafter = TypeVar("_Redrafter", bound=RedrafterHead)

# The rank paths of the Medusa project's "mc_sim_7b_63", in its order.
_PUBLISHED = """
0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 011
006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
"""


def published_tree() -> RankTree:
    """The tree of 63 nodes, 4 deep, that the original project counted for its 7B model and ships as the default."""
    return RankTree(tuple(tuple(map(int, path)) for path in _PUBLISHED.split()))


def kind_in(path: Path) -> str | None:
    """The kind of heads that a path says it holds, ours or published ones; None: none."""
    own, layered = object_of(path / _CONFIG).get("kind"), eagle_kind(path) or block_kind(path)
    if is_mtp_folder(path):
        return MtpHead.kind
    if isinstance(own, str) or layered is not None:
        return own if layered is None else layered.kind
    if _is_original(path) or is_vllm_medusa(path):
        return MedusaHeads.kind
    return RedrafterHead.kind if _is_apple(path) else None


def load_published(path: Path, kind: type[Head], *, ids_in_d2t: bool = False) -> Any:
    """Heads of a kind of ours that another project published; None where a path has none.

    With `ids_in_d2t` a table of ids is read in place of one of offsets, as damaged folders have it.
    """
    if issubclass(kind, Eagle3Head):
        return None if eagle_kind(path) is None else load_eagle_folder(path, kind, ids_in_d2t=ids_in_d2t)
    if issubclass(kind, BlockHead):
        return None if block_kind(path) is None else load_block_folder(path, kind, ids_in_d2t=ids_in_d2t)
    if issubclass(kind, MedusaHeads):
        if _is_original(path):
            return _load_original(path, kind)
        return load_vllm_medusa(path, kind) if is_vllm_medusa(path) else None
    return _load_apple(path, kind) if issubclass(kind, RedrafterHead) and _is_apple(path) else None


def _is_original(path: Path) -> bool:
    """Whether a path is a file of the original Medusa project, or a folder with one."""
    return (path.is_file() and path.suffix == ".pt") or (path.is_dir() and (path / _MEDUSA_FILE).is_file())


def _load_original(path: Path, kind: type[_Medusa]) -> _Medusa:
    """Heads of the original Medusa project, with outputs of their own, and the published tree as far as they reach.

    Raises:
        ModelError: the file is damaged, or holds something else.
    """
    file = path / _MEDUSA_FILE if path.is_dir() else path
    state = {
        name.removeprefix(_MEDUSA_PREFIX): weight
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


def _is_apple(path: Path) -> bool:
    """Whether a folder's config.json says that it is of Apple's `Drafter` format."""
    return object_of(path / _CONFIG).get("model_type") == _APPLE_TYPE


def _load_apple(path: Path, kind: type[_Redrafter]) -> _Redrafter:
    """A recurrent head of Apple's project, with an output of its own.

    Raises:
        ModelNotFoundError: there are no weights.
        ModelError: a file is damaged, or the weights are not those that config.json names.
    """
    config = _apple_sizes(path / _CONFIG)
    file = next((path / name for name in _APPLE_FILES if (path / name).is_file()), None)
    if file is None:
        raise ModelNotFoundError(f"{str(path)!r} has neither {' nor '.join(_APPLE_FILES)}; fetch one of them")
    head = kind.with_weights(config, tensors_in(file, "fetch the file again"), file, _apple_names(config))
    note = (
        f"{file.name} is of Apple's recurrent-drafting project and does not say which weights it was trained for; it "
        "is used because its sizes fit"
    )
    head.record = HeadRecord(note=note)
    return head


def _apple_sizes(path: Path) -> RedrafterConfig:
    record = object_of(path)
    try:
        width, rnn = record["hidden_size"], record["rnn"]
        if not isinstance(rnn, bool):
            raise TypeError(f"rnn is {rnn!r}")
        return RedrafterConfig(
            width=width,
            vocab_size=record["vocab_size"],
            state=width,
            exit_width=record["exit_dim"],
            layers=record["num_draft_layers"],
            tied=False,
            rnn=rnn,
            scaled=False,
        )
    except KeyError as error:
        raise ModelError(f"{str(path)!r} does not name {error.args[0]!r}; fetch it again") from error
    except (TypeError, OptionError) as error:
        raise ModelError(f"{str(path)!r} names sizes that make no head ({error}); fetch it again") from error


def _apple_names(config: RedrafterConfig) -> dict[str, str]:
    """The name of each of their weights in our head."""
    names = {f"lm_head.{config.layers}.weight": "output.weight"}
    for layer in range(config.layers):
        for part in ("weight", "bias"):
            names[f"lm_head.{layer}.linear.{part}"] = f"blocks.{layer}.linear.{part}"
    if 2 * config.width != config.exit_width:
        names |= {"input_proj.weight": "entry.weight", "input_proj.bias": "entry.bias"}
    if config.rnn:
        names |= {"rnn_w.weight": "token.weight", "rnn_u.weight": "recurrent.weight", "rnn_u.bias": "recurrent.bias"}
    return names
