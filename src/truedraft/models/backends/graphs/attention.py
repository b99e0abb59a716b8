"""Attention of all requests of a forward at once, over pages that take the new keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from truedraft.cache.pages import Pages
from truedraft.models.backends.graphs.batch import WORD_BITS, Inputs

PagedAttend: TypeAlias = Callable[[int, int, float, Tensor, Tensor, Tensor], Tensor]
"""Of an attention call and the number of its pattern, with a factor on the products: queries `[rows, heads, width]`,
keys and values `[rows, kv_heads, width]`; `[rows, heads * width]`."""

Attention: TypeAlias = Callable[[Inputs, Pages, torch.dtype], PagedAttend]
"""Prepares one forward, whose queries have a dtype; only queues work that depends on the bucket alone."""


def gathered_attention(inputs: Inputs, pages: Pages, dtype: torch.dtype) -> PagedAttend:
    """By operations of torch: keys and values are gathered by block tables, which reads and writes them once more.

    Query heads that share a key head are rows of one product. What lies behind the end of a request is taken as 0, for
    it is multiplied with weights of 0 and may be anything.
    """
    numbers, bucket = inputs.numbers, inputs.bucket
    masks: dict[tuple[int, int], Tensor] = {}
    behind = torch.arange(bucket.span, device=numbers.end.device) >= numbers.end[:, None]  # [requests, span]

    def attend(call: int, pattern: int, scaling: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for rows, new in zip(pages.rows(call), (key, value), strict=True):
            rows.index_copy_(0, numbers.target, new)
        keys, values = (
            each[numbers.table].flatten(1, 2).masked_fill_(behind[..., None, None], 0.0).transpose(1, 2)
            for each in pages.entries(call)
        )  # [requests, kv_heads, span, width]
        group = query.shape[1] // key.shape[1]
        if (pattern, group) not in masks:
            masks[pattern, group] = additive_mask(visible(inputs, pattern), group, dtype)
        by_request = query[numbers.source].unflatten(2, (-1, group))  # [requests, tokens, kv_heads, group, width]
        grouped = by_request.transpose(1, 2).flatten(2, 3)
        mixed = scaled_dot_product_attention(grouped, keys, values, attn_mask=masks[pattern, group], scale=scaling)
        mixed = mixed.unflatten(2, (-1, group)).transpose(1, 2)  # as `by_request`
        return mixed.reshape(bucket.requests * bucket.tokens, -1).index_select(0, numbers.place)

    return attend


def visible(inputs: Inputs, pattern: int) -> Tensor:
    """Which keys each token sees under a pattern: bool `[requests, tokens, span]`, by positions of its request.

    In a chain these are the positions up to the token's own, from the first in reach on. In a tree nodes lie behind the
    committed tokens in the order in which they were drafted, so the host says by bits which of them are on the token's
    path and in reach.
    """
    bucket, numbers = inputs.bucket, inputs.numbers
    place = torch.arange(bucket.span, device=numbers.source.device)
    seen = place >= numbers.first[pattern][numbers.source][..., None]
    seen &= place < numbers.until[numbers.source][..., None]
    if not bucket.words:
        return seen
    node = (place - numbers.length[:, None])[:, None]  # [requests, 1, span]
    word = (node // WORD_BITS).clamp(0, bucket.words - 1)
    path = numbers.path[pattern][numbers.source]  # [requests, tokens, words]
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
