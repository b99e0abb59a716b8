"""Trained drafters on disk: finds them, and selects those for a target.

Heads describe themselves in `config.json`, draft models and n-gram tables in `drafter.json`. It loads no weights.
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
"""The engines that drafters can be exported for."""
RECORD = "drafter.json"
"""File in the folder of a draft model or a table that names its target."""
TABLE = "table.ngram"
IDS = "draft_ids.json"
"""Name of an n-gram table in the output folder of a training."""

_CONFIG = "config.json"
_FACTS = ("facts.json", "trees.json")  # of heads: measurements
_ROUND = ("temperature", "mean_acceptance_length")
_FOLDER_OF_MODEL = "drafters"
_REGISTRY = "drafters.json"
_GROUP = "truedraft.drafters"  # of entry points: each is a package with drafters as subfolders
_VERSION = 1
_LOCK_S = 10.0
# Tokens per target call for a speedup: if a token of a model costs a tenth of a step, one in five must be accepted.
_LEAST_TOKENS, _LEAST_TOKENS_OF_TABLE = 1.25, 1.05


def too_few(kind: str, tokens: float) -> bool:
    """Whether so many tokens per target call give no speedup with this kind of drafter."""
    return tokens < (_LEAST_TOKENS_OF_TABLE if kind == "ngram" else _LEAST_TOKENS)


@dataclass(frozen=True, slots=True)
class TrainedDrafter:
    """A trained drafter, as its folder describes it.

    Attributes:
        fingerprint: of the target at training, by `LanguageModel.fingerprint`.
        figures: measurements, for JSON; `served` are rounds of the engine, each with `temperature` and
            `mean_acceptance_length`, the tokens per target call.
        width: of the hidden states that it reads; None if it reads none.
        modified: in seconds since 1970.
        sample: `LanguageModel.sample` of the target.
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
        """The drafter in a folder; None if there is none, or if it does not name its target."""
        config, record = object_of(folder / _CONFIG), object_of(folder / RECORD)
        about = record or config
        kind, target = about.get("kind"), about.get("target")
        named = target if isinstance(target, dict) else {}
        name, fingerprint, sample = (named.get(each) for each in ("name", "fingerprint", "sample"))
        if kind not in trained_kinds() or not isinstance(fingerprint, str):
            return None
        if not ((folder / TABLE).is_file() if kind == "ngram" else config or any(folder.glob("*.gguf"))):
            return None
        vocab, width = map((config or record).get, ("vocab_size", "width"))
        figures = record.get("figures") if record else _figures(folder)
        return cls(
            folder,
            kind,
            str(name or ""),
            fingerprint,
            figures if isinstance(figures, dict) else {},
            source,
            vocab_size=vocab if isinstance(vocab, int) else None,
            width=width if isinstance(width, int) else None,
            modified=(folder / (RECORD if record else _CONFIG)).stat().st_mtime,
            sample=sample if isinstance(sample, str) else None,
        )

    @property
    def bound(self) -> dict[str, str]:
        """The option `context` that goes with its training; none where the folder does not say how long texts were."""
        context = self.figures.get("context")
        return {"context": str(context)} if isinstance(context, int) else {}

    @property
    def tokens_per_call(self) -> dict[float, float]:
        """The most measured tokens per target call in the engine, by temperature."""
        served = self.figures.get("served")
        best: dict[float, float] = {}
        for each in served if isinstance(served, list) else ():
            temperature, tokens = map(each.get, _ROUND) if isinstance(each, dict) else (None, None)
            if isinstance(temperature, int | float) and isinstance(tokens, int | float):
                best[temperature] = max(tokens, best.get(temperature, 0.0))
        return best

    @property
    def most_tokens_per_call(self) -> float | None:
        return max(self.tokens_per_call.values(), default=None)

    @property
    def brings_too_little(self) -> bool:
        """Whether it was measured to give too few tokens per target call for a speedup."""
        most = self.most_tokens_per_call
        return most is not None and too_few(self.kind, most)

    def may_fit(self, target: LanguageModel) -> bool:
        """Whether its sizes fit the target, without reading the target's weights."""
        if self.vocab_size is not None and self.vocab_size < target.vocab_size:
            return False
        return self.width is None or self.width == target.head_width

    def as_dict(self) -> dict[str, Any]:
        target = _target(self.target_name, self.fingerprint, self.sample)
        return {"folder": str(self.folder), "kind": self.kind, "target": target, "figures": dict(self.figures)}


def _target(name: str, fingerprint: str, sample: str | None) -> dict[str, str]:
    return {"name": name, "fingerprint": fingerprint} | ({} if sample is None else {"sample": sample})


