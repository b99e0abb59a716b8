"""Dequantise small floating-point weights in Hugging Face folders: FP8, and bitsandbytes' types of 4 bits."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from truedraft.models.integer_codes import Tensors

STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


def fp8(tensors: Tensors, block: tuple[int, int] | None) -> Tensor:
    """A layer's weight `[out, in]`, float32, from codes of 8 bits and their scales.

    Args:
        tensors: weight, and weight_scale_inv or weight_scale: one number, one for each output, or one for each block.
        block: outputs and inputs that share a scale, if config.json says so.
    """
    end = "weight_scale_inv" if tensors.get("weight_scale_inv") is not None else "weight_scale"
    written, weight = tensors[end], tensors["weight"].float()
    scales = (written.float() - 127.0).exp2() if written.dtype is torch.uint8 else written.float()
    out, inputs = weight.shape
    if scales.numel() == 1:
        return weight * scales.flatten()
    if scales.numel() == out and scales.shape[0] == out:
        return weight * scales.reshape(out, 1)
    if block is None or scales.shape != (-(-out // block[0]), -(-inputs // block[1])):
        said = "no blocks" if block is None else f"blocks of {block[0]} times {block[1]}"
        raise tensors.broken(
            f"has {end} of the shape {list(scales.shape)} for a weight of {[out, inputs]}, and config.json says {said}"
        )
    spread = scales.repeat_interleave(block[0], 0)[:out].repeat_interleave(block[1], 1)[:, :inputs]
    return weight * spread


def four_bits(tensors: Tensors) -> Tensor:
    """A layer's weight by bitsandbytes in 4 bits (NF4, FP4): codes index a table of numbers, times a scale of a
    block. Scales may themselves be codes of another table (double quantisation)."""
    state = next(found for end in STATES if (found := tensors.get(end)) is not None)
    try:
        said: dict[str, Any] = json.loads(bytes(state.tolist()))
        shape, size = tuple(said["shape"]), int(said["blocksize"])
        scales = tensors["weight.absmax"]
        if scales.dtype is torch.uint8:
            own = tensors["weight.nested_quant_map"][scales.long()]
            of_scales = tensors["weight.nested_absmax"].repeat_interleave(int(said["nested_blocksize"]))
            scales = own * of_scales[: len(own)] + float(said["nested_offset"])
    except (ValueError, KeyError, TypeError) as error:
        raise tensors.broken("has a quant_state that cannot be read") from error
    octets = tensors["weight"].flatten().view(torch.uint8)
    codes = torch.stack([octets >> 4, octets & 15], dim=-1).flatten()
    count = shape[0] * shape[1]
    if not count <= len(codes) <= count + 1 or len(scales) != -(-count // size):
        raise tensors.broken(f"has {len(codes)} codes and {len(scales)} scales for a weight of {list(shape)}")
    numbers = tensors["weight.quant_map"][codes[:count].long()]
    return (numbers * scales.repeat_interleave(size)[:count]).view(shape)
