"""Models: the only place that touches transformers' models. Each name loads on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from truedraft.lazy import loads

if TYPE_CHECKING:
    from truedraft.models.base import ForwardOutput as ForwardOutput
    from truedraft.models.base import HeadRun as HeadRun
    from truedraft.models.base import LanguageModel as LanguageModel
    from truedraft.models.base import Segment as Segment
    from truedraft.models.export import export_model as export_model
    from truedraft.models.huggingface import HuggingFaceModel as HuggingFaceModel
    from truedraft.models.lm_head import LmHead as LmHead
    from truedraft.models.loading import load_model as load_model
    from truedraft.models.multimodal import MultimodalPrompt as MultimodalPrompt
    from truedraft.models.padding import pad_model as pad_model
    from truedraft.models.translated import TranslatedModel as TranslatedModel

_HOMES = {
    **dict.fromkeys(("ForwardOutput", "HeadRun", "LanguageModel", "Segment"), "truedraft.models.base"),
    "HuggingFaceModel": "truedraft.models.huggingface",
    "LmHead": "truedraft.models.lm_head",
    "MultimodalPrompt": "truedraft.models.multimodal",
    "TranslatedModel": "truedraft.models.translated",
    "export_model": "truedraft.models.export",
    "load_model": "truedraft.models.loading",
    "pad_model": "truedraft.models.padding",
}

__all__ = list(_HOMES)
__getattr__ = loads(__name__, _HOMES)
