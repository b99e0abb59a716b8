"""Trained drafters on disk: which there are, for which target each was trained, and those that belong to one.

A drafter says what it is in its own folder: heads in `config.json`; a draft model, whose `config.json` is that of an
ordinary model or which is a GGUF file, and a table of n-grams, which has none, in `drafter.json`. Nothing is loaded to
look for them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.drafters.kinds import trained_kinds
from truedraft.errors import ModelError, OptionError, UnsupportedModelError
from truedraft.files import cache_folder, object_of, user_path, written_whole

if TYPE_CHECKING:
    from truedraft.models.base import LanguageModel

ENGINES = ("vllm", "sglang", "llamacpp", "speculators")
"""That drafters can be written for."""
RECORD = "drafter.json"
"""In the folder of a draft model or a table: which target it was trained for."""
TABLE = "table.ngram"
"""Name of a table of n-grams in the folder that a training writes."""

_CONFIG = "config.json"
_FACTS = ("facts.json", "trees.json")  # of heads: what was measured of them
_ROUND = ("temperature", "mean_acceptance_length")
_FOLDER_OF_MODEL = "drafters"
_REGISTRY = "drafters.json"
_GROUP = "truedraft.drafters"  # of entry points: each is a package whose subfolders are drafters
_VERSION = 1
_LOCK_S = 10.0
# Tokens per target call below which no drafter can pay: of a model or heads whose single token costs a tenth of a step,
# one token in five must be accepted; a table costs next to nothing.
_LEAST_TOKENS, _LEAST_TOKENS_OF_TABLE = 1.25, 1.05


def too_few(kind: str, tokens: float) -> bool:
    """Whether so many tokens per target call cannot pay, of a drafter of some kind."""
    return tokens < (_LEAST_TOKENS_OF_TABLE if kind == "ngram" else _LEAST_TOKENS)


@dataclass(frozen=True, slots=True)
class TrainedDrafter:
    """A trained drafter, as its folder describes it.

    Attributes:
        folder: of its files.
        kind: one of `trained_kinds`.
        target_name: what its target was called when it was trained.
        fingerprint: of that target, by `LanguageModel.fingerprint`.
        sample: likewise, by `LanguageModel.sample`; None where it does not say.
        figures: what was measured of it, for JSON; `served` are rounds of the engine, each with `temperature` and
            `mean_acceptance_length`, the tokens per target call.
        source: where it was found, in words.
        vocab_size: ids that it knows; None where it does not say.
        width: entries of the target's vector that it reads; None for those that read none.
        modified: when it was written, in seconds since 1970.
    """

    folder: Path
    kind: str
    target_name: str
    fingerprint: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    vocab_size: int | None = None
    width: int | None = None
    modified: float = 0.0
    sample: str | None = None

    @classmethod
    def read(cls, folder: Path, source: str = "") -> TrainedDrafter | None:
        """The drafter in a folder; None where there is none, or none that says which target it is for."""
        config, record = object_of(folder / _CONFIG), object_of(folder / RECORD)
        about = record or config
        target = about.get("target")
        kind, target = about.get("kind"), target if isinstance(target, dict) else {}
        name, fingerprint, sample = (target.get(each) for each in ("name", "fingerprint", "sample"))
        if kind not in trained_kinds() or not isinstance(fingerprint, str):
            return None
        if not ((folder / TABLE).is_file() if kind == "ngram" else config or any(folder.glob("*.gguf"))):
            return None
        sizes = config or record
        vocab, width = (
            each if isinstance(each, int) else None for each in (sizes.get("vocab_size"), sizes.get("width"))
        )
        figures = _figures(folder) if not record else record.get("figures")
        figures = figures if isinstance(figures, dict) else {}
        written = (folder / (RECORD if record else _CONFIG)).stat().st_mtime
        sample = sample if isinstance(sample, str) else None
        return cls(folder, kind, str(name or ""), fingerprint, figures, source, vocab, width, written, sample)

    @property
    def tokens_per_call(self) -> dict[float, float]:
        """Tokens per target call by temperature, the most that the engine measured; empty where nobody did."""
        served = self.figures.get("served")
        best: dict[float, float] = {}
        for each in served if isinstance(served, list) else ():
            found = [each.get(name) for name in _ROUND] if isinstance(each, dict) else []
            temperature, tokens = found if all(isinstance(x, int | float) for x in found) and found else (None, None)
            if temperature is not None and tokens is not None:
                best[temperature] = max(tokens, best.get(temperature, 0.0))
        return best

    @property
    def most_tokens_per_call(self) -> float | None:
        """The most of all temperatures; None where nobody measured it."""
        return max(self.tokens_per_call.values(), default=None)

    @property
    def brings_too_little(self) -> bool:
        """Whether what was measured of it cannot pay; not where nobody measured it."""
        most = self.most_tokens_per_call
        return most is not None and too_few(self.kind, most)

    def may_fit(self, target: LanguageModel) -> bool:
        """Whether its sizes allow the target, which is known without reading the target's weights."""
        if self.vocab_size is not None and self.vocab_size < target.vocab_size:
            return False
        return self.width is None or self.width == target.head_width

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        target = _target(self.target_name, self.fingerprint, self.sample)
        return {"folder": str(self.folder), "kind": self.kind, "target": target, "figures": dict(self.figures)}


def _target(name: str, fingerprint: str, sample: str | None) -> dict[str, str]:
    return {"name": name, "fingerprint": fingerprint} | ({} if sample is None else {"sample": sample})


