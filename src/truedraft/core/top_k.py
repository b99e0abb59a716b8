"""The most likely token ids of rows of logits, in an order that nothing but the logits decides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 64
_FEW = 1024
"""So many columns are ordered at once; of more, the blocks are found first that can hold what is looked for."""
_LOW = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class TopK:
    """The likeliest token ids of some distributions, the likeliest first; of equal ones the lowest id first.

    Attributes:
        ids: `[..., count]`, int64.
        log_probs: `[..., count]`, float32: logs of their probabilities under the whole distribution, at temperature 1.
    """

    ids: Tensor
    log_probs: Tensor

    @classmethod
    def of(cls, logits: Tensor, count: int) -> TopK:
        """Of distributions given by logits `[rows, vocab]`, computed in float32."""
        ids = stable_topk(logits, count)
        logits = logits.float()
        # One long row alone is summed in parts by several threads, and rounds otherwise than among others.
        total = (logits if len(logits) > 1 else logits.expand(2, -1).contiguous()).logsumexp(dim=-1, keepdim=True)
        return cls(ids, logits.gather(-1, ids) - total[: len(ids)])

    def view(self, *shape: int) -> TopK:
        """The same in another shape `[*shape, count]`."""
        return TopK(self.ids.view(*shape, -1), self.log_probs.view(*shape, -1))


def stable_topk(values: Tensor, count: int) -> Tensor:
    """The columns of the `count` largest values of each row, the largest first; of equal ones the lowest column first.

    In bfloat16 many logits are equal, and `topk` leaves their order open.

    Args:
        values: `[rows, n]`, of any floating dtype, compared in float32; NaN counts as the largest.
        count: at most `n`.

    Returns:
        `[rows, count]`, int64.
    """
    rows, width = values.shape
    columns = torch.arange(width, device=values.device)
    if width <= _FEW:
        return _first_by_value(values.float(), count, columns)
    values = pad(values.float(), (0, -width % _BLOCK), value=-torch.inf)
    blocks = values.view(rows, -(-width // _BLOCK), _BLOCK)
    # Whoever is among the `count` first is in one of the `count` first blocks, by their largest and then their number.
    chosen = _first_by_value(blocks.amax(dim=-1), min(count, blocks.shape[1]), columns[: blocks.shape[1]])
    kept = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    ids = chosen[:, :, None] * _BLOCK + columns[:_BLOCK]
    return _first_by_value(kept, count, ids.flatten(1))


def _first_by_value(values: Tensor, count: int, names: Tensor) -> Tensor:
    """The names of the `count` largest float32 values `[rows, n]` of each row.

    Names are `[n]` or `[rows, n]`, int64, 0 to 2^32 - 1, different ones in a row.
    """
    values = torch.where(values.isnan(), torch.nan, values)  # one NaN for all: a negative one would come last
    bits = (values + 0.0).view(torch.int32)  # the sum makes -0 a 0
    # As whole numbers, floats rise with their bits, but negative ones fall; their lower 31 bits are turned over.
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (rising.long() << 32) | (_LOW - names)
    return _LOW - (keys.topk(count, dim=-1).values & _LOW)
