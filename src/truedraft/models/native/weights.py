"""Weights in the order in which the native forward reads them."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor, nn

LANES = 16
UNIT = 64
"""Outputs of a layer are padded with zeros to a multiple of this."""


def packed(weight: Tensor) -> Tensor:
    """A weight `[out, in]` as `[blocks, cells, 16 outputs, inputs of a cell]`, in huge pages where the system has them.

    A cell is one input in float32 and two neighbouring ones in bfloat16, which is what the processor multiplies at a
    time. Worked example in float32: entry (17, 3) of the weight lies at block 1, cell 3, output 1.
    """
    outputs, inputs = weight.shape
    per_cell = 2 if weight.dtype is torch.bfloat16 else 1
    blocks = -(-outputs // UNIT) * (UNIT // LANES)
    target = _huge(blocks * LANES * inputs, weight.dtype).view(blocks, inputs // per_cell, LANES, per_cell)
    whole = outputs // LANES
    # Block by block would be slow and all at once doubles the memory, so whole blocks are written through a view.
    cells = inputs // per_cell
    target[:whole] = weight[: whole * LANES].reshape(whole, LANES, cells, per_cell).transpose(1, 2)
    rest = weight[whole * LANES :]
    if len(rest):
        target[whole, :, : len(rest)] = rest.reshape(len(rest), cells, per_cell).transpose(0, 1)
    return target


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Two weights `[inner, in]` in turns of 16 rows, so that both factors of an output are computed together."""
    inner, inputs = gate.shape
    turns = [rows.reshape(inner // LANES, LANES, inputs) for rows in (gate, up)]
    return torch.stack(turns, dim=1).reshape(2 * inner, inputs)


def padded_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    """Biases one behind another, float32, up to whole units; None where there are none."""
    if all(layer.bias is None for layer in layers):
        return None
    rows = [layer.out_features for layer in layers]
    bias = torch.zeros(-(-sum(rows) // UNIT) * UNIT, dtype=torch.float32, device="cpu")
    for layer, part in zip(layers, bias[: sum(rows)].split(rows), strict=True):
        if layer.bias is not None:
            part.copy_(layer.bias.detach())
    return bias


def _huge(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros in memory of their own, for which huge pages are asked: reading in order is faster through them."""
    size = max(count, 1) * dtype.itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, size, **private)  # memory that may be shared gets no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count)
