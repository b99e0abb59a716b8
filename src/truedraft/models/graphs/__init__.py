"""Forwards of Llama-like decoders as CUDA graphs, recorded once for each bucket of shapes and replayed.

`body` says which requests run together; `buckets` rounds their shape up; `inputs` carries the few numbers of a
forward to addresses that stay; `decoder` is the forward, a function of those addresses alone; `replay` runs it as it
is, or records and replays it.
"""

from truedraft.models.graphs.body import GraphBody

__all__ = ["GraphBody"]
