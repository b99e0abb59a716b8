"""The most likely token ids of rows of logits, in an order that nothing but the logits decides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from truedraft.core.probs import first_by_value

_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The likeliest token ids of some distributions, the likeliest first; of equal ones the lowest id first.

    Attributes:
        ids: `[..., count]`, int64.
        log_probs: `[..., count]`, float32: logs of their probabilities under the whole distribution, at temperature 1.
    """

    ids: Tensor
    log_probs: Tensor

    @classmethod
    def of(cls, logits: Tensor, count: int) -> Likeliest:
        """Of distributions given by logits `[rows, vocab]`, computed in float32."""
        ids = largest_ids(logits, count)
        logits = logits.float()
        # One long row alone is summed in parts by several threads, and rounds otherwise than among others.
        total = (logits if len(logits) > 1 else logits.expand(2, -1).contiguous()).logsumexp(dim=-1, keepdim=True)
        return cls(ids, logits.gather(-1, ids) - total[: len(ids)])

    def view(self, *shape: int) -> Likeliest:
        """The same in another shape `[*shape, count]`."""
        return Likeliest(self.ids.view(*shape, -1), self.log_probs.view(*shape, -1))


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
    chosen = first_by_value(blocks.amax(dim=-1), min(count, blocks.shape[1]), number)
    kept = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    ids = chosen[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    return first_by_value(kept, count, ids.flatten(1))
