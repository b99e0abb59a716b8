"""The small models that ship with the package, as fixtures of tests that any machine has.

Each folder is an ordinary Hugging Face folder with its card.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from truedraft.errors import DataError, ModelNotFoundError, UnknownOptionError

_FOLDER = Path(__file__).parent / "stdlib"
FOR_HEADS, FOR_TABLES = "to cut prompts for {} from", "to count for {}"
_MODELS = ("target", "draft")
_HEADS = ("medusa", "redrafter")


def embedded_folder(name: str) -> Path:
    """The folder of an embedded model.

    Raises:
        UnknownOptionError: there is none of that name.
        ModelNotFoundError: its weights are not installed.
    """
    return _installed("embedded model", name, _MODELS)


def embedded_heads(name: str) -> Path:
    """The folder of embedded heads, for the embedded target.

    Raises:
        UnknownOptionError: there are none of that name.
        ModelNotFoundError: their weights are not installed.
    """
    return _installed("embedded heads", name, _HEADS)


def _installed(what: str, name: str, known: tuple[str, ...]) -> Path:
    if name not in known:
        raise UnknownOptionError.nearest(what, name, known)
    folder = _FOLDER / name
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"the {what} {name!r} is not part of this installation; reinstall truedraft")
    return folder


def refuse_no_text(target: str, data: Sequence[object], doing: str) -> None:
    """Refuse to train for a target without text that is like what it will be used for; the embedded one has its own.

    Args:
        target: by its name.
        data: files of text.
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
    """Names that `load_model("embedded:NAME")` knows."""
    return _MODELS


def embedded_heads_names() -> tuple[str, ...]:
    """Kinds of heads that ship for the embedded target; `--drafter KIND` without a path takes them there."""
    return _HEADS


def embedded_drafters() -> Path:
    """The folder of drafters that ships; its subfolders say which target each is for."""
    return _FOLDER


def heldout_prompts_file() -> Path:
    """JSON lines of prompts from source files that no embedded model was trained on."""
    return _FOLDER / "heldout_prompts.jsonl"
