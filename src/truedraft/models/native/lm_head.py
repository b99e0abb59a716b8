"""The LM head alone, and residual heads before it, by the native library: one call for all rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from truedraft.models.native import structs
from truedraft.models.native.scratch import Scratch
from truedraft.models.native.weights import UNIT, packed, padded_bias
from truedraft.models.ranking import Likeliest
from truedraft.models.threads import forward_threads

_CPU = torch.device("cpu")
_NOTHING = (structs.Linear * 0)()


class NativeLmHead:
    """The packed LM head of a model, as a function of its own. One call runs at a time.

    Args:
        library: decoder.c, compiled.
        model: the structure that holds the LM head.
        dtype: of the model.
        scratch: that the model's forwards use.
    """

    def __init__(
        self,
        library: Any,
        model: structs.Model,
        dtype: torch.dtype,
        scratch: Scratch,
    ) -> None:
        self._run = library.truedraft_heads
        self._run.restype = None
        self._model = model
        self._dtype = dtype
        self._scratch = scratch
        self._alone: dict[int, structs.Heads] = {}  # the LM head without heads, by how many of its inputs are read

    def logits(self, vectors: Tensor) -> Tensor:
        """Logits `[rows, ids]` for vectors `[rows, width]`; entries behind those that are given are zeros."""
        return self.run(self._without_heads(vectors.shape[1]), vectors, 0, 0, 1.0)[0]

    def likeliest(self, vectors: Tensor, count: int, vocab: int, factor: float) -> Likeliest:
        """Of the first `vocab` ids the likeliest `[rows, count]`, where the model multiplies its logits by `factor`."""
        return self.run(self._without_heads(vectors.shape[1]), vectors, count, vocab, factor)[1]

    def _without_heads(self, width: int) -> structs.Heads:
        if width not in self._alone:
            self._alone[width] = self.heads(width, _NOTHING, 0, 1)
        return self._alone[width]

    def heads(self, width: int, blocks: ctypes.Array[structs.Linear], layers: int, heads: int) -> structs.Heads:
        """The structure of heads that read `width` numbers and end in the LM head; keeps what it points to alive."""
        head = self._model.lm_head
        cells = -(-width // 2) * 2  # two inputs of bfloat16 make a cell
        read = structs.Linear(head.weights, head.bias, head.inputs, head.outputs, cells)
        return structs.Heads(ctypes.pointer(read), blocks, layers, heads, heads, -(-width // UNIT) * UNIT)

    def run(
        self, heads: structs.Heads, hidden: Tensor, count: int, vocab: int, factor: float
    ) -> tuple[Tensor, Likeliest]:
        """Logits `[heads * rows, ids]` of vectors `[rows, width]`, and the likeliest ids `[heads * rows, count]`."""
        rows, outputs = len(hidden), self._model.lm_head.outputs
        hidden = hidden.to(self._dtype)
        hidden = (
            pad(hidden, (0, heads.wide - hidden.shape[1])) if heads.wide != hidden.shape[1] else hidden.contiguous()
        )
        total, threads = heads.used * rows, forward_threads()
        logits = torch.empty(total, -(-outputs // UNIT) * UNIT, dtype=self._dtype, device=_CPU)
        values = torch.empty(total, count, dtype=torch.float32, device=_CPU)
        ids = torch.empty(total, count, dtype=torch.int64, device=_CPU)
        memory = (each.data_ptr() for each in (hidden, logits, values, ids))
        asked = structs.Asked(rows, vocab, count, factor, *memory)
        scratch, stride = self._scratch.of(total, 1, threads), ctypes.c_int64(self._model.stride)
        self._run(ctypes.byref(heads), ctypes.byref(asked), ctypes.byref(scratch), stride, threads)
        return logits[:, :outputs], Likeliest(ids, values)

    def settle(self) -> None:
        """See `Scratch.settle`."""
        self._scratch.settle()


class NativeHeads:
    """Residual heads with packed weights, before a model's LM head.

    Args:
        lm_head: that they end in.
        blocks: the linear layers of each head, as many of each, each as wide as it reads.
    """

    def __init__(self, lm_head: NativeLmHead, blocks: Sequence[Sequence[nn.Linear]], dtype: torch.dtype) -> None:
        self._lm_head = lm_head
        self._keep: list[Tensor] = []
        width, layers, heads = blocks[0][0].in_features, len(blocks[0]), len(blocks)
        in_order = [self._block(head[layer], dtype) for layer in range(layers) for head in blocks]
        self._heads = lm_head.heads(width, (structs.Linear * len(in_order))(*in_order), layers, heads)

    def __del__(self) -> None:
        """The weights may go when no thread is late with a run that is long over."""
        if hasattr(self, "_heads"):
            self._lm_head.settle()

    def _block(self, layer: nn.Linear, dtype: torch.dtype) -> structs.Linear:
        cells, bias = packed(layer.weight.detach().to(_CPU, dtype)), padded_bias([layer])
        self._keep.append(cells)
        if bias is not None:
            self._keep.append(bias)
        size = layer.in_features
        return structs.Linear(cells.data_ptr(), None if bias is None else bias.data_ptr(), size, size, size)

    def likeliest(self, hidden: Tensor, depth: int, ranks: int, vocab: int, factor: float) -> Likeliest:
        """See `SharedHeads.likeliest`."""
        self._heads.used = depth
        return self._lm_head.run(self._heads, hidden, ranks, vocab, factor)[1].view(depth, len(hidden))