def write_record(
    folder: Path, kind: str, target_name: str, fingerprint: str, figures: Mapping[str, Any], sample: str | None = None
) -> None:
    """Record a draft model's or table's target and measurements; raises `ModelError` if that fails."""
    about = {"kind": kind, "version": _VERSION, "target": _target(target_name, fingerprint, sample)}
    try:
        _write_whole(folder / RECORD, about | {"figures": dict(figures)})
    except OSError as error:
        raise ModelError(f"cannot write {str(folder / RECORD)!r} ({error.strerror}); make room there") from error


def write_draft_ids(folder: Path, ids: Sequence[int]) -> None:
    """Record the ids among which a draft model guesses, the most frequent first; none: all. Raises OSError."""
    if not ids:
        (folder / IDS).unlink(missing_ok=True)
        return
    with written_whole(folder / IDS) as made:
        made.write(json.dumps({"ids": list(ids)}).encode() + b"\n")


def read_draft_ids(folder: Path, vocab_size: int, count: int | None = None) -> list[int] | None:
    """The first `count` of the recorded ids (all by default); None without a record, or with none left out.

    Raises `ModelError` if they are not different ids of the vocabulary.
    """
    if not (folder / IDS).is_file():
        return None
    found = object_of(folder / IDS).get("ids")
    ids: list[Any] = found if isinstance(found, list) else []
    known = all(isinstance(each, int) and 0 <= each < vocab_size for each in ids)
    if not ids or not known or len(set(ids)) < len(ids):
        raise ModelError(
            f"{str(folder / IDS)!r} does not name different ids below {vocab_size}; remove it, then the draft guesses "
            "among all ids"
        )
    some = ids if count is None else ids[:count]
    return some if some and len(some) < vocab_size else None


class Registry:
    """This user's trained drafters, listed in a file in the cache folder."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = cache_folder() / _REGISTRY if file is None else file

    def drafters(self) -> list[TrainedDrafter]:
        kept = (TrainedDrafter.read(Path(entry["folder"]), "trained here") for entry in self._entries())
        return [each for each in kept if each is not None]

    def add(self, drafter: TrainedDrafter) -> str | None:
        """Add a drafter, or replace it; returns an error message if this fails."""
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
    """All trained drafters that can be found, for any target; each folder once.

    Args:
        model: a model's folder, which may hold drafters.
        drafters_dir: folders that are drafters, or have drafters as subfolders; `OptionError` if there is none.
    """
    found: dict[Path, TrainedDrafter] = {}
    for each in _everywhere(model, drafters_dir):
        found.setdefault(each.folder.resolve(), each)
    return list(found.values())


def find_drafters(
    target: LanguageModel, drafters_dir: Iterable[str | Path] = (), tell: Callable[[str], None] = lambda sentence: None
) -> list[TrainedDrafter]:
    """The trained drafters for a target's weights, by kind, the newest first; folders and errors of `list_drafters`.

    Args:
        target: its weights are read for its fingerprint if a drafter of fitting sizes has no sample of them.
        tell: called with a sentence if the fingerprint cannot be computed.
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
        single = TrainedDrafter.read(folder, "--drafters-dir")
        yield from () if single is None else (single,)
        yield from _in_folder(folder, "--drafters-dir")
    yield from Registry().drafters()
    for package in metadata.entry_points(group=_GROUP):
        with contextlib.suppress(ImportError, ValueError):  # an invalid entry point is ignored
            spec = find_spec(package.value)  # finds it without importing it
            for place in (spec.submodule_search_locations or ()) if spec is not None else ():
                yield from _in_folder(Path(place), f"the package {package.value}")


def refuse_no_folder(typed: str | Path) -> Path:
    """A folder of drafters; raises `OptionError` if there is none."""
    folder = user_path(typed, OptionError)
    if not folder.is_dir():
        raise OptionError(f"must be a folder of drafters, and {str(typed)!r} is no folder", field="drafters_dir")
    return folder


def _in_folder(folder: Path, source: str) -> list[TrainedDrafter]:
    try:
        inner: Sequence[Path] = sorted(folder.iterdir())
    except OSError:
        return []
    found = (TrainedDrafter.read(each, source) for each in inner)
    return [each for each in found if each is not None]


def _figures(folder: Path) -> dict[str, Any]:
    for name in _FACTS:
        kept = object_of(folder / name)
        facts = kept.get("facts", kept)
        if isinstance(facts, dict) and "served" in facts:
            return {"served": facts["served"]}
    return {}


def _write_whole(file: Path, content: Mapping[str, Any]) -> None:
    with written_whole(file) as made:
        made.write(json.dumps(content, indent=1).encode() + b"\n")
