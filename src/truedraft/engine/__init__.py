"""The engine: requests, one speculative step for a batch, a scheduler, generate and stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from truedraft.lazy import loads

if TYPE_CHECKING:
    from truedraft.core.stats import StepRecord as StepRecord
    from truedraft.engine.answer import Answer as Answer
    from truedraft.engine.answer import Piece as Piece
    from truedraft.engine.beam_search import Beam as Beam
    from truedraft.engine.beam_search import BeamAnswer as BeamAnswer
    from truedraft.engine.beam_search import BeamSearch as BeamSearch
    from truedraft.engine.engine import Engine as Engine
    from truedraft.engine.request import Request as Request

_MODULES = {
    "truedraft.core.stats": ("StepRecord",),
    "truedraft.engine.answer": ("Answer", "Piece"),
    "truedraft.engine.beam_search": ("Beam", "BeamAnswer", "BeamSearch"),
    "truedraft.engine.engine": ("Engine",),
    "truedraft.engine.request": ("Request",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = list(_HOMES)
__getattr__ = loads(__name__, _HOMES)
