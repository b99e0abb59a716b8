"""Keys and values in 8 bits: half the memory of bfloat16, a quarter of that of float32.

Each token and head has codes from -127 to 127 and one scale in float32, for keys and for values. An entry is quantised
once, when it is written, from the number that the model's dtype would keep. Commits, growth and shared prefixes move
codes and scales, so all forwards read the same ones, drafted or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.models.cache.buffers import Buffers

SCALE_BYTES = 4


def encoded(entries: Tensor) -> Tensor:
    """Entries `[..., width]` as int8 `[..., width + 4]`: codes, then the bytes of their scale max|x| / 127.

    Codes are rounded to the nearest, ties to even. Entries that are not finite get a scale that is not finite.
    """
    numbers = entries.float()
    scale = numbers.abs().amax(-1, keepdim=True) / 127
    codes = (numbers / torch.where(scale > 0, scale, 1.0)).round().to(torch.int8)
    return torch.cat([codes, scale.contiguous().view(torch.int8)], -1)


def decoded(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers `[..., width]` of what `encoded` returned."""
    scale = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (stored[..., :-SCALE_BYTES] * scale).to(dtype)


class CodedBuffers(Buffers):
    """Buffers of codes, which give and take numbers of `dtype`; the native forward reads the codes themselves."""

    coded = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def addressed(
        self, calls: int, kv_heads: int, key_width: int, value_width: int, dtype: torch.dtype
    ) -> tuple[list[Tensor], list[Tensor]]:
        return super().addressed(calls, kv_heads, key_width + SCALE_BYTES, value_width + SCALE_BYTES, torch.int8)

    def write(self, call: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        all_keys, all_values = super().write(call, encoded(keys), encoded(values))
        return decoded(all_keys.transpose(1, 2), self._dtype).transpose(1, 2), decoded(all_values, self._dtype)

    def write_path(
        self, call: int, length: int, path: Sequence[int], keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        all_keys, all_values = super().write_path(call, length, path, encoded(keys), encoded(values))
        return decoded(all_keys, self._dtype), decoded(all_values, self._dtype)

    def entry(self, call: int, length: int) -> tuple[Tensor, Tensor]:
        keys, values = super().entry(call, length)
        return decoded(keys, self._dtype), decoded(values, self._dtype)
