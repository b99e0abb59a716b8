"""The engine: requests, one speculative step for a batch, a scheduler, generate and stream."""

from truedraft.core.stats import StepRecord
from truedraft.engine.answer import Answer, Piece
from truedraft.engine.beam_search import Beam, BeamAnswer, BeamSearch
from truedraft.engine.engine import Engine
from truedraft.engine.request import Request

__all__ = ["Answer", "Beam", "BeamAnswer", "BeamSearch", "Engine", "Piece", "Request", "StepRecord"]
