"""The files of a model in a folder or on the hub, and the tensors in their headers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from truedraft.errors import ModelError, first_line
from truedraft.models.mapped import in_memory


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in an open safetensors file, with the type and shape in its header."""

    file: Any
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """The tensor, in memory."""
        return in_memory(self.file.get_tensor(self.name))


def tensors_of(source: str, name: str, revision: str | None) -> dict[str, Place]:
    """The tensors in a model's safetensors files, by their names; empty if it has other files. None is read.

    Raises:
        ModelError: a file is missing or cannot be read.
    """
    found: dict[str, Place] = {}
    try:
        for path in weight_files(source, name, revision):
            file = safe_open(path, framework="pt")
            for tensor in file.keys():  # noqa: SIM118 - it is no dict
                part = file.get_slice(tensor)
                found[tensor] = Place(file, tensor, part.get_dtype(), tuple(part.get_shape()))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot load the weights of {name!r}: {first_line(error)}; fetch them again") from error
    return found


def file_of(source: str, name: str, revision: str | None) -> str | None:
    """The path of a file of a folder or a hub name; None if there is none."""
    found: str | None = cached_file(
        source,
        name,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return found


def weight_files(source: str, name: str, revision: str | None) -> list[str]:
    """The safetensors files with a folder's weights; empty if it has others."""
    whole = file_of(source, "model.safetensors", revision)
    if whole is not None:
        return [whole]
    index = file_of(source, "model.safetensors.index.json", revision)
    if index is None:
        return []
    try:
        files, _ = get_checkpoint_shard_files(source, index, revision=revision)
        if Path(source).is_dir() and (lost := [each for each in files if not Path(each).is_file()]):
            raise ModelError(f"{name!r} lacks {Path(lost[0]).name}, a file of its weights; fetch it again")
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ModelError(f"cannot load the weights of {name!r}: {first_line(error)}") from error
    return list(files)
