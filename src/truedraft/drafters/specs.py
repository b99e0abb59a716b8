"""Drafters by name: the one place where words become drafters, and where help takes its list of them from.

Loads nothing heavy before a drafter is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.embedded import embedded_heads
from truedraft.errors import OptionError, UnknownOptionError

if TYPE_CHECKING:
    from truedraft.core.rank_tree import RankTree
    from truedraft.drafters.base import Drafter
    from truedraft.models.base import LanguageModel

_EMBEDDED_TARGET = "embedded:target"
_COUNTED = "counted"


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed word: KIND[:PATH][,option=value]..."""

    kind: str
    path: str | None
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """A kind of drafters, as it is typed.

    Attributes:
        path: what the path behind its word is, as "DIR"; None where it takes none.
        options: its options, each with a value as it is typed: the default, or an example of what else there is.
        meaning: what it does, in a phrase.
        make: the drafter, from a word whose options are known.
    """

    path: str | None
    options: Mapping[str, str]
    meaning: str
    make: Callable[[Spec, LanguageModel], Drafter]

    def usage(self, word: str) -> str:
        """How it is typed, with its options; words that are short enough to be broken into lines."""
        path = "" if self.path is None else f"[:{self.path}]"
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{word}{path}" + (f", options {options}" if options else "")


def from_spec(spec: str, target: LanguageModel) -> Drafter:
    """Make a drafter from its word, as `--drafter` takes it: `KIND[:PATH][,option=value]...`.

    `KINDS` has the kinds with their options. `auto` is the embedded draft for the embedded target and prompt lookup for
    any other; `MODULE:CLASS` is a drafter of the user's own, see `truedraft.drafters.own`. Double quotes keep commas in
    a path or a value: `draft:"a,b",num_speculative_tokens=3`.

    Raises:
        UnknownOptionError: a word or an option that does not exist; names the nearest valid one.
        OptionError: an unusable value.
        ModelError: the draft model or the heads cannot be loaded.
        CompositionError: the draft does not share the target's tokenizer, or the heads are for another target.
    """
    from truedraft.models.padding import unpadded_name

    parsed = _parse(spec)
    if parsed.kind == "auto":
        kind = "draft" if unpadded_name(target.name) == _EMBEDDED_TARGET else "prompt-lookup"
        parsed = Spec(kind, parsed.path, parsed.options)
    drafter = _made(parsed, target)
    drafter.check(target)
    return drafter


def drafter_help() -> str:
    """Every kind of drafters and its options, a paragraph each."""
    own = "MODULE:CLASS, options those of its constructor: a drafter of your own, installed or in this folder"
    kinds = (f"{kind.usage(word)}: {kind.meaning}" for word, kind in KINDS.items())
    auto = "auto: draft for the embedded target, prompt-lookup for any other"
    return ".\n\n".join((auto, *kinds, own)) + "."


def _made(parsed: Spec, target: LanguageModel) -> Drafter:
    kind = KINDS.get(parsed.kind)
    if kind is None:
        from truedraft.drafters.own import own_drafter

        own = own_drafter(parsed.kind, parsed.path, parsed.options, target)
        if own is None:
            raise UnknownOptionError.nearest("drafter", parsed.kind, ("auto", *KINDS, "MODULE:CLASS"))
        return own
    for name in parsed.options:
        if name not in kind.options:
            raise UnknownOptionError.nearest(
                f"option of drafter {parsed.kind!r}", name, list(kind.options) or ["(none)"]
            )
    if parsed.path is not None and kind.path is None:
        raise OptionError(f"drafter {parsed.kind!r} takes no path, got {parsed.path!r}")
    return kind.make(parsed, target)


def _parse(spec: str) -> Spec:
    head, *parts = _split(spec)
    kind, _, path = head.partition(":")
    options: dict[str, str] = {}
    for part in parts:
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not name or not value:
            raise OptionError(f"drafter {spec!r}: {part!r} is not of the form option=value")
        if name in options:
            raise OptionError(f"drafter {spec!r} has {name} twice; give it once")
        options[name] = value
    return Spec(kind.strip(), path or None, options)


def _split(spec: str) -> list[str]:
    """The parts between the commas that stand outside double quotes; the quotes go."""
    parts = [""]
    pieces = spec.split('"')
    if len(pieces) % 2 == 0:
        raise OptionError(f"drafter {spec!r} has a double quote without its second")
    for number, piece in enumerate(pieces):
        first, *others = [piece] if number % 2 else piece.split(",")
        parts[-1] += first
        parts += others
    return parts


def _none(spec: Spec, target: LanguageModel) -> Drafter:
    from truedraft.drafters.none import NoDrafter

    return NoDrafter()


def _prompt_lookup(spec: Spec, target: LanguageModel) -> Drafter:
    from truedraft.drafters.prompt_lookup import PromptLookup

    return PromptLookup(**{name: _whole(name, value) for name, value in spec.options.items()})


