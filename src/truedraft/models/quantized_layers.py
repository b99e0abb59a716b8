"""Layers of Hugging Face folders with quantised weights: GPTQ, AWQ, compressed-tensors, bitsandbytes, FP8.

Integer codes are all scale * (code - zero), with scales and zeros shared by a group of an output's inputs. Small
floating-point ones are dequantised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truedraft.errors import ModelError, UnsupportedModelError
from truedraft.models.quantized import GROUP, QuantizedWeight, Scheme, StoredWeight
from truedraft.models.weight_files import Place

BITS = (4, 8)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # position in its word of the code of each of 8 outputs
_ONE_127TH = 0.007874015718698502  # as bitsandbytes writes it
STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of one layer, by the last part of their names, such as "qweight"; each is read on access."""

    folder: str
    name: str
    places: Mapping[str, Place]

    def __getitem__(self, end: str) -> Tensor:
        self.shape(end)
        return self.places[end].read()

    def get(self, end: str) -> Tensor | None:
        return self[end] if end in self.places else None

    def shape(self, end: str) -> tuple[int, ...]:
        """The shape, without reading the tensor; raises ModelError, as `[]` does, if the folder lacks it."""
        if end not in self.places:
            raise self.broken(f"lacks its {end}")
        return self.places[end].shape

    def broken(self, what: str) -> ModelError:
        return ModelError(f"layer {self.name!r} of {self.folder!r} {what}; fetch its files again, or mend config.json")

    def unread(self, what: str) -> UnsupportedModelError:
        return not_read(self.folder, f"(layer {self.name!r}) with {what}")


