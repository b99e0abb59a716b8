"""The small models that ship with the package. Each folder is an ordinary Hugging Face folder with its card."""

from __future__ import annotations

from pathlib import Path

from truedraft.errors import ModelNotFoundError, UnknownOptionError

_FOLDER = Path(__file__).parent / "stdlib"
_MODELS = ("target", "draft")


def embedded_folder(name: str) -> Path:
    """The folder of an embedded model.

    Raises:
        UnknownOptionError: there is none of that name.
        ModelNotFoundError: its weights are not installed.
    """
    if name not in _MODELS:
        raise UnknownOptionError.nearest("embedded model", name, _MODELS)
    folder = _FOLDER / name
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"the embedded model {name!r} is not part of this installation; reinstall truedraft")
    return folder


def embedded_names() -> tuple[str, ...]:
    """Names that `load_model("embedded:NAME")` knows."""
    return _MODELS


def heldout_prompts_file() -> Path:
    """JSON lines of prompts from source files that no embedded model was trained on."""
    return _FOLDER / "heldout_prompts.jsonl"
