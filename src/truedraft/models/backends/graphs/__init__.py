"""Forwards of Llama-like decoders as CUDA graphs."""

from truedraft.models.backends.graphs.backend import GraphBackend
from truedraft.models.backends.graphs.heads import GraphPairs

__all__ = ["GraphBackend", "GraphPairs"]
