"""The small models of the package `truedraft-embedded`: fixtures of tests and examples that need no network.

Each folder is an ordinary Hugging Face folder with a model card.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from truedraft.errors import DataError, ModelNotFoundError, UnknownOptionError

_PACKAGE = "truedraft_embedded"
FOR_HEADS, FOR_TABLES = "to cut prompts for {} from", "to count for {}"
_MODELS = ("target", "draft")
_HEADS = ("medusa", "redrafter")


def embedded_folder(name: str) -> Path:
    """The folder of an embedded model.

    Raises:
        UnknownOptionError: there is none of that name.
        ModelNotFoundError: the package is not installed.
    """
    return _installed("embedded model", name, _MODELS)


def embedded_heads(name: str) -> Path:
    """The folder of embedded heads, for the embedded target.

    Raises:
        UnknownOptionError: there are none of that name.
        ModelNotFoundError: the package is not installed.
    """
    return _installed("embedded heads", name, _HEADS)


def _installed(what: str, name: str, known: tuple[str, ...]) -> Path:
    if name not in known:
        raise UnknownOptionError.nearest(what, name, known)
    return _file(f"the {what} {name!r}", name)


def _file(what: str, name: str) -> Path:
    spec = find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (path := Path(place) / name).exists():
            return path
    raise ModelNotFoundError(
        f"{what} needs the package truedraft-embedded; "
        "install it from a clone by: pip install ./packages/truedraft-embedded"
    )


def refuse_no_text(target: str, data: Sequence[object], doing: str) -> None:
    """Refuse to train for a target without text that resembles its later use; the embedded target has its own.

    Args:
        doing: what the text is needed for, with {} in place of the target.

    Raises:
        DataError: there is none.
    """
    if not data and target != "embedded:target":
        raise DataError(
            f"there is no text {doing.format(repr(target))}; name at least one file like what it will be used for with "
            "--data FILE"
        )


def embedded_names() -> tuple[str, ...]:
    """Valid names in `load_model("embedded:NAME")`."""
    return _MODELS


def embedded_heads_names() -> tuple[str, ...]:
    """Kinds of heads for the embedded target; `--drafter KIND` without a path uses them."""
    return _HEADS


def heldout_prompts_file() -> Path:
    """JSON lines of prompts from source files that no embedded model was trained on.

    Raises:
        ModelNotFoundError: the package is not installed.
    """
    return _file("the word 'heldout'", "heldout_prompts.jsonl")
