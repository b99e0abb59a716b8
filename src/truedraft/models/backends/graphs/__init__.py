"""Forwards of Llama-like decoders as CUDA graphs."""

from truedraft.models.backends.graphs.backend import GraphBackend

__all__ = ["GraphBackend"]
