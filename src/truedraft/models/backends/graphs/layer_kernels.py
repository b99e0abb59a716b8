"""Triton kernels between a Llama-like layer's products, with the same roundings as `truedraft.models.llama`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from truedraft.models.llama import RootMeanSquareNorm

_GATED_AT_ONCE: tl.constexpr = tl.constexpr(1024)
_HEADS_AT_ONCE: tl.constexpr = tl.constexpr(8)
FUSES = True
"""Whether a product and a sum may be rounded at once, as in torch's own kernels."""


def rms_norm(x: Tensor, norm: RootMeanSquareNorm) -> Tensor:
    """`norm(x)` for `[rows, width]`, contiguous, in float32, rounded once at the end for all families."""
    rows, width = x.shape
    out = torch.empty_like(x)
    if rows:
        block = triton.next_power_of_2(width)
        warps = min(16, max(1, block // 512))
        _norm_rows[rows,](
            x, norm.weight, out, norm.eps, norm.offset, width=width, block=block,
            num_warps=warps, enable_fp_fusion=FUSES,
        )  # fmt: skip
    return out


def rotate_and_write(
    qkv: Tensor,  # [rows, (heads + 2 kv_heads) * width], contiguous: queries, keys, values
    table: Tensor,  # see `RotaryTable`; its rotation may be narrower than heads
    positions: Tensor,  # [rows], int64, within the table
    target: Tensor,  # [rows], int64: index of each row's key and value in the concatenated pages
    keys: Tensor,  # [pages, page, kv_heads, width], contiguous; written to, and so are `values`
    values: Tensor,
    query_norm: RootMeanSquareNorm | None = None,  # of each head; both norms or none, with one eps and offset
    key_norm: RootMeanSquareNorm | None = None,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Normalise heads where the family does, rotate, and write keys and values to their pages.

    Returns queries `[rows, heads, width]`.
    """
    kv_heads, width = keys.shape[2:]
    rows, heads = qkv.shape[0], qkv.shape[1] // width - 2 * kv_heads
    query = qkv.new_empty(rows, heads, width)
    normed = query_norm is not None and key_norm is not None
    weights = (query_norm.weight, key_norm.weight) if query_norm is not None and key_norm is not None else (qkv, qkv)
    eps, offset = (0.0, 0.0) if query_norm is None else (query_norm.eps, query_norm.offset)
    if rows:
        _rotate_and_write[rows, triton.cdiv(heads + 2 * kv_heads, _HEADS_AT_ONCE.value)](
            qkv, table, positions, target, query, keys, values, *weights, eps, offset,
            heads=heads, kv_heads=kv_heads, width=width, padded=triton.next_power_of_2(width),
            rotated=table.shape[-1] * 2 // 3, normed=normed, interleaved=interleaved,
            num_warps=4, enable_fp_fusion=FUSES,
        )  # fmt: skip
    return query


def gated(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, the gate rounded first: `[rows, 2 * inner]`, contiguous, gates first, to `[rows, inner]`."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    if rows:
        _gate[rows, triton.cdiv(inner, _GATED_AT_ONCE.value)](
            gate_up, out, inner=inner, num_warps=4, enable_fp_fusion=FUSES
        )
    return out


@triton.jit(do_not_specialize=["eps", "offset"])
def _norm_rows(x, weight, out, eps, offset, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, block)
    inside = at < width
    numbers = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset
    scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / width + eps)
    tl.store(out + row + at, (numbers * scale * factors).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps", "offset"])
def _rotate_and_write(
    qkv, table, positions, target, query, keys, values, query_weight, key_weight, eps, offset,
    heads: tl.constexpr, kv_heads: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, rotated: tl.constexpr,
    normed: tl.constexpr, interleaved: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * _HEADS_AT_ONCE + tl.arange(0, _HEADS_AT_ONCE)
    d = tl.arange(0, padded)
    held = (head < heads + 2 * kv_heads)[:, None] & (d < width)[None, :]
    is_query = head < heads
    is_key = (head >= heads) & (head < heads + kv_heads)
    turned = (is_query | is_key)[:, None]

    # Entry d is rotated with its partner: (a, b) becomes (a cos - b sin, b cos + a sin).
    half: tl.constexpr = rotated // 2
    if interleaved:
        is_first = d % 2 == 0
        angle = d // 2
        partner = tl.where(is_first, d + 1, d - 1)
    else:
        is_first = d < half
        angle = tl.where(is_first, d, d - half)
        partner = tl.where(is_first, d + half, d - half)
    rotates = d < rotated
    partner = tl.where(rotates, partner, d)
    entries = qkv + (row * (heads + 2 * kv_heads) + head)[:, None] * width
    own = tl.load(entries + d[None, :], mask=held, other=0.0)
    other = tl.load(entries + partner[None, :], mask=held & rotates[None, :], other=0.0)
    dtype = own.dtype
    if normed:
        numbers = own.to(tl.float32)
        scale = tl.rsqrt(tl.sum(numbers * numbers, 1) / width + eps)[:, None]
        at = tl.zeros([_HEADS_AT_ONCE, 1], tl.int32)
        weight = tl.where(is_query[:, None], query_weight + at, key_weight + at)
        own_weight = tl.load(weight + d[None, :], mask=held, other=0.0).to(tl.float32) + offset
        other_weight = tl.load(weight + partner[None, :], mask=held, other=0.0).to(tl.float32) + offset
        own = tl.where(turned, (numbers * scale * own_weight).to(dtype), own)
        other = (other.to(tl.float32) * scale * other_weight).to(dtype)
    position = tl.load(positions + row)
    angles = table + position * (rotated + half)
    cosine = tl.load(angles + angle, mask=rotates, other=1.0).to(tl.float32)[None, :]
    sine = tl.load(angles + rotated + angle, mask=rotates, other=0.0).to(tl.float32)
    sine = tl.where(is_first, -sine, sine)[None, :]
    product = (own.to(tl.float32) * cosine).to(dtype).to(tl.float32)
    result = tl.where(turned, (product + other.to(tl.float32) * sine).to(dtype), own)

    tl.store(query + (row * heads + head)[:, None] * width + d[None, :], result, mask=held & is_query[:, None])
    place = tl.load(target + row) * kv_heads
    key = (place + head - heads)[:, None] * width + d[None, :]
    tl.store(keys + key, result, mask=held & is_key[:, None])
    value = (place + head - heads - kv_heads)[:, None] * width + d[None, :]
    tl.store(values + value, result, mask=held & (head >= heads + kv_heads)[:, None])


@triton.jit
def _gate(gate_up, out, inner: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * _GATED_AT_ONCE + tl.arange(0, _GATED_AT_ONCE)
    inside = at < inner
    gate = tl.load(gate_up + row * 2 * inner + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + at, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * inner + at, (active * up).to(out.dtype.element_ty), mask=inside)
