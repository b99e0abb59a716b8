"""truedraft: lossless speculative decoding for Hugging Face causal language models.

Heavy modules load on first use, so that `import truedraft` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from truedraft.lazy import compile_ahead, loads
from truedraft.moved import find_moved

if TYPE_CHECKING:
    from truedraft.core.params import SamplingParams
    from truedraft.engine import Answer, Engine, Piece
    from truedraft.errors import TruedraftError
    from truedraft.models.loading import load_model

__version__ = "0.1.0"

_HOMES = {
    "Answer": "truedraft.engine",
    "Engine": "truedraft.engine",
    "Piece": "truedraft.engine",
    "SamplingParams": "truedraft.core.params",
    "TruedraftError": "truedraft.errors",
    "load_model": "truedraft.models.loading",
}

__all__ = ["Answer", "Engine", "Piece", "SamplingParams", "TruedraftError", "__version__", "load_model"]
_load = loads(__name__, _HOMES)
find_moved()


def __getattr__(name: str) -> object:
    if name in ("Engine", "load_model"):
        compile_ahead()
    return _load(name)


def __dir__() -> list[str]:
    return sorted(__all__)
