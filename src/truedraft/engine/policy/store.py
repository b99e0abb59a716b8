"""Measured costs, kept in the user's cache folder as one JSON file each, and their keys."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from truedraft.core.params import SamplingParams
from truedraft.drafters.base import Drafter
from truedraft.errors import OptionError
from truedraft.files import cache_folder, could_not_be_kept, written_whole
from truedraft.machine import this_machine, versions
from truedraft.models.base import LanguageModel
from truedraft.options import read_record

Value = TypeVar("Value")
_FORMAT = 3  # earlier ones may hold forwards of GPUs that were only being captured
LITTLE_DOUBT = 0.1
"""Doubt up to which a measurement is final; one in more doubt is used until there is a better one."""
_REST_S = 60.0
_ALIKE = 1.15
_NOT_OF_THE_MODEL = {"transformers_version", "dtype", "torch_dtype"}


@dataclass(frozen=True, slots=True)
class CostKey:
    """Identity of a kept cost.

    Attributes:
        what: in words, for messages, as "forwards of embedded:target".
        place: names the file: another value here is another file.
        state: must equal the state at the measurement; else the cost is stale.
    """

    what: str
    place: Mapping[str, Any]
    state: Mapping[str, Any]

    @property
    def file_name(self) -> str:
        text = json.dumps([self.what, self.place], sort_keys=True, default=str)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


class CostStore:
    """Keeps and finds costs. Problems with a file are returned as a warning of one sentence, never raised.

    Args:
        folder: None is "costs" in the user's cache folder.
        clock: seconds, the same for all programs.
    """

    def __init__(self, folder: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self.folder = cache_folder() / "costs" if folder is None else folder
        self.clock = clock

    def describe(self) -> str:
        """How many costs are kept, and where, in one line."""
        count = sum(1 for _ in self.folder.rglob("*.json"))  # those of short measurements, in a folder below, too
        kept = f"{count} kept in {self.folder}" if count else "none kept yet"
        return f"{kept}; measured when first asked for"

    def path(self, key: CostKey) -> Path:
        return self.folder / key.file_name

    def load(
        self, key: CostKey, kind: type[Value], most_doubt: float = LITTLE_DOUBT
    ) -> tuple[Value | None, str | None]:
        """The kept cost, or None; and a warning if there is a file that cannot be used.

        Args:
            most_doubt: largest doubt of a usable cost, see `save`.
        """
        path = self.path(key)
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        except (OSError, ValueError) as error:
            return None, f"the kept costs of {key.what} in {path} cannot be read ({error}); they are measured again"
        if not isinstance(kept, dict) or kept.get("format") != _FORMAT or not isinstance(kept.get("state"), dict):
            return None, f"the kept costs of {key.what} in {path} are of no known format; they are measured again"
        changed = _changed(kept["state"], json.loads(json.dumps(key.state, default=str)))
        if changed:
            return None, f"the kept costs of {key.what} are stale ({changed}); they are measured again"
        if kept.get("doubted"):
            taken = f"steps took {kept.get('parted')} times what they say"
            return None, f"the kept costs of {key.what} are measured again, for {taken}"
        if _doubt_of(kept) > most_doubt:
            return None, None
        try:
            return read_record(kind, kept.get("cost")), None
        except OptionError as error:
            return None, f"the kept costs of {key.what} in {path} are damaged ({error}); they are measured again"

    def doubt(self, key: CostKey) -> float:
        """Doubt of a kept cost, see `save`; 1 where no valid one is kept."""
        kept, state = self._kept(key), json.loads(json.dumps(key.state, default=str))
        holds = kept.get("format") == _FORMAT and kept.get("state") == state and not kept.get("doubted")
        return _doubt_of(kept) if holds else 1.0

    def save(self, key: CostKey, cost: Mapping[str, Any], doubt: float = 0.0) -> str | None:
        """Keep a cost: whole or not at all; a cost in doubt does not replace one in less doubt.

        Args:
            doubt: share in [0, 1] of its time in which other programs had the cores, or of its rounds that are missing.

        Returns:
            A warning where it could not be written, the same for all costs.
        """
        if doubt > LITTLE_DOUBT and self.doubt(key) < doubt:
            return None
        record = {"format": _FORMAT, "what": key.what, "place": key.place, "state": key.state, "cost": cost}
        record |= {"measured_at": self.clock(), "parted": self._kept(key).get("parted"), "doubt": round(doubt, 3)}
        return self._write(key, record)

    def judge(self, key: CostKey, ratio: float, parted: bool) -> None:
        """Record how step times compare with a kept cost; after a deviation `load` no longer returns it.

        Not within a minute after it was measured, nor where the ratio is the same as before the last measurement: then
        measuring again would not change it.

        Args:
            key: nothing happens where none is kept.
            ratio: seconds of steps over those of the cost.
            parted: whether that is too far from 1.
        """
        kept = self._kept(key)
        before = kept.get("parted")
        if not parted:
            if before is not None:
                self._write(key, kept | {"parted": None, "doubted": False})
            return
        usual = isinstance(before, int | float) and before / _ALIKE <= ratio <= before * _ALIKE
        if kept and not usual and not kept.get("doubted") and self.clock() - kept.get("measured_at", 0.0) >= _REST_S:
            self._write(key, kept | {"parted": round(ratio, 2), "doubted": True})

    def _kept(self, key: CostKey) -> dict[str, Any]:
        try:
            kept = json.loads(self.path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) else {}

    def _write(self, key: CostKey, record: Mapping[str, Any]) -> str | None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with written_whole(self.path(key)) as file:
                file.write(json.dumps(record, indent=1, default=str).encode())
        except OSError as error:
            return could_not_be_kept(self.folder, error.strerror or str(error))
        return None


def _doubt_of(kept: Mapping[str, Any]) -> float:
    found = kept.get("doubt", 0.0)  # earlier versions kept nothing that was in doubt
    return float(found) if isinstance(found, int | float) else 1.0


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if old != new:
            if isinstance(old, dict) and isinstance(new, dict):
                return _changed(old, new)
            return f"{name} was {_short(old)}, now {_short(new)}"
    return ""


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def target_key(model: LanguageModel) -> CostKey:
    """Key of the cost of a target's forwards."""
    return CostKey(f"forwards of {model.name}", _place(model), {"model": model_identity(model), "versions": versions()})


