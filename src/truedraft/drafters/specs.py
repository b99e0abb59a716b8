"""Drafters by name: the one place where words become drafters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from truedraft.drafters.base import Drafter
from truedraft.drafters.draft_model import DraftModel
from truedraft.drafters.none import NoDrafter
from truedraft.drafters.prompt_lookup import PromptLookup
from truedraft.errors import OptionError, UnknownOptionError
from truedraft.models.base import LanguageModel
from truedraft.models.loading import load_model
from truedraft.models.padding import unpadded_name

Options = Mapping[str, str]
_EMBEDDED_TARGET = "embedded:target"


@dataclass(frozen=True, slots=True)
class _Spec:
    """A parsed word: KIND[:PATH][,option=value]..."""

    kind: str
    path: str | None
    options: dict[str, str]


def from_spec(spec: str, target: LanguageModel) -> Drafter:
    """Make a drafter from its word, as `--drafter` takes it.

    `none`; `auto`, the embedded draft for the embedded target and prompt lookup for any other;
    `prompt-lookup[,num_speculative_tokens=6][,max_ngram=4][,min_ngram=2]`;
    `draft[:MODEL][,num_speculative_tokens=4][,branching=3-2-1][,min_probability=0]`, without MODEL the embedded one.

    Raises:
        UnknownOptionError: a word or an option that does not exist; names the nearest valid one.
        OptionError: an unusable value.
        ModelError: the draft model cannot be loaded.
        VocabularyMismatchError: the draft does not share the target's tokenizer.
    """
    parsed = _parse(spec)
    if parsed.kind == "auto":
        kind = "draft" if unpadded_name(target.name) == _EMBEDDED_TARGET else "prompt-lookup"
        parsed = _Spec(kind, parsed.path, parsed.options)
    if parsed.kind not in _MAKERS:
        raise UnknownOptionError.nearest("drafter", parsed.kind, ("auto", *_MAKERS))
    drafter = _MAKERS[parsed.kind](parsed, target)
    drafter.check(target)
    return drafter


def _parse(spec: str) -> _Spec:
    head, *parts = spec.split(",")
    kind, _, path = head.partition(":")
    options: dict[str, str] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not name or not value:
            raise OptionError(f"drafter {spec!r}: {part!r} is not of the form option=value")
        options[name.strip()] = value.strip()
    return _Spec(kind.strip(), path or None, options)


def _none(spec: _Spec, target: LanguageModel) -> Drafter:
    _only(spec, NoDrafter)
    return NoDrafter()


def _prompt_lookup(spec: _Spec, target: LanguageModel) -> Drafter:
    _only(spec, PromptLookup)
    return PromptLookup(**{name: _whole(name, value) for name, value in spec.options.items()})


def _draft(spec: _Spec, target: LanguageModel) -> Drafter:
    _only(spec, DraftModel)
    options = dict(spec.options)
    branching = options.pop("branching", None)
    least = options.pop("min_probability", "0")
    widths = None if branching is None else [_whole("branching", width) for width in branching.split("-")]
    lengths = {name: _whole(name, value) for name, value in options.items()}
    dtype = str(target.dtype).removeprefix("torch.")
    fast = bool(target.fast_paths)  # who turned them off for the target wants to see plain forwards
    model = load_model(spec.path or "embedded:draft", dtype=dtype, device=str(target.device), fast_paths=fast)
    return DraftModel(model, branching=widths, min_probability=_number("min_probability", least), **lengths)


def _only(spec: _Spec, drafter: type[Drafter]) -> None:
    """Refuse options that the drafter does not have, and a path where it takes none."""
    known = [name for name in inspect.signature(drafter).parameters if name != "model"]
    for name in spec.options:
        if name not in known:
            raise UnknownOptionError.nearest(f"option of drafter {spec.kind!r}", name, known or ["(none)"])
    if spec.path is not None and drafter is not DraftModel:
        raise OptionError(f"drafter {spec.kind!r} takes no path, got {spec.path!r}")


def _whole(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise OptionError(f"{name} must be a whole number, got {value!r}") from error


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise OptionError(f"{name} must be a number, got {value!r}") from error


_MAKERS: dict[str, Callable[[_Spec, LanguageModel], Drafter]] = {
    "none": _none,
    "prompt-lookup": _prompt_lookup,
    "draft": _draft,
}
