"""The header of a GGUF file, or of all parts of a model: its fields, and the locations of its tensors.

Files are untrusted: each length is compared with the remaining bytes before it is used.
"""

from __future__ import annotations

import mmap
import re
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from truedraft.errors import MissingExtraError, ModelError, UnsupportedModelError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ENTRIES = 1 << 22  # of a header and its lists; the largest vocabularies with their merges have a third of it
_AXES = 4  # ggml's limit
_ALIGNMENT = 32
_ONE_READER = threading.Lock()  # a file has a single read position
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of a tensor."""

    name: str
    place: str  # transformers' name of the parameter; "" if the model has none
    kind: str  # ggml's name of its type; its number if the package `gguf` has no name
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    size: int
    part: int = 0  # index of its file in `Header.files`

    def data(self, files: Sequence[BinaryIO], first: int = 0, end: int | None = None) -> NDArray[np.uint8]:
        """Bytes `[end - first, bytes of an output]` of outputs from `first` to `end`; of a vector `[bytes]`.

        Read, not mapped: a truncated mapped file would kill the process. Raises ModelError if the file ends before.
        """
        file, each = files[self.part], self.size // self.shape[0]
        requested = ((self.shape[0] if end is None else end) - first) * each
        with _ONE_READER:
            file.seek(self.offset + first * each)
            found = np.fromfile(file, np.uint8, requested)
        if len(found) < requested:
            raise ModelError(f"the file was cut short while {self.name!r} was read from it; get it again")
        return found.reshape(-1, each) if len(self.shape) > 1 else found


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a model's files: all parts in order, the first part's values by keys, and all parts' tensors."""

    files: list[Path]
    fields: dict[str, Any]
    tensors: list[StoredTensor]


_Content: TypeAlias = tuple[dict[str, Any], list[StoredTensor]]  # of one file
_Sizes: TypeAlias = dict[int, tuple[str, int, int]]  # by type: its name, weights of a block, bytes of a block


class _DamagedError(Exception):
    """What is wrong with a file; the message continues a sentence that begins with its name."""


_CUT_OFF = "is cut off or damaged"


