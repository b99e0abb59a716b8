"""The largest of rows of numbers, in an order that nothing but the numbers decides."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = (1 << 32) - 1


def first_by_value(values: Tensor, count: int, names: Tensor | None = None) -> Tensor:
    """The names of the `count` largest values of each row, the largest first; of equal ones the lowest name first.

    `topk` leaves the order of equal values open.

    Args:
        values: `[rows, n]`, float32; NaN counts as the largest.
        count: at most `n`.
        names: `[rows, n]`, int64, 0 to 2^32 - 1, different ones in a row; None numbers the columns.

    Returns:
        `[rows, count]`, int64.
    """
    if names is None:
        names = torch.arange(values.shape[-1], device=values.device)
    values = torch.where(values.isnan(), torch.nan, values)  # one NaN for all: a negative one would come last
    bits = (values + 0.0).view(torch.int32)  # the sum makes -0 a 0
    # As whole numbers, floats rise with their bits, but negative ones fall; their lower 31 bits are turned over.
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (rising.long() << 32) | (_LOW - names)
    return _LOW - (keys.topk(count, dim=-1).values & _LOW)