def write_record(
    folder: Path, kind: str, target_name: str, fingerprint: str, figures: Mapping[str, Any], sample: str | None = None
) -> None:
    """Let the folder of a draft model or a table say which target it was trained for, and what was measured of it.

    Raises:
        ModelError: it cannot be written.
    """
    about = {"kind": kind, "version": _VERSION, "target": _target(target_name, fingerprint, sample)}
    try:
        _write_whole(folder / RECORD, about | {"figures": dict(figures)})
    except OSError as error:
        raise ModelError(f"cannot write {str(folder / RECORD)!r} ({error.strerror}); make room there") from error


class Registry:
    """Folders of the drafters that this user trained, wherever they lie: a file in the user's cache folder.

    Args:
        file: None is that of the user.
    """

    def __init__(self, file: Path | None = None) -> None:

        self.file = cache_folder() / _REGISTRY if file is None else file

    def drafters(self) -> list[TrainedDrafter]:
        """Those that are still where they were written; what the folder says now is what they are."""
        kept = (TrainedDrafter.read(Path(entry["folder"]), "trained here") for entry in self._entries())
        return [each for each in kept if each is not None]

    def add(self, drafter: TrainedDrafter) -> str | None:
        """Keep a drafter, in place of what was kept of its folder; returns a sentence where that was not possible."""
        from filelock import FileLock, Timeout

        entry = drafter.as_dict() | {"folder": str(drafter.folder.resolve())}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.file.with_suffix(".lock"), timeout=_LOCK_S):
                others = [each for each in self._entries() if each["folder"] != entry["folder"]]
                _write_whole(self.file, {"version": _VERSION, "drafters": [*others, entry]})
        except (OSError, Timeout) as error:
            reason = getattr(error, "strerror", None) or "another process holds its lock"
            return f"{drafter.folder} could not be noted in {self.file} ({reason}); name it with --drafter"
        return None

    def _entries(self) -> list[dict[str, Any]]:
        entries = object_of(self.file).get("drafters")
        known = entries if isinstance(entries, list) else []
        return [each for each in known if isinstance(each, dict) and isinstance(each.get("folder"), str)]


def list_drafters(model: str | None = None, drafters_dir: Iterable[str | Path] = ()) -> list[TrainedDrafter]:
    """All trained drafters that can be found, whatever target they are for; each folder once.

    Args:
        model: a model's folder, which may hold drafters; None or another name has none.
        drafters_dir: folders whose subfolders, or which themselves, are drafters.

    Raises:
        OptionError: such a folder does not exist.
    """
    found: dict[Path, TrainedDrafter] = {}
    for each in _everywhere(model, drafters_dir):
        found.setdefault(each.folder.resolve(), each)
    return list(found.values())


def find_drafters(
    target: LanguageModel, drafters_dir: Iterable[str | Path] = (), tell: Callable[[str], None] = lambda sentence: None
) -> list[TrainedDrafter]:
    """The trained drafters that belong to a target: those that name its weights, by kind, the newest first.

    Args:
        target: whose weights are read for its fingerprint, once, where the sizes of a drafter allow it and that one
            names no sample of them.
        drafters_dir: folders of drafters to look into, too.
        tell: given a sentence where the fingerprint cannot be known.

    Raises:
        OptionError: such a folder does not exist.
    """
    from truedraft.models.padding import unpadded_name

    fitting = [each for each in list_drafters(unpadded_name(target.name), drafters_dir) if each.may_fit(target)]
    try:
        sample = target.sample if any(each.sample for each in fitting) else None
        own = [
            each
            for each in fitting
            if (each.sample == sample if sample and each.sample else each.fingerprint == target.fingerprint)
        ]
    except UnsupportedModelError:  # no weights, so nothing was trained for it
        return []
    except ModelError as error:
        tell(f"no trained drafter can be found: {error}")
        return []
    return sorted(own, key=lambda each: (trained_kinds().index(each.kind), -each.modified))


def _everywhere(model: str | None, drafters_dir: Iterable[str | Path]) -> Iterator[TrainedDrafter]:
    if model is not None:
        yield from _in_folder(Path(model) / _FOLDER_OF_MODEL, "the model's own folder")
    for each in drafters_dir:
        folder = refuse_no_folder(each)
        alone = TrainedDrafter.read(folder, "--drafters-dir")
        yield from () if alone is None else (alone,)
        yield from _in_folder(folder, "--drafters-dir")
    yield from Registry().drafters()
    for package in metadata.entry_points(group=_GROUP):
        with contextlib.suppress(ImportError, ValueError):  # what somebody's package says wrongly is no drafter
            spec = find_spec(package.value)  # which finds it without running it
            for place in (spec.submodule_search_locations or ()) if spec is not None else ():
                yield from _in_folder(Path(place), f"the package {package.value}")


def refuse_no_folder(typed: str | Path) -> Path:
    """A folder of drafters as it is typed.

    Raises:
        OptionError: there is no such folder.
    """
    folder = user_path(typed, OptionError)
    if not folder.is_dir():
        raise OptionError(f"must be a folder of drafters, and {str(typed)!r} is no folder", field="drafters_dir")
    return folder


def _in_folder(folder: Path, source: str) -> list[TrainedDrafter]:
    """The drafters in the subfolders of a folder."""
    try:
        inner: Sequence[Path] = sorted(folder.iterdir())
    except OSError:
        return []
    found = (TrainedDrafter.read(each, source) for each in inner)
    return [each for each in found if each is not None]


def _figures(folder: Path) -> dict[str, Any]:
    """What was measured of heads in the engine."""
    for name in _FACTS:
        kept = object_of(folder / name)
        facts = kept.get("facts", kept)
        if isinstance(facts, dict) and "served" in facts:
            return {"served": facts["served"]}
    return {}


def _write_whole(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, see `written_whole`."""
    with written_whole(file) as made:
        made.write(json.dumps(content, indent=1).encode() + b"\n")
