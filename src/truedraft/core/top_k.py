"""The most likely token ids of rows of logits, in an order that depends only on the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 64
_FEW = 1024
"""Up to this many columns are sorted at once; of more, the blocks that can contain the result are selected first."""
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class TopK:
    """The likeliest token ids of some distributions, the likeliest first; of equal ones the lowest id first.

    `ids` `[..., count]` are int64, `log_probs` `[..., count]` float32, under the whole distribution at temperature 1.
    """

    ids: Tensor
    log_probs: Tensor

    @classmethod
    def of(cls, logits: Tensor, count: int) -> TopK:
        """Of distributions given by logits `[rows, vocab]`, computed in float32."""
        logits = logits.float()
        ids = stable_topk(logits, count)
        best = logits.gather(-1, ids)
        # A single long row is summed in parts by several threads, and rounds differently than among other rows.
        below = (logits if len(logits) > 1 else logits.expand(2, -1)) - best[:, :1]
        total = below.exp_().sum(dim=-1, keepdim=True).log_()[: len(ids)].add_(best[:, :1])
        return cls(ids, best - total)

    def view(self, *shape: int) -> TopK:
        return TopK(self.ids.view(*shape, -1), self.log_probs.view(*shape, -1))


def stable_topk(values: Tensor, count: int) -> Tensor:
    """The columns `[rows, count]` of the `count` largest values of each row, descending; of equal ones the lowest
    first.

    In bfloat16 many logits are equal, and `topk` does not define their order. Values `[rows, n]` are compared in
    float32; NaN counts as the largest.
    """
    rows, width = values.shape
    values = values.float()
    if width <= _FEW:
        return _first_by_value(values, count)
    if width % _BLOCK:
        values = pad(values, (0, -width % _BLOCK), value=-torch.inf)
    blocks = values.view(rows, values.shape[1] // _BLOCK, _BLOCK)
    # The `count` first columns are in the `count` first blocks, by their largest values and then their numbers.
    chosen = _first_by_value(blocks.amax(dim=-1), min(count, blocks.shape[1]))
    kept = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    columns = (chosen[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=values.device)).flatten(1)
    return columns.gather(1, _first_by_value(kept, count, columns))


def _first_by_value(values: Tensor, count: int, names: Tensor | None = None) -> Tensor:
    """Indices of the `count` largest float32 values `[rows, n]` of each row; of equal ones the lowest name first.

    An infinity counts as the largest finite number. Names `[rows, n]`, int64, are 0 to 2^31 - 1, distinct in a row;
    None uses the indices.
    """
    # NaN may have a sign, which would order it last; the sum makes -0 a 0.
    bits = (values.nan_to_num(nan=torch.inf, posinf=_LARGEST, neginf=-torch.inf) + 0.0).view(torch.int32)
    # Bits of floats are ordered like the floats, and reversed for negative ones; their lower 31 bits are inverted.
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # Words of 64 bits: the inverted name in the lower half, the value in the upper half.
    if names is None:
        turned = torch.arange(-1, -1 - values.shape[1], -1, dtype=torch.int32, device=values.device).expand_as(rising)
    else:
        turned = names.to(torch.int32).bitwise_not_()
    keys = torch.stack([turned, rising], dim=-1).view(torch.int64)[..., 0]
    return keys.topk(count, dim=-1).indices
