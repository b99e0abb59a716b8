"""What each token sees, worked out on the device from a few numbers for each token."""

from __future__ import annotations

import torch
from torch import Tensor

from truedraft.models.graphs.buckets import WORD_BITS
from truedraft.models.graphs.inputs import Inputs


def visible(inputs: Inputs, pattern: int) -> Tensor:
    """Which keys each token sees under a pattern: bool `[requests, tokens, span]`, by slots of its request.

    In a chain these are the slots below the token's own, from the first in reach on. In a tree slots are not
    positions, so the host says by bits which uncommitted nodes are on the token's path and in reach.
    """
    bucket, numbers = inputs.bucket, inputs.numbers
    shape = (bucket.requests, bucket.tokens, 1)
    slot = torch.arange(bucket.span, device=numbers.source.device)
    seen = (slot >= numbers.first[pattern].view(shape)) & (slot < numbers.until.view(shape))
    if not bucket.words:
        return seen
    node = (slot - numbers.length[:, None])[:, None]  # [requests, 1, span]
    word = (node // WORD_BITS).clamp(0, bucket.words - 1)
    path = numbers.path[pattern].view(bucket.requests, bucket.tokens, bucket.words)
    bit = path.gather(-1, word.expand(-1, bucket.tokens, -1)) >> node.remainder(WORD_BITS) & 1
    return seen | ((bit == 1) & (node >= 0) & (node < WORD_BITS * bucket.words))


def additive_mask(seen: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores, 0 where a key is seen and -inf elsewhere.

    Args:
        seen: bool `[requests, tokens, span]`.
        group: query heads that share a key head; they are rows of one product.
        dtype: of the scores' operands.

    Returns:
        `[requests, 1, tokens * group, span]`.
    """
    requests, tokens, span = seen.shape
    hidden = ~seen[:, :, None].expand(-1, -1, group, -1).reshape(requests, 1, tokens * group, span)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