class _Bytes:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._left = _ENTRIES
        self.at = 0

    def count_entries(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise _DamagedError(f"says more than {_ENTRIES} values, which no model does")

    def numbers(self, form: str) -> tuple[Any, ...]:
        begin, size = self.at, struct.calcsize("<" + form)
        if size > len(self._data) - begin:
            raise _DamagedError(_CUT_OFF)
        self.at = begin + size
        return struct.unpack_from("<" + form, self._data, begin)

    def texts(self, count: int) -> list[str]:
        """Read several strings at once, because a vocabulary with its merges has hundreds of thousands."""
        data, at, end, found, length = self._data, self.at, len(self._data), [], struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + length(data, at)[0]
                if at > end:
                    raise _DamagedError(_CUT_OFF)
                found.append(data[begin:at].decode())
        except (struct.error, UnicodeDecodeError) as error:
            raise _DamagedError(_CUT_OFF) from error
        self.at = at
        return found

    def value(self, key: str) -> Any:
        (kind,) = self.numbers("I")
        if kind == _ARRAY:
            kind, count = self.numbers("IQ")
            self.count_entries(count)
            if kind == _STRING:
                return self.texts(count)
            if kind == _ARRAY:
                raise _DamagedError(f"has lists in a list ({key!r})")
            return list(self.numbers(f"{count}{self._scalar(kind, key)}"))
        return self.texts(1)[0] if kind == _STRING else self.numbers(self._scalar(kind, key))[0]

    def _scalar(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise _DamagedError(f"has a value of an unknown type ({kind}, of {key[:100]!r})")
        return _SCALARS[kind]


def parts_of(path: Path) -> list[Path]:
    """All files of the model that a file belongs to, by llama.cpp's names of parts; most models have one."""
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    name, _, count = named.groups()
    return [path.with_name(f"{name}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]


def read_header(path: Path) -> Header:
    """The header of a model, all its parts together; `path` is any of them.

    Raises ModelError: a file is broken, or a part is missing or of another model; UnsupportedModelError: the file is
    big-endian; MissingExtraError: the package `gguf` is not installed.
    """
    files = parts_of(path)
    if path not in files:
        raise ModelError(f"{path.name!r} names a part that a model of {len(files)} files has not; name it as it was")
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise ModelError(
            f"{str(path)!r} is a part of a model in {len(files)} files, and {missing.name!r} is not in its folder; "
            "fetch all of them"
        )
    parts = [_one(file, number) for number, file in enumerate(files)]
    header = Header(files, parts[0][0], [tensor for _, tensors in parts for tensor in tensors])
    if len(files) > 1 or header.fields.get("split.count", 1) not in (0, 1):
        _check_same_model(path, files, parts)
    return header


def _check_same_model(path: Path, files: list[Path], parts: list[_Content]) -> None:
    first, count = parts[0][0], len(parts)
    if count == 1:
        raise ModelError(
            f"{str(path)!r} is one of {first['split.count']} parts of a model, and the others are found by names that "
            "end in -00001-of-00002.gguf; give it the name that it had"
        )
    names: set[str] = set()
    for number, (said, found) in enumerate(parts):
        file = files[number].name
        if (said.get("split.no"), said.get("split.count")) != (number, count):
            raise ModelError(
                f"{str(path)!r} is a part of a model, and {file!r} says that it is part {said.get('split.no')} (from "
                f"0) of {said.get('split.count')}; fetch that again"
            )
        tensors = {each.name for each in found}
        if names & tensors or any(first.get(key) != said[key] for key in said if key != "split.no"):
            raise ModelError(f"{str(path)!r} is a part of a model, and {file!r} is of another; fetch that again")
        names |= tensors
    if len(names) != first.get("split.tensors.count"):
        raise ModelError(
            f"{str(path)!r} is a part of a model of {first.get('split.tensors.count')} tensors, and its parts have "
            f"{len(names)}, so one is of another model; fetch all of them again"
        )


def _one(path: Path, part: int) -> _Content:
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise MissingExtraError(
            f"{str(path)!r} is a GGUF file, and the package that reads these is not installed; run pip install "
            "'truedraft[gguf]'"
        ) from error
    sizes = {kind.value: (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    with path.open("rb") as file:
        begin = file.read(8)
        if begin[:4] != _MAGIC:
            raise ModelError(f"{str(path)!r} is no GGUF file: it begins with {begin[:4]!r}; fetch it again")
        version = int.from_bytes(begin[4:], "little")
        if len(begin) == 8 and version and version & 0xFFFF == 0:
            raise UnsupportedModelError(
                f"{str(path)!r} is written for big-endian machines; turn it by python -m "
                "gguf.scripts.gguf_convert_endian FILE little"
            )
        try:
            if version not in (2, 3):
                raise _DamagedError(f"is of version {version}, cut off or damaged")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(_Bytes(data), len(data), sizes, part)
        except _DamagedError as error:
            raise ModelError(f"{str(path)!r} {error}; fetch it again") from error


def _read(content: _Bytes, length: int, sizes: _Sizes, part: int) -> _Content:
    content.at = 8
    count, keys = content.numbers("QQ")
    fields: dict[str, Any] = {}
    for _ in range(keys):
        content.count_entries(1)
        key = content.texts(1)[0]
        if key in fields:
            raise _DamagedError(f"says {key[:100]!r} twice")
        fields[key] = content.value(key)
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        content.count_entries(1)
        name = content.texts(1)[0]
        (axes,) = content.numbers("I")
        if name in found or not 1 <= axes <= _AXES:
            raise _DamagedError(f"has the tensor {name[:100]!r} twice, or with {axes} axes")
        found[name] = (content.numbers(f"{axes}Q")[::-1], *content.numbers("IQ"))
    # Tensors must be contiguous, as ggml requires, so that none is in memory twice.
    alignment = fields.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _DamagedError(f"aligns tensors to {alignment!r} bytes, which is no power of two")
    begin = -(-content.at // alignment) * alignment
    expected, tensors = 0, []
    for name, (shape, number, offset) in found.items():
        kind, together, size = sizes.get(number, (str(number), 1, 0))
        whole = prod(shape) // together * size
        if 0 in shape or shape[-1] % together:
            raise _DamagedError(f"has the tensor {name[:100]!r} of the shape {list(shape)}, which {kind} cannot have")
        if size and (offset != expected or begin + offset + whole > length):
            raise _DamagedError(_CUT_OFF)
        expected += -(-whole // alignment) * alignment
        tensors.append(StoredTensor(name, "", kind, shape, begin + offset, whole, part))
        if not size:  # what follows it cannot be located
            break
    return fields, tensors
