"""Drafters by name: the one place where words become drafters."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from truedraft.core.rank_tree import RankTree
from truedraft.drafters.base import Drafter
from truedraft.drafters.draft_model import DraftModel
from truedraft.drafters.guess_trees import GREEDY, SAMPLED, FixedTrees
from truedraft.drafters.medusa import Medusa
from truedraft.drafters.none import NoDrafter
from truedraft.drafters.prompt_lookup import PromptLookup
from truedraft.drafters.redrafter import Redrafter
from truedraft.embedded import embedded_heads
from truedraft.errors import OptionError, UnknownOptionError
from truedraft.heads.checkpoint import load_medusa
from truedraft.models.base import LanguageModel
from truedraft.models.loading import load_model
from truedraft.models.padding import unpadded_name

Options = Mapping[str, str]
_EMBEDDED_TARGET = "embedded:target"
_COUNTED = "counted"


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
    `draft[:MODEL][,num_speculative_tokens=4][,branching=3-2-1][,min_probability=0]`, without MODEL the embedded one;
    `medusa[:DIR][,nodes=N][,branching=4-3-2][,tree=counted|FILE]`, without DIR the embedded one: at each step the N
    paths that the heads hold likeliest; or the first N nodes of a tree that is the same at each step: of all paths of
    4, 3 and 2 ranks, of the tree that was counted for the heads, or of a JSON list of rank paths such as
    `[[0], [0, 0], [1]]`;
    `redrafter[:DIR][,beams=B][,length=L][,nodes=N][,sampled=true]`, without DIR the embedded one: B beams of L tokens,
    merged and cut to the N likeliest nodes; with `sampled` they are drawn, for requests at a temperature.

    Raises:
        UnknownOptionError: a word or an option that does not exist; names the nearest valid one.
        OptionError: an unusable value.
        ModelError: the draft model or the heads cannot be loaded.
        CompositionError: the draft does not share the target's tokenizer, or the heads are for another target.
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
    widths = None if branching is None else _widths(branching)
    lengths = {name: _whole(name, value) for name, value in options.items()}
    dtype = str(target.dtype).removeprefix("torch.")
    fast = bool(target.fast_paths)  # who turned them off for the target wants to see plain forwards
    model = load_model(spec.path or "embedded:draft", dtype=dtype, device=str(target.device), fast_paths=fast)
    return DraftModel(model, branching=widths, min_probability=_number("min_probability", least), **lengths)


def _medusa(spec: _Spec, target: LanguageModel) -> Drafter:
    _known(spec, ("nodes", "branching", "tree"))
    branching, file = spec.options.get("branching"), spec.options.get("tree")
    if branching is not None and file is not None:
        raise OptionError("drafter 'medusa' takes branching or tree, not both")
    nodes = _whole("nodes", spec.options["nodes"]) if "nodes" in spec.options else None
    checkpoint = load_medusa(_heads_folder("medusa", spec.path))
    if branching is None and file is None:
        return Medusa.of(checkpoint, nodes=nodes)
    if file == _COUNTED:
        return Medusa.of(checkpoint, nodes=nodes, trees=FixedTrees(checkpoint.trees))
    tree = _listed(file) if file is not None else RankTree.cartesian(_widths(branching or ""))
    trees = FixedTrees({GREEDY: tree, SAMPLED: tree})
    return Medusa.of(checkpoint, nodes=len(tree) if nodes is None else nodes, trees=trees)


def _redrafter(spec: _Spec, target: LanguageModel) -> Drafter:
    _known(spec, ("beams", "length", "nodes", "sampled"))
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


def _widths(branching: str) -> list[int]:
    return [_whole("branching", width) for width in branching.split("-")]


def _only(spec: _Spec, drafter: type[Drafter]) -> None:
    """Refuse options that the drafter does not have, and a path where it takes none."""
    _known(spec, [name for name in inspect.signature(drafter).parameters if name != "model"])
    if spec.path is not None and drafter is not DraftModel:
        raise OptionError(f"drafter {spec.kind!r} takes no path, got {spec.path!r}")


def _known(spec: _Spec, known: Sequence[str]) -> None:
    """Refuse other options than these."""
    for name in spec.options:
        if name not in known:
            raise UnknownOptionError.nearest(f"option of drafter {spec.kind!r}", name, known or ["(none)"])


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
    "medusa": _medusa,
    "redrafter": _redrafter,
}
