"""Memory for numbers on the way through a forward."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from truedraft.models.native import structs

_CPU = torch.device("cpu")
_TILE = 8
_MOST_THREADS = 128  # that team.h uses


class Scratch:
    """Memory for numbers on the way, kept between forwards and grown when one needs more.

    Args:
        library: decoder.c, compiled.
        dtype: of the model.
        stride: elements of a row.
    """

    def __init__(self, library: Any, dtype: torch.dtype, stride: int) -> None:
        self._settle = library.truedraft_settle
        self._settle.restype = None
        self._dtype = dtype
        self._stride = stride
        self._room = (16, 512, 0)
        self._memory: list[Tensor] = []
        self._struct = structs.Scratch()
        self._inputs = (0, 0)

    def of(self, rows: int, keys: int, threads: int) -> structs.Scratch:
        """Enough for so many rows, keys of a request, and threads."""
        threads = min(threads, _MOST_THREADS)
        if any(asked > there for asked, there in zip((rows, keys, threads), self._room, strict=True)):
            # Keys by doubling: a context that grows by a token a step would ask for more at every step.
            keys = max(keys, 2 * self._room[1]) if keys > self._room[1] else self._room[1]
            rows, threads = max(rows, self._room[0]), max(threads, self._room[2])
            self.settle()
            self._room = (rows, keys, threads)
            span = -(-keys // 32) * 32 + 64
            shared = [self._zeros(rows, self._stride) for _ in range(4)]
            fetched, inputs = (self._zeros(threads, rows, self._stride) for _ in range(2))
            scores = torch.zeros(threads, 2 * _TILE, span, dtype=torch.float32, device=_CPU)
            slots = torch.arange(span, dtype=torch.int32, device=_CPU)
            self._memory = [*shared, fetched, inputs, scores, slots]
            self._inputs = (inputs.data_ptr(), inputs.data_ptr() + inputs.nbytes)
            self._struct = structs.Scratch(*(each.data_ptr() for each in self._memory), rows, span)
        return self._struct

    def settle(self) -> None:
        """Return when no thread reads this memory, or weights with it.

        A forward does not wait for a thread that lost its processor in the middle of it; before memory is given back
        somebody must.
        """
        if self._memory:
            self._settle(*map(ctypes.c_void_p, self._inputs))

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=_CPU)
