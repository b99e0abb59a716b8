"""A drafter with answers of its target, and the variants that the doctor compares it with."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from truedraft.core.top_k import TopK
from truedraft.drafters.base import Drafter, StepOutcome
from truedraft.errors import OptionError
from truedraft.files import object_of
from truedraft.measure.traces import AnswerTrace, trace_behind
from truedraft.models.base import LanguageModel
from truedraft.models.loading import load_model
from truedraft.models.translated import TranslatedModel

CONFIG = "config.json"


@dataclass(frozen=True)
class Source:
    """Where a drafter is stored, and changes to a draft model's files.

    Attributes:
        without: pattern of names of files to leave out; "" is none.
        files: JSON objects by the names of the files that they replace.
        dtype: of the model; None is the target's.
    """

    path: Path
    without: str = ""
    files: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = None

    @property
    def config(self) -> dict[str, Any]:
        """Content of config.json; empty where there is none."""
        return dict(self.files.get(CONFIG) or object_of(self.path / CONFIG))

    def draft(self, target: LanguageModel) -> LanguageModel:
        """The draft model, with its ids translated to the target's where its tokenizer is another.

        Raises:
            OptionError: files are to be read otherwise, and there is no folder.
            ModelError: it cannot be loaded.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) if self.without or self.files else self.path
            if path is not self.path and not self.path.is_dir():
                raise OptionError("it is no folder of this machine")
            for file in self.path.resolve().iterdir() if path is not self.path else ():
                if file.name not in self.files and not (self.without and re.search(self.without, file.name)):
                    (path / file.name).symlink_to(file)
            for name, content in self.files.items():
                (path / name).write_text(json.dumps(content), encoding="utf-8")
            dtype = self.dtype or target.dtype
            model = load_model(path, dtype=dtype, device=target.device, fast_paths=self.dtype is None)
        ours, theirs = model.tokenizer, target.tokenizer
        same = ours is None or theirs is None or ours.same_vocabulary(theirs)
        return model if same else TranslatedModel(model, target)


@dataclass(frozen=True)
class Case:
    """A drafter with answers of its target.

    Attributes:
        part: the head or draft model.
        chain: makes a drafter of one chain from it.
        layers: the target's layers with hidden states in the traces.
        mended: variants that were needed to load it.
        shown: changes to step outcomes before the drafter receives them.
        wide: whether the drafter computes in float32 regardless of the target's dtype.
    """

    source: Source
    target: LanguageModel
    part: Any
    chain: Callable[[Any], Drafter]
    prompts: tuple[str | tuple[int, ...], ...] = ()
    traces: tuple[AnswerTrace, ...] = ()
    layers: tuple[int, ...] = ()
    mended: tuple[Variant, ...] = ()
    shown: tuple[Callable[[StepOutcome], StepOutcome], ...] = ()
    wide: bool = False

    def of(self, part: Any) -> Case:
        return replace(self, part=part)

    def showing(self, change: Callable[[StepOutcome], StepOutcome]) -> Case:
        return replace(self, shown=(*self.shown, change))

    @property
    def beside(self) -> LanguageModel:
        """The target as the drafter reads it."""
        return cast(LanguageModel, Wide(self.target)) if self.wide else self.target

    def seen(self) -> tuple[AnswerTrace, ...]:
        traces = self.traces
        for change in self.shown:
            traces = tuple(replace(each, seen=tuple(map(change, each.seen))) for each in traces)
        return traces


class Pair(NamedTuple):
    """Two cases to compare on the same tokens.

    Attributes:
        better: the case to continue with if the variant is better.
    """

    given: Case
    changed: Case
    better: Case


def instead(given: Case, changed: Case) -> Pair:
    """The pair where the variant itself is the case to continue with."""
    return Pair(given, changed, changed)


@dataclass(frozen=True)
class Variant:
    """Another way to read a drafter.

    Attributes:
        meaning: what is wrong with the given drafter if this is better.
        fix: what to do then, by the better case.
        make: the cases to compare, from the given one.
    """

    name: str
    meaning: str
    fix: Callable[[Case], str]
    make: Callable[[Case], Pair]


class Wide:
    """A target for a head that computes in float32; the target's own weights stay unchanged."""

    dtype = torch.float32

    def __init__(self, target: LanguageModel) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def unembed(self, vectors: Tensor) -> Tensor:
        return self._target.unembed(vectors.to(self._target.dtype)).float()

    def likeliest(self, vectors: Tensor, count: int) -> TopK:
        return TopK.of(self.unembed(vectors), count)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._target.embed(tokens).float()

    def shared_heads(self, blocks: Any) -> None:
        """None: the target's own implementation is in its dtype."""


def behind(case: Case, prompt: tuple[int, ...], trace: AnswerTrace) -> AnswerTrace:
    """An answer after another prompt, with the features that the target shows there."""
    return trace_behind(case.target, prompt, trace, case.chain(case.part).features, case.layers)