def not_read(name: str, what: str) -> UnsupportedModelError:
    """The error for a folder in an unsupported format."""
    return UnsupportedModelError(
        f"{name!r} has quantised weights {what}, which truedraft does not read; name the model that it was made from, "
        "in bfloat16 or float32, or one by GPTQ, AWQ or compressed-tensors in 4 or 8 bits"
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """The format of a folder's codes, from config.json.

    Attributes:
        bits: possible numbers of bits of a code.
        groups: possible numbers of inputs that share a scale; 0 for all of them.
        others: whether some layers have other bits.
        zeros_less_one: whether zeros are stored less one, as in GPTQ's first format.
    """

    bits: tuple[int, ...]
    groups: tuple[int, ...] = (0,)
    others: bool = False
    zeros_less_one: bool = False


def gptq(tensors: LayerTensors, layout: Layout) -> StoredWeight:
    """GPTQ: qweight `[in / codes of a word, out]`, qzeros `[groups, out / codes of a word]`, scales `[groups, out]`.

    g_idx `[in]` is the group of each input. The first format stores words of zeros less one: a carry changes the next.
    """
    scales = tensors["scales"]
    groups, out = scales.shape
    known = tensors.get("g_idx")
    words = tensors.shape("qweight")[0]
    inputs = words * 32 // layout.bits[0] if known is None else len(known)
    bits = _known_bits(tensors, layout, words, inputs)
    _expect(tensors, "qweight", (words, out))
    less = tensors["qzeros"]
    zeros = unpacked(less + layout.zeros_less_one * sum(1 << at for at in range(0, 32, bits)), bits).T
    group_of = _in_order(tensors, inputs, layout, groups) if known is None else known
    return _grouped(tensors, bits, lambda: unpacked(tensors["qweight"].T, bits), scales.T, zeros, group_of)


def awq(tensors: LayerTensors, layout: Layout) -> StoredWeight:
    """AWQ: qweight `[in, out / 8]`, a word's even outputs first; qzeros `[groups, out / 8]`, scales `[groups, out]`."""
    scales = tensors["scales"]
    groups, out = scales.shape
    inputs = tensors.shape("qweight")[0]
    bits = _known_bits(tensors, layout, tensors.shape("qweight")[-1], out)
    if bits != 4:  # engines differ in their positions in a word
        raise tensors.unread(f"codes of {bits} bits by AWQ")
    _expect(tensors, "qweight", (inputs, out * bits // 32))

    def in_place(words: Tensor) -> Tensor:
        codes = unpacked(words, bits)
        placed = np.take(codes.numpy().reshape(len(codes), -1, 8), _AWQ_PLACES, axis=2)
        return torch.from_numpy(placed.reshape(len(codes), -1)).T

    zeros, group_of = in_place(tensors["qzeros"]), _in_order(tensors, inputs, layout, groups)
    return _grouped(tensors, bits, lambda: in_place(tensors["qweight"]), scales.T, zeros, group_of)


def packed(tensors: LayerTensors, layout: Layout) -> StoredWeight:
    """compressed-tensors in words: weight_packed `[out, in / codes of a word]`, weight_scale `[out, groups]` and shape.

    Optionally weight_zero_point `[out / codes of a word, groups]` and weight_g_idx `[in]`.
    """
    out, inputs = tensors["weight_shape"].tolist()
    scales = tensors["weight_scale"]
    bits = _known_bits(tensors, layout, tensors.shape("weight_packed")[-1], inputs)
    _expect(tensors, "weight_packed", (out, -(-inputs * bits // 32)))
    scales = _by_output(tensors, scales, out)
    zeros = None if (words := tensors.get("weight_zero_point")) is None else unpacked(words.T, bits)[:, :out].T
    group_of = _by_order(tensors, inputs, layout, scales.shape[1])

    def codes() -> Tensor:
        return unpacked(tensors["weight_packed"], bits)[:, :inputs]

    return _grouped(tensors, bits, codes, scales, zeros, group_of)


def whole(tensors: LayerTensors, layout: Layout) -> StoredWeight:
    """compressed-tensors in bytes: weight `[out, in]`, int8, weight_scale; maybe weight_zero_point and weight_g_idx."""
    out, inputs = tensors.shape("weight")
    scales = _by_output(tensors, tensors["weight_scale"], out)
    written = tensors.get("weight_zero_point")
    zeros = None if written is None else _from_zero(_by_output(tensors, written, out))
    group_of = _by_order(tensors, inputs, layout, scales.shape[1])
    return _grouped(tensors, 8, lambda: _from_zero(tensors["weight"]), scales, zeros, group_of)


def of_bitsandbytes(tensors: LayerTensors, layout: Layout) -> StoredWeight:
    """A layer of bitsandbytes in 8 bits: weight `[out, in]`, int8, and SCB, 127 times the scale of each output."""
    out, inputs = tensors.shape("weight")
    scales = _by_output(tensors, tensors["SCB"].float() * _ONE_127TH, out)
    group_of = torch.zeros(inputs, dtype=torch.int64)
    return _grouped(tensors, 8, lambda: _from_zero(tensors["weight"]), scales, None, group_of)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Codes `[rows, codes]` of words `[rows, words]` of 32 bits, the first in the lowest bits; uint8."""
    octets = np.ascontiguousarray(words.numpy()).view(np.uint8)  # one thread: small steps wait for others
    if bits == 8:
        return torch.from_numpy(octets)
    codes = np.empty((len(octets), 2 * octets.shape[1]), dtype=np.uint8)
    np.bitwise_and(octets, 15, out=codes[:, ::2])
    np.right_shift(octets, 4, out=codes[:, 1::2])
    return torch.from_numpy(codes)


def _from_zero(codes: Tensor) -> Tensor:
    return torch.from_numpy(codes.numpy().view(np.uint8) ^ 128)


def _known_bits(tensors: LayerTensors, layout: Layout, words: int, codes: int) -> int:
    fitting = [bits for bits in range(2, 9) if -(-codes * bits // 32) == words]
    bits = next((each for each in layout.bits if each in fitting), fitting[0] if fitting and layout.others else 0)
    if bits == 0:
        said = " or ".join(map(str, layout.bits))
        raise tensors.broken(f"has {codes} codes in {words} words of 32 bits, and config.json says {said} bits")
    if bits not in BITS:
        raise tensors.unread(f"codes of {bits} bits")
    return bits


def _expect(tensors: LayerTensors, end: str, shape: tuple[int, ...]) -> None:
    if tensors.shape(end) != shape:
        raise tensors.broken(f"has {end} of the shape {list(tensors.shape(end))} in place of {list(shape)}")


def _by_output(tensors: LayerTensors, scales: Tensor, out: int) -> Tensor:
    scales = scales.reshape(len(scales), -1) if scales.dim() else scales.view(1, 1)
    if len(scales) not in (1, out):
        raise tensors.broken(f"has scales of {len(scales)} outputs in place of {out}")
    return scales.expand(out, -1)


def _by_order(tensors: LayerTensors, inputs: int, layout: Layout, groups: int) -> Tensor:
    given = tensors.get("weight_g_idx")
    return _in_order(tensors, inputs, layout, groups) if given is None or bool((given < 0).all()) else given


def _in_order(tensors: LayerTensors, inputs: int, layout: Layout, groups: int) -> Tensor:
    sizes = dict.fromkeys(min(size, inputs) or inputs for size in layout.groups)
    fitting = [size for size in sizes if -(-inputs // size) == groups]
    if len(fitting) > 1:
        raise tensors.unread(f"{groups} groups of {inputs} inputs, which may be groups of {fitting[0]} or {fitting[1]}")
    return torch.arange(inputs) // (fitting or [*sizes])[0]


def _grouped(
    tensors: LayerTensors,
    bits: int,
    codes: Callable[[], Tensor],
    scales: Tensor,
    zeros: Tensor | None,
    group_of: Tensor,
) -> StoredWeight:
    """A weight of codes `[out, in]`, scales and zeros `[out, groups]` (None: middle code), inputs sorted by group."""
    groups, inputs = scales.shape[1], len(group_of)
    first, last = int(group_of.min()) + 1, int(group_of.max()) + 1
    if (first, last) != (1, groups):
        raise tensors.broken(f"has scales of {groups} groups, and inputs of groups {first} to {last}")
    if not bool(torch.isfinite(scales.float()).all()):
        raise tensors.broken("has scales that are no numbers")
    sorted_groups, order = group_of.sort(stable=True)
    of_piece = sorted_groups[::GROUP]
    if not torch.equal(sorted_groups, of_piece.repeat_interleave(GROUP)[:inputs]):
        raise tensors.unread(f"groups of inputs that are no multiples of {GROUP}")
    if zeros is not None and (zeros.shape != scales.shape):
        raise tensors.broken(f"has zeros of the shape {list(zeros.shape)}, and scales of {list(scales.shape)}")
    if zeros is not None and bool((zeros == 2 ** (bits - 1)).all()):
        zeros = None
    kept = scales.to(torch.float16)
    narrow = torch.equal(kept.float(), scales.float())
    kept = kept if narrow else scales.float()
    if zeros is None:
        scheme = Scheme.ONE if narrow else Scheme.WIDE
    else:
        scheme = Scheme.ZEROED if narrow else Scheme.WIDE_ZEROED
    moved = None if torch.equal(order, torch.arange(inputs)) else order.int()

    def spread(each: Tensor) -> Tensor:
        return torch.from_numpy(np.take(each.numpy(), of_piece.numpy(), axis=1))

    def rows(index: Tensor | slice) -> QuantizedWeight:
        found = codes().numpy()
        found = np.ascontiguousarray(found) if moved is None else np.take(found, moved.numpy(), axis=1)
        inner = None if zeros is None else spread(zeros)
        whole = QuantizedWeight(bits, scheme, torch.from_numpy(found), spread(kept), inner=inner, order=moved)
        return whole.rows(index)

    return StoredWeight((bits, scheme), rows, (len(scales), inputs), moved)


def fp8(tensors: LayerTensors, block: tuple[int, int] | None) -> Tensor:
    """A layer's weight `[out, in]`, float32, from 8-bit codes and their scales: one, one per output, or per `block`."""
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


def four_bits(tensors: LayerTensors) -> Tensor:
    """A layer's weight by bitsandbytes in 4 bits (NF4, FP4): table entries times block scales, maybe codes too."""
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
