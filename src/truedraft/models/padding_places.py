"""Where the entries of a model go in the wider model that it is padded to.

The padded model must not only compute the same function but add the same numbers in the same order, or its results
differ by rounding. So entries keep their order, and what stands between or behind them is multiplied by zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Measured for oneDNN on CPUs with AVX-512 BF16: a bfloat16 product over up to 1,024 inputs adds up blocks of 512 and
# then the blocks; over more inputs (and more than one row) blocks of 1,024.
_BLOCK = 512
_LONG_BLOCK = 1024


def choose_heads(heads: int, kv_heads: int, head_size: int, width: int) -> tuple[int, int] | None:
    """Query heads and key/value heads of a padded layer; None where these heads do not fit its width.

    Attention becomes as wide as the layer, or as near below as transformers allows (heads must divide the width),
    with as many key/value heads as leave each of them at least as many query heads as before.

    Args:
        heads: query heads of the model.
        kv_heads: its key/value heads.
        head_size: entries of a head, which do not change.
        width: of the padded layer.

    >>> choose_heads(6, 2, 64, 1536)
    (24, 8)
    >>> choose_heads(10, 2, 64, 768)  # groups of 5 become groups of 6
    (12, 2)
    """
    group = heads // kv_heads
    for padded in range(width // head_size, heads - 1, -1):
        if width % padded:
            continue
        for padded_kv in range(padded // group, kv_heads - 1, -1):
            if padded % padded_kv == 0:
                return padded, padded_kv
    return None


def head_places(heads: int, kv_heads: int, padded_heads: int, padded_kv_heads: int) -> list[int]:
    """The query head of the padded layer that each query head of the model becomes; key/value heads keep their number.

    Query head i reads key/value head i // group. With 4 query and 2 key/value heads the groups are (0, 1) and (2, 3);
    padded to 9 and 3 they are (0, 1, 2), (3, 4, 5) and (6, 7, 8). So heads 0 and 1 stay, heads 2 and 3 become 3 and
    4, which read key/value head 1 as before, and 2, 5, 6, 7 and 8 are new. Heads keep their order, so sums over them
    do too.

    >>> head_places(4, 2, 9, 3)
    [0, 1, 3, 4]
    """
    group, padded_group = heads // kv_heads, padded_heads // padded_kv_heads
    return [head // group * padded_group + head % group for head in range(heads)]


def entries_of(places: list[int], head_size: int) -> Tensor:
    """`[heads * head_size]`, int64: where the entries of heads go, by where the heads go."""
    return (torch.tensor(places)[:, None] * head_size + torch.arange(head_size)).flatten()


def inner_places(inner: int, padded: int, dtype: torch.dtype) -> Tensor:
    """Where the entries inside an MLP go: `[inner]`, int64, rising.

    They go first. Only in bfloat16 sums over 513 to 1,024 entries are made of two halves where sums over more are not
    split there: the second half then goes to the next long block, so that the two are still added up apart. (In float32
    no such split was seen, and entries in one piece gave the same bits.)
    """
    places = torch.arange(inner)
    split = _BLOCK < inner <= _LONG_BLOCK and padded >= _LONG_BLOCK + inner - _BLOCK
    return places + places // _BLOCK * _BLOCK if split and dtype == torch.bfloat16 else places
