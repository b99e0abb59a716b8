"""Models: the only place that touches transformers' models.

`base` is the contract that engine and drafters see. `huggingface` fulfils it for unmodified Hugging Face models, which
`loading` loads: it packs all segments of a forward (`packing`) and lets a backend run them. Names that need
transformers are loaded when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from truedraft.models.base import ForwardOutput, HeadRun, LanguageModel, Segment

if TYPE_CHECKING:
    from truedraft.models.export import export_model
    from truedraft.models.huggingface import HuggingFaceModel
    from truedraft.models.lm_head import LmHead
    from truedraft.models.loading import load_model
    from truedraft.models.multimodal import MultimodalPrompt
    from truedraft.models.padding import pad_model
    from truedraft.models.translated import TranslatedModel

_HOMES = {
    "HuggingFaceModel": "truedraft.models.huggingface",
    "LmHead": "truedraft.models.lm_head",
    "MultimodalPrompt": "truedraft.models.multimodal",
    "TranslatedModel": "truedraft.models.translated",
    "export_model": "truedraft.models.export",
    "load_model": "truedraft.models.loading",
    "pad_model": "truedraft.models.padding",
}

__all__ = [
    "ForwardOutput",
    "HeadRun",
    "HuggingFaceModel",
    "LanguageModel",
    "LmHead",
    "MultimodalPrompt",
    "Segment",
    "TranslatedModel",
    "export_model",
    "load_model",
    "pad_model",
]


def __getattr__(name: str) -> object:
    """Load a public name from its home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'truedraft.models' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
