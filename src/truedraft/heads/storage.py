"""Heads on disk: one folder, which names the target that they were trained for.

`config.json` holds the kind, the sizes and the target, and `heads.safetensors` the weights; other JSON files may lie
beside them. `config.json` is written last, so that half a checkpoint is none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from truedraft.errors import ModelError, ModelNotFoundError, OptionError

AGAIN = "fetch or train the heads again"
"""What to do about a damaged file."""
_VERSION = 1
_CONFIG, _WEIGHTS = "config.json", "heads.safetensors"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_NOUNS = {"medusa": "Medusa heads", "redrafter": "a recurrent drafter"}
_Heads = TypeVar("_Heads", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class NamedTarget:
    """Which target heads were trained for.

    Attributes:
        name: what it was called.
        fingerprint: of its weights, by `fingerprint_of` or `LanguageModel.fingerprint`.
    """

    name: str
    fingerprint: str


@dataclass(frozen=True)
class HeadFiles(Generic[_Heads]):
    """How one kind of heads lies on disk.

    Attributes:
        name: in `config.json`, of the command that trains them, and of the drafter that takes them.
        sizes: the dataclass of their sizes.
        make: from sizes to heads.
    """

    name: str
    sizes: type[Any]
    make: Callable[[Any], _Heads]

    @property
    def noun(self) -> str:
        """What messages call them."""
        return _NOUNS[self.name]

    def save(
        self,
        path: Path,
        heads: _Heads,
        sizes: Any,
        target: NamedTarget,
        beside: Mapping[str, Mapping[str, Any]],
        dtype: torch.dtype,
    ) -> None:
        """Write heads into a folder; what an earlier checkpoint left there is replaced.

        Args:
            path: is made if it does not exist.
            heads: any device and dtype.
            sizes: of them.
            target: of them.
            beside: further files, by their names: what JSON can hold.
            dtype: of the written weights: bfloat16, float16 or float32.

        Raises:
            ModelError: the files cannot be written.
        """
        record = {"kind": self.name, "version": _VERSION, "target": asdict(target)}
        record |= {"dtype": str(dtype).removeprefix("torch."), **asdict(sizes)}
        weights = {part: weight.detach().to("cpu", dtype).contiguous() for part, weight in heads.state_dict().items()}
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / _CONFIG).unlink(missing_ok=True)
            save_file(weights, path / _WEIGHTS)
            (path / _WEIGHTS).chmod(0o644)  # safetensors writes files that only their owner can read
            for name, content in beside.items():
                (path / name).write_text(json.dumps(content) + "\n", encoding="utf-8")
            (path / _CONFIG).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"cannot write the heads into {str(path)!r} ({error}); make room, or name another folder"
            ) from error

    def load(self, path: Path) -> tuple[_Heads, NamedTarget]:
        """Heads in evaluation mode, without gradients, on the CPU, in the dtype in which they were written.

        Raises:
            ModelNotFoundError: there is no such folder, or no heads in it.
            ModelError: a file is damaged, does not fit the others, or holds heads of another kind.
        """
        if not path.is_dir():
            raise ModelNotFoundError(f"there is no folder {str(path)!r} with {self.noun}; check the path")
        if not (path / _CONFIG).is_file():
            raise ModelNotFoundError(
                f"the folder {str(path)!r} has no {_CONFIG}, so it does not hold {self.noun}; name one that "
                f"`truedraft train {self.name}` wrote"
            )
        record = read_json(path / _CONFIG)
        self._refuse_other_kinds(record, path)
        try:
            sizes = self.sizes(**{each.name: record[each.name] for each in fields(self.sizes)})
            target = NamedTarget(str(record["target"]["name"]), str(record["target"]["fingerprint"]))
            dtype = _DTYPES[record["dtype"]]
        except (KeyError, TypeError, OptionError) as error:
            raise ModelError(f"{str(path / _CONFIG)!r} is damaged ({error}); {AGAIN}") from error
        return self._weights(path / _WEIGHTS, sizes, dtype), target

    def _refuse_other_kinds(self, record: dict[str, Any], path: Path) -> None:
        kind, version = record.get("kind"), record.get("version")
        if kind != self.name and kind in _NOUNS:
            raise ModelError(f"{str(path)!r} holds {_NOUNS[kind]}, not {self.noun}; use {kind}:{path}")
        if kind != self.name:
            raise ModelError(
                f"{str(path / _CONFIG)!r} is not of {self.noun} (its kind is {kind!r}); name a folder with {self.noun}"
            )
        if version != _VERSION:
            raise ModelError(
                f"{str(path / _CONFIG)!r} is of version {version!r}, and this truedraft reads version {_VERSION}; "
                "train the heads again, or install the truedraft that wrote them"
            )

    def _weights(self, path: Path, sizes: Any, dtype: torch.dtype) -> _Heads:
        """Heads with all of their weights and no others."""
        if not path.is_file():
            raise ModelNotFoundError(f"{str(path)!r} is missing; {AGAIN}")
        with torch.device("meta"):
            heads = self.make(sizes)
        try:
            weights = load_file(path)
            heads.load_state_dict({name: each.to(dtype) for name, each in weights.items()}, strict=True, assign=True)
        except (OSError, SafetensorError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise ModelError(
                f"{str(path)!r} is damaged, or not of the sizes that {_CONFIG} names ({reason}); {AGAIN}"
            ) from error
        return heads.eval().requires_grad_(False)


def expanded(folder: Path | str) -> Path:
    """A path with its ~ replaced.

    Raises:
        ModelNotFoundError: there is no such home.
    """
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise ModelNotFoundError(f"there is no home for the ~ of {str(folder)!r}; check the path") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelError: it holds something else.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{str(path)!r} is missing; {AGAIN}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {str(path)!r} ({error}); {AGAIN}") from error
    if not isinstance(record, dict):
        raise ModelError(f"{str(path)!r} does not hold a JSON object; {AGAIN}")
    return record
