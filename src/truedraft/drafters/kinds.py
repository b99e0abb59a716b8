"""The table of kinds of drafters by name, imported on first use.

A third-party package adds a kind by an entry point of the group `truedraft.kinds`, with the kind's name: its value
`MODULE:NAME` is a mapping with a `Kind` under that name.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.files import object_of
from truedraft.options import Words, called

if TYPE_CHECKING:
    from truedraft.drafters.base import Drafter
    from truedraft.models.base import LanguageModel

_log = logging.getLogger("truedraft.drafters")
_GROUP = "truedraft.kinds"
_OWN = "truedraft.drafters.specs:OWN"
_BLOCK, _EAGLE = "truedraft.kinds.block:KINDS", "truedraft.kinds.eagle:KINDS"
_TABLE = {
    **dict.fromkeys(("none", "prompt-lookup", "suffix", "lookahead", "draft", "self", "reencoded", "ngram"), _OWN),
    "cascade": _OWN,
    "medusa": "truedraft.kinds.medusa:KINDS",
    "redrafter": "truedraft.kinds.redrafter:KINDS",
    "eagle": _EAGLE,
    "dflash": _BLOCK,
    "dspark": _BLOCK,
    "dflash2": "truedraft.kinds.dflash2:KINDS",
    "p-eagle": _EAGLE,
    "mtp": "truedraft.kinds.mtp:KINDS",
}
_TRAINED = ("draft", "eagle", "p-eagle", "dspark", "dflash2", "dflash", "redrafter", "medusa", "ngram")


def dotted(name: str) -> Any:
    """Import `MODULE:NAME`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of drafters, as a user names it. Dotted names `MODULE:NAME` are imported on use.

    Attributes:
        made: the class or function that makes a drafter. Options are parameters of it and of `parts`, parsed by their
            annotations; parameters called `words`, `path`, `target` and `drafters_dir` are passed too.
        path: the kind of path after its name, as "DIR"; None if it takes none.
        options: each with its default or an example of another value.
        parts: functions that make further parameters of `made`.
        widest: options that leave a controller the most choice, for `auto`.
        paths: paths that a plan tries if none is given.
        members: the drafters in parentheses after its name, as "A;B"; "" if it takes none.
        head: class of its heads, `truedraft.drafters.heads.head.Head`, loaded for a parameter `head` of `made`.
        trains: options of `truedraft train`, `truedraft.training.options.Trains`; needs no torch.
        training: its `truedraft.training.head_config.HeadTrainingConfig`.
        exports: its `truedraft.drafters.exporting.Exports`.
        variants: the `truedraft.measure.variants.Examined` that the doctor tries.
        published: a function that returns the kind of head in a folder of another project, or None; `load_published`
            in the same module, if there is one, loads it.
    """

    made: str
    path: str | None
    options: Mapping[str, str]
    meaning: str
    parts: Mapping[str, str] = field(default_factory=dict)
    widest: Mapping[str, str] = field(default_factory=dict)
    paths: Sequence[str] = ()
    members: str = ""
    head: str = ""
    trains: str = ""
    training: str = ""
    exports: str = ""
    variants: str = ""
    published: str = ""

    @classmethod
    def of_heads(
        cls,
        package: str,
        word: str,
        drafter: str,
        head: str,
        training: str,
        options: Mapping[str, str],
        meaning: str,
        widest: Mapping[str, str] | None = None,
    ) -> Kind:
        """A kind of trained heads in a package, of these names in its modules `drafter`, `module` and `training`.

        Tables in `options`, `folders` and `variants` are called as the word, in capitals.
        """
        own = word.upper().replace("-", "_")
        return cls(
            f"{package}.drafter:{drafter}",
            "DIR",
            options,
            meaning,
            widest=widest or {},
            head=f"{package}.module:{head}",
            trains=f"{package}.options:{own}",
            training=f"{package}.training:{training}",
            exports=f"{package}.folders:{own}",
            variants=f"{package}.variants:{own}",
            published=f"{package}.folders:kind_in",
        )

    def make(self, words: Words, target: LanguageModel, drafters_dir: Sequence[str | Path] = ()) -> Drafter:
        """Make the drafter from a specification with checked options; members may be in `drafters_dir`."""
        given = {"words": words, "path": words.path, "target": target, "drafters_dir": drafters_dir}
        made, parts = dotted(self.made), {name: dotted(part) for name, part in self.parts.items()}
        if self.head and "head" not in parts and "head" in inspect.signature(made).parameters:
            parts["head"] = dotted(self.head).for_target
        drafter: Drafter = called(made, words.options, given, parts)
        return drafter

    def typed(self, word: str) -> str:
        path = "" if self.path is None else f"[:{self.path}]"
        return f"{word}({self.members})" if self.members else word + path


class _Kinds(Mapping[str, Kind]):
    """The kinds by name, built-in ones first."""

    @cached_property
    def _others(self) -> Mapping[str, Kind]:
        """Kinds of other packages; those that fail to import are left out with a warning."""
        found: dict[str, Kind] = {}
        for each in metadata.entry_points(group=_GROUP):
            if each.name in _TABLE:
                continue
            try:
                found[each.name] = dotted(each.value)[each.name]
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                _log.warning("the kind of drafters %r of %s is left out (%s)", each.name, each.value, why)
        return found

    def __getitem__(self, word: str) -> Kind:
        kind: Kind = dotted(_TABLE[word])[word] if word in _TABLE else self._others[word]
        return kind

    def __iter__(self) -> Iterator[str]:
        return iter([*_TABLE, *self._others])

    def __len__(self) -> int:
        return len(_TABLE) + len(self._others)

    def __contains__(self, word: object) -> bool:
        return word in _TABLE or word in self._others


KINDS: Mapping[str, Kind] = _Kinds()
"""The kinds of drafters by name."""


def trained_kinds() -> tuple[str, ...]:
    """Names of the kinds that are trained for a target, in the order of `auto`."""
    return (*_TRAINED, *(word for word in KINDS if word not in _TABLE and KINDS[word].head))


def kind_in(path: Path) -> str | None:
    """The kind of head in a path; None if there is none. Reads no weights."""
    readers = dict.fromkeys(KINDS[word].published for word in KINDS if KINDS[word].published)
    found = next((kind for each in readers if (kind := dotted(each)(path)) is not None), None)
    own = object_of(path / "config.json").get("kind")
    return found or (own if isinstance(own, str) else None)


OF_LEVELS = {
    "num_speculative_tokens": "7", "branching": "3-2-1", "min_probability": "0", "nodes": "16", "beams": "8",
    "context": "1024",
}  # fmt: skip
"""Options of drafters with trees that grow level by level (`truedraft.drafters.heads.levels`)."""
