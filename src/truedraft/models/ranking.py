"""The most likely token ids of rows of logits, in an order that nothing but the logits decides."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_LOW = (1 << 32) - 1
_BLOCK = 64


def largest_ids(logits: Tensor, count: int) -> Tensor:
    """The ids of the `count` largest logits of each row, the largest first; of equal ones the lowest id first.

    In bfloat16 many logits are equal, and `topk` leaves their order open.

    Args:
        logits: `[rows, vocab]`, of any floating dtype; compared in float32.
        count: at most `vocab`.

    Returns:
        `[rows, count]`, int64.
    """
    rows, vocab = logits.shape
    logits = pad(logits.float(), (0, -vocab % _BLOCK), value=-torch.inf)
    blocks = logits.view(rows, -(-vocab // _BLOCK), _BLOCK)
    # Whoever is among the `count` first is in one of the `count` first blocks, by their largest and then their number.
    number = torch.arange(blocks.shape[1], device=logits.device).expand(rows, -1)
    chosen = _first(blocks.amax(dim=-1), number, min(count, blocks.shape[1]))
    kept = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    ids = chosen[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    return _first(kept, ids.flatten(1), count)


def _first(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """The ids with the largest values, float32, ties to the lowest id; both `[rows, n]`, n at least `count`."""
    bits = (values + 0.0).view(torch.int32)  # the sum makes -0 a 0
    # As whole numbers, floats rise with their bits, but negative ones fall; their lower 31 bits are turned over.
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (rising.long() << 32) | (_LOW - ids)
    return _LOW - (keys.topk(count, dim=-1).values & _LOW)