def _draft(spec: Spec, target: LanguageModel) -> Drafter:
    from truedraft.drafters.draft_model import DraftModel
    from truedraft.models.loading import load_model

    options = dict(spec.options)
    branching = options.pop("branching", None)
    least = options.pop("min_probability", "0")
    widths = None if branching is None else _widths(branching)
    lengths = {name: _whole(name, value) for name, value in options.items()}
    dtype = str(target.dtype).removeprefix("torch.")
    fast = bool(target.fast_paths)  # who turned them off for the target wants to see plain forwards
    model = load_model(spec.path or "embedded:draft", dtype=dtype, device=str(target.device), fast_paths=fast)
    return DraftModel(model, branching=widths, min_probability=_number("min_probability", least), **lengths)


def _medusa(spec: Spec, target: LanguageModel) -> Drafter:
    from truedraft.core.rank_tree import RankTree
    from truedraft.drafters.calibration import GREEDY, SAMPLED
    from truedraft.drafters.guess_trees import FixedTrees
    from truedraft.drafters.medusa import Medusa
    from truedraft.heads import MedusaHeads

    branching, file = spec.options.get("branching"), spec.options.get("tree")
    if branching is not None and file is not None:
        raise OptionError("drafter 'medusa' takes branching or tree, not both")
    nodes = _whole("nodes", spec.options["nodes"]) if "nodes" in spec.options else None
    heads = MedusaHeads.load(_heads_folder("medusa", spec.path))
    if branching is None and file is None:
        return Medusa(heads, nodes=nodes)
    if file == _COUNTED:
        return Medusa(heads, FixedTrees(heads.record.trees), nodes=nodes)
    tree = _listed(file) if file is not None else RankTree.cartesian(_widths(branching or ""))
    trees = FixedTrees({GREEDY: tree, SAMPLED: tree})
    return Medusa(heads, trees, nodes=len(tree) if nodes is None else nodes)


def _redrafter(spec: Spec, target: LanguageModel) -> Drafter:
    from truedraft.drafters.redrafter import Redrafter

    sizes = {name: _whole(name, value) for name, value in spec.options.items() if name != "sampled"}
    sampled = spec.options.get("sampled", "false")
    if sampled not in ("true", "false"):
        raise OptionError(f"sampled must be true (paths are drawn) or false (the likeliest beams), got {sampled!r}")
    return Redrafter.load(_heads_folder("redrafter", spec.path), sampled=sampled == "true", **sizes)


def _heads_folder(kind: str, path: str | None) -> str | Path:
    """Where heads lie; without a path the embedded ones of a kind, as `embedded:medusa`."""
    prefix = "embedded:"
    if path is None or path.startswith(prefix):
        return embedded_heads((path or kind).removeprefix(prefix))
    return path


def _listed(file: str) -> RankTree:
    """A tree that somebody wrote by hand."""
    from truedraft.core.rank_tree import RankTree

    try:
        paths = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError) as error:  # the last: the home of nobody, or lists without end
        raise OptionError(f"cannot read the tree {file!r} ({error}); give a JSON list of rank paths") from error
    whole = isinstance(paths, list) and all(
        isinstance(path, list) and all(type(rank) is int for rank in path) for path in paths
    )
    if not whole or not paths:
        raise OptionError(f"the tree {file!r} is no list of rank paths; write for example [[0], [0, 0], [1]]")
    return RankTree.listed(paths)


def _widths(branching: str) -> Sequence[int]:
    return [_whole("branching", width) for width in branching.split("-")]


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


KINDS: Mapping[str, DrafterKind] = {
    "none": DrafterKind(None, {}, "nothing is drafted, which is plain decoding", _none),
    "prompt-lookup": DrafterKind(
        None,
        {"num_speculative_tokens": "6", "max_ngram": "4", "min_ngram": "2"},
        "copies what followed the last time the text ended like this",
        _prompt_lookup,
    ),
    "draft": DrafterKind(
        "MODEL",
        {"num_speculative_tokens": "4", "branching": "3-2-1", "min_probability": "0"},
        "a smaller model with the same tokenizer, without MODEL the embedded one: a chain, or by branching a tree of "
        "so many guesses at each depth; no further below a token of less than min_probability",
        _draft,
    ),
    "medusa": DrafterKind(
        "DIR",
        {"nodes": "16", "branching": "4-3-2", "tree": "counted|FILE"},
        "heads on the target's last vector, without DIR the embedded ones: at each step a tree of as many nodes as pay "
        "here, or as you say; or the same tree at all steps, of so many ranks at each depth, the one that was counted "
        "in training, or a JSON list of rank paths as [[0], [0, 0], [1]]",
        _medusa,
    ),
    "redrafter": DrafterKind(
        "DIR",
        {"beams": "8", "length": "4", "nodes": "16", "sampled": "true"},
        "one recurrent head on that vector, without DIR the embedded one: beams, merged and cut to the likeliest "
        "nodes, in sizes that pay here, or as you say; sampled draws them, for requests at a temperature",
        _redrafter,
    ),
}
"""The kinds of drafters by their words."""
