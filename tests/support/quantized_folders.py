"""Hugging Face folders with quantised weights, by quantisers of our own: a tiny Llama, and the same in its numbers.

Each quantiser is written from its format's description, rounds to the nearest code, and packs bit by bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from support.tiny_models import GROUPED, build

Made = tuple[dict[str, Tensor], Tensor]
"""A layer's tensors by what stands behind its name, and the weight `[out, in]` that they stand for, in float32."""


SIZES: dict[str, Any] = GROUPED | {
    "vocab_size": 192, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 256
}  # fmt: skip
"""All that are read in groups are multiples of 64."""


def tiny_llama() -> PreTrainedModel:
    """Two layers."""
    return build(LlamaConfig(**SIZES), seed=3, spread=0.15)


@dataclass(frozen=True)
class Grouped:
    """Codes `[out, in]` with scales and zeros `[out, groups]` of groups of inputs, and the group `[in]` of each."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor

    @property
    def numbers(self) -> Tensor:
        """`[out, in]`, float32."""
        return self.scales.float()[:, self.group_of] * (self.codes - self.zeros[:, self.group_of]).float()


def grouped(
    weight: Tensor,
    bits: int,
    group: int,
    *,
    symmetric: bool,
    seed: int | None = None,
    dtype: torch.dtype = torch.float16,
) -> Grouped:
    """A weight in codes from 0 on, `group` inputs to a scale (-1: all); `seed` is of the order in which they fall into
    groups.
    """
    inputs, most = weight.shape[1], 2**bits - 1
    group_of = torch.arange(inputs) // (group if group > 0 else inputs)
    if seed is not None:
        group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    scales, zeros = [], []
    for number in range(int(group_of.max()) + 1):
        own = weight[:, group_of == number]
        if symmetric:
            scales.append(own.abs().amax(1) * 2 / most)
            zeros.append(torch.full_like(scales[-1], 2 ** (bits - 1)))
        else:
            low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
            scales.append((high - low) / most)
            zeros.append((-low / scales[-1]).round().clamp(0, most))
    scale, zero = torch.stack(scales, 1).to(dtype), torch.stack(zeros, 1).int()
    codes = (weight / scale.float()[:, group_of]).round() + zero[:, group_of]
    return Grouped(codes.clamp(0, most).int(), scale, zero, group_of)


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes `[rows, codes]` in words of 32 bits `[rows, words]`, the first in the lowest bits."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word)).unflatten(1, (-1, per_word))
    whole = (padded << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()


def gptq(weight: Tensor, bits: int = 4, group: int = 32, *, first_format: bool = True, **options: Any) -> Made:
    """As GPTQModel and AutoGPTQ write it."""
    made = grouped(weight, bits, group, **{"symmetric": False} | options)
    zeros = words(made.zeros.T, bits)
    less = int(first_format) * sum(1 << at for at in range(0, 32, bits))
    tensors = {
        "qweight": words(made.codes, bits).T.contiguous(),
        "qzeros": (zeros.long() - less).to(torch.int32),
        "scales": made.scales.T.contiguous(),
        "g_idx": made.group_of.int(),
    }
    return tensors, made.numbers


def awq(weight: Tensor, group: int = 32) -> Made:
    """As AutoAWQ writes it for its kernel "gemm"."""
    made = grouped(weight, 4, group, symmetric=False)

    def in_words(codes: Tensor) -> Tensor:
        return words(codes.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    tensors = {"qweight": in_words(made.codes.T), "qzeros": in_words(made.zeros.T), "scales": made.scales.T}
    return tensors, made.numbers


def packed(weight: Tensor, bits: int = 4, group: int = 32, **options: Any) -> Made:
    """As compressed-tensors writes "pack-quantized"."""
    made = grouped(weight, bits, group, **{"symmetric": True} | options)
    tensors = {"weight_packed": words(made.codes, bits), "weight_scale": made.scales}
    tensors["weight_shape"] = torch.tensor(weight.shape)
    if not options.get("symmetric", True):
        tensors["weight_zero_point"] = words(made.zeros.T, bits).T
    tensors["weight_g_idx"] = made.group_of.int() if "seed" in options else torch.full((weight.shape[1],), -1)
    return tensors, made.numbers


def whole(weight: Tensor, *, symmetric: bool = True, dtype: torch.dtype = torch.bfloat16) -> Made:
    """As compressed-tensors writes "int-quantized": W8A8."""
    made = grouped(weight, 8, -1, symmetric=symmetric, dtype=dtype)
    tensors = {"weight": (made.codes - 128).to(torch.int8), "weight_scale": made.scales}
    if not symmetric:
        tensors["weight_zero_point"] = (made.zeros - 128).to(torch.int8)
    return tensors | {"input_scale": torch.ones(1)}, made.numbers


def bitsandbytes_8(weight: Tensor, dtype: torch.dtype = torch.float32) -> Made:
    """As bitsandbytes writes 8 bits."""
    most = weight.abs().amax(1).to(dtype)
    codes = (weight * (127.0 / most)[:, None]).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, (most.float() * 0.007874015718698502)[:, None] * codes


def fp8(weight: Tensor, block: tuple[int, int] | None, *, end: str = "weight_scale_inv") -> Made:
    """FP8 with a scale for each block, for each output (of a width of 0), or for all (None); `end` is what they are
    called.
    """
    out, inputs = weight.shape
    high, wide = block or (out, inputs)
    wide = wide or inputs
    padded = torch.nn.functional.pad(weight, (0, -inputs % wide, 0, -out % high))
    blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
    scales = blocks.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(high, 0)[:out].repeat_interleave(wide, 1)[:, :inputs]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    written = scales.flatten()[0] if block is None else scales
    return {"weight": codes, end: written, "activation_scale": torch.ones(())}, codes.float() * spread


def four_bits(weight: Tensor, *, block: int = 64, double: bool = False) -> Made:
    """As bitsandbytes writes NF4: codes of a table of 16 numbers, by quantiles of a normal distribution.

    If `double`, the scales of blocks are codes of a table themselves.
    """
    quantiles = torch.special.ndtri(torch.linspace(0.03, 0.97, 16))
    table = quantiles / quantiles.abs().max()
    blocks = weight.reshape(-1, block)
    scales = blocks.abs().amax(1)
    said: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    tensors = {"weight.quant_map": table, "weight.absmax": scales}
    if double:
        own, mean = torch.linspace(-1, 1, 256), float(scales.mean())
        most = (scales - mean).abs().view(-1, 16).amax(1)
        codes = ((scales - mean)[:, None] / most.repeat_interleave(16)[:, None] - own).abs().argmin(1)
        scales = own[codes] * most.repeat_interleave(16) + mean
        said |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": mean}
        tensors |= {
            "weight.absmax": codes.to(torch.uint8),
            "weight.nested_absmax": most,
            "weight.nested_quant_map": own,
        }
    codes = (blocks[..., None] / scales[:, None, None] - table).abs().argmin(-1)
    pairs = codes.flatten().view(-1, 2)
    tensors["weight"] = (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    return tensors, (table[codes] * scales[:, None]).view(weight.shape)


def write(
    folder: Path, quantise: Callable[[Tensor], Made], said: dict[str, Any], model: PreTrainedModel | None = None
) -> tuple[Path, Path]:
    """A folder with quantised linear layers, the LM head left out, and one with the numbers that they stand for."""
    made, numbers = folder / "quantised", folder / "numbers"
    (model or tiny_llama()).save_pretrained(numbers)
    shutil.copytree(numbers, made)
    tensors, kept = load_file(numbers / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            kept[name] = tensor
            continue
        layer, tensors[name] = quantise(tensor)
        kept |= {f"{name.removesuffix('weight')}{end}": each.contiguous() for end, each in layer.items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, numbers / "model.safetensors", {"format": "pt"}
    )
    save_file(kept, made / "model.safetensors", {"format": "pt"})
    edit(made, quantization_config=said)
    return made, numbers


def edit(folder: Path, **fields: Any) -> None:
    """Change a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