def drafter_key(drafter: Drafter, target: LanguageModel, params: SamplingParams) -> CostKey:
    """Key of the cost of a drafter's proposals for a target."""
    place = _place(target) | {"drafter": drafter_identity(drafter, params)}
    sizes = {"vocab_size": target.vocab_size, "context_length": target.context_length}
    return CostKey(f"drafter {drafter.name} for {target.name}", place, {"target": sizes, "versions": versions()})


def _place(model: LanguageModel) -> dict[str, Any]:
    """Machine, threads, device, model, dtype and fast paths: another value of one is another cost, not a newer one."""
    return {
        "machine": this_machine(model.device),
        "model": model.name,
        "dtype": str(model.dtype),
        "fast_paths": list(model.fast_paths),
    }


def model_identity(model: LanguageModel) -> dict[str, Any]:
    """A model's sizes and configuration; the values of its weights do not change its costs."""
    config = getattr(getattr(model, "module", None), "config", None)
    return {
        "class": type(model).__qualname__,
        "parameters": model.parameters,
        "weight_bytes": model.weight_bytes,
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "config": None if config is None else _digest(_plain(config.to_dict())),
    }


def drafter_identity(drafter: Drafter, params: SamplingParams) -> dict[str, Any]:
    """A drafter's limits, public options and models, and how its tokens are sampled."""
    return _drafter(drafter) | {"law": list(params.probs_key), "coupled": params.seeded}


def _drafter(drafter: Drafter) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in sorted(getattr(drafter, "__dict__", {}).items()):
        if name.startswith("_") or name == "limits":
            continue
        if isinstance(value, LanguageModel):
            options[name] = model_identity(value) | {"name": value.name, "dtype": str(value.dtype)}
        elif isinstance(value, Drafter):
            options[name] = _drafter(value)
        elif value is None or isinstance(value, bool | int | float | str):
            options[name] = value
        elif isinstance(value, tuple | list) and all(isinstance(item, int | float | str) for item in value):
            options[name] = list(value)
    return {"class": type(drafter).__qualname__, "limits": asdict(drafter.limits), "options": options}


def _plain(value: Any) -> Any:
    """A configuration without what loading added to it."""
    if isinstance(value, dict):
        kept = {str(name): _plain(each) for name, each in value.items()}
        return {name: each for name, each in kept.items() if name[:1] != "_" and name not in _NOT_OF_THE_MODEL}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
