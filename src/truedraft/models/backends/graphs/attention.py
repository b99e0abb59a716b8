"""Attention of all requests of a forward at once, over pages with the new keys and values.

Triton is imported with the first kernel that runs, so it may be missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from truedraft.models.backends.graphs.batch import WORD_BITS, Inputs
from truedraft.models.cache.pages import Pages

Look: TypeAlias = Callable[[int, int, float, Tensor], Tensor]
"""From numbers of the attention call and its pattern, a factor on products, and queries `[rows, heads, width]`:
`[rows, heads * width]`."""

Attention: TypeAlias = Callable[[Inputs, Pages], Look]
"""Prepares one forward; its operations depend only on the bucket."""

_WIDEST = 256  # largest head width of the kernel
_LEAST_CAPABILITY = (8, 0)  # bfloat16 products on tensor cores


def attention_for(device: torch.device, width: int) -> Attention:
    """The kernel where it supports the device and head width; else torch's operations."""
    return tiled_attention if has_kernels(device) and width <= _WIDEST else gathered_attention


def has_kernels(device: torch.device) -> bool:
    """Whether kernels run on a device: NVIDIA from Ampere on, or a CPU if imported with `TRITON_INTERPRET=1`."""
    if find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def write(inputs: Inputs, pages: Pages, call: int, key: Tensor, value: Tensor) -> None:
    """Write keys and values `[rows, kv_heads, width]` of an attention call to their pages."""
    for rows, new in zip(pages.rows(call), (key, value), strict=True):
        rows.index_copy_(0, inputs.numbers.target, new)


def tiled_attention(inputs: Inputs, pages: Pages) -> Look:
    """Attention by a kernel that reads pages in place; a row's result depends on no other row."""
    from truedraft.models.backends.graphs.attention_kernel import paged_attention

    numbers, bucket = inputs.numbers, inputs.bucket

    def look(call: int, pattern: int, scaling: float, query: Tensor) -> Tensor:
        keys, values = pages.entries(call)
        return paged_attention(
            query.contiguous(), keys, values, numbers.table, numbers.tiles, numbers.tile_end, numbers.length,
            numbers.until, numbers.first[pattern], numbers.path[pattern], scaling, bucket.tile, bucket.span,
        )  # fmt: skip

    return look


def gathered_attention(inputs: Inputs, pages: Pages) -> Look:
    """Attention by torch's operations over copied keys and values; those after a request's end, maybe NaN, are 0."""
    numbers, bucket = inputs.numbers, inputs.bucket
    masks: dict[tuple[int, int], Tensor] = {}  # by pattern, and query heads of a key head
    past_end = torch.arange(bucket.span, device=numbers.end.device) >= numbers.end[:, None]  # [requests, span]
    source = rows_of_requests(inputs)
    place = torch.arange(bucket.rows, device=source.device) - numbers.start[numbers.request]
    place += numbers.request * bucket.tokens  # the reverse of `source`, among `requests * tokens`

    def look(call: int, pattern: int, scaling: float, query: Tensor) -> Tensor:
        keys, values = (
            each[numbers.table].flatten(1, 2).masked_fill_(past_end[..., None, None], 0.0).transpose(1, 2)
            for each in pages.entries(call)
        )  # [requests, kv_heads, span, width]
        group = query.shape[1] // keys.shape[1]
        if (pattern, group) not in masks:
            masks[pattern, group] = additive_mask(visible(inputs, pattern), group, query.dtype)
        by_request = query[source].unflatten(2, (-1, group))  # [requests, tokens, kv_heads, group, width]
        grouped = by_request.transpose(1, 2).flatten(2, 3)
        mixed = scaled_dot_product_attention(grouped, keys, values, attn_mask=masks[pattern, group], scale=scaling)
        mixed = mixed.unflatten(2, (-1, group)).transpose(1, 2)  # as `by_request`
        return mixed.reshape(bucket.requests * bucket.tokens, -1).index_select(0, place)

    return look


def rows_of_requests(inputs: Inputs) -> Tensor:
    """The row of each of a request's new tokens, `[requests, tokens]`; any row where it has fewer."""
    numbers, bucket = inputs.numbers, inputs.bucket
    source = numbers.start[:, None] + torch.arange(bucket.tokens, device=numbers.start.device)
    return source.clamp_(max=bucket.rows - 1)


def visible(inputs: Inputs, pattern: int) -> Tensor:
    """Which keys each token sees under a pattern: bool `[requests, tokens, span]`, by positions of its request.

    In a chain these are the positions up to the token's own, from the first in reach. In a tree the nodes follow the
    committed tokens; mask bits mark those on the token's path and in reach.
    """
    bucket, numbers = inputs.bucket, inputs.numbers
    source = rows_of_requests(inputs)
    place = torch.arange(bucket.span, device=source.device)
    seen = place >= numbers.first[pattern][source][..., None]
    seen &= place < numbers.until[source][..., None]
    if not bucket.words:
        return seen
    node = (place - numbers.length[:, None])[:, None]  # [requests, 1, span]
    word = (node // WORD_BITS).clamp(0, bucket.words - 1)
    path = numbers.path[pattern][source]  # [requests, tokens, words]
    bit = path.gather(-1, word.expand(-1, bucket.tokens, -1)) >> node.remainder(WORD_BITS) & 1
    return seen | ((bit == 1) & (node >= 0) & (node < WORD_BITS * bucket.words))


def additive_mask(seen: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """A mask `[requests, 1, tokens * group, span]` for scores, from bool `[requests, tokens, span]`."""
    requests, tokens, span = seen.shape
    hidden = ~seen[:, :, None].expand(-1, -1, group, -1).reshape(requests, 1, tokens * group, span)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
