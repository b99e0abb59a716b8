"""Hugging Face folders with quantised weights (GPTQ, AWQ, compressed-tensors, bitsandbytes, FP8): layers and the model.

Integer codes are all scale * (code - zero), with scales and zeros shared by a group of an output's inputs. Small
floating-point ones are dequantised.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from truedraft.errors import ModelError, UnsupportedModelError, first_line
from truedraft.models.checkpoint import Place, tensors_of
from truedraft.models.gguf import without_weights
from truedraft.models.quantized import GROUP, QuantizedWeight, Scheme, StoredWeight

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
    """The format of a folder's codes, from config.json."""

    bits: tuple[int, ...]  # possible numbers of bits of a code
    groups: tuple[int, ...] = (0,)  # possible numbers of inputs that share a scale; 0 for all of them
    others: bool = False  # whether some layers have other bits
    zeros_less_one: bool = False  # whether zeros are stored less one, as in GPTQ's first format


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


READ_HERE = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "bitsandbytes")
"""Quantisation methods that this module reads, by config.json's names."""
BY_TRANSFORMERS = ("mxfp4", "torchao")
"""Methods that transformers reads; the weights are then dequantised."""
_FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
_PACKED = (None, "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision", "dense")
# Tensors for products with quantised inputs and calibrated scales; our products compute their own scales.
_OF_ACTIVATIONS = {
    *("input_scale", "input_zero_point", "input_scale_ub", "output_scale", "output_zero_point", "activation_scale"),
    *("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point"),
}
_OF_WEIGHTS = {
    *("weight", "bias", "qweight", "qzeros", "scales", "g_idx", "SCB", "weight_format"),
    *("weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("weight_global_scale", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    *STATES,
}
_FLOATS = {"F64", "F32", "F16", "BF16"}
_NUMBERS_OF = {"F8_E4M3", "F8_E5M2"}
Read = TypeVar("Read")


class QuantizedFolder:
    """A quantised model's tensors by layer; UnsupportedModelError for unknown codes, ModelError for missing tensors."""

    def __init__(self, source: str, config: Any, name: str, revision: str | None) -> None:
        self._name = name
        said = config.quantization_config
        self._said: dict[str, Any] = said if isinstance(said, dict) else said.to_dict()
        self._method = method_of(config)
        self._layout, self._block = _layout_of(self._method or "", self._said, name), _block_of(self._said)
        self._plain: dict[str, tuple[LayerTensors, str]] = {}
        self._numbers: dict[str, Callable[[], Tensor]] = {}
        self._codes: dict[str, StoredWeight] = {}
        for layer in _layers(source, name, revision):
            self._add(layer)

    def _add(self, layer: LayerTensors) -> None:
        ends, name = set(layer.places), f"{layer.name}.weight"
        weight = layer.places.get("weight")
        reader = self._reader(layer)
        own = {"bias"} & ends
        if reader is not None:
            self._codes[name] = _later(reader, layer, self._layout)
        elif ends.intersection(STATES):
            self._numbers[name] = _naming(layer, four_bits)
        elif weight is not None and weight.dtype in _NUMBERS_OF:
            layer.shape("weight_scale_inv" if "weight_scale_inv" in ends else "weight_scale")
            self._numbers[name] = _naming(layer, fp8, self._block)
        else:
            if weight is not None and weight.dtype not in _FLOATS:
                raise layer.broken(f"has a weight of {weight.dtype}, and no scales that would make it numbers")
            own = ends - _OF_ACTIVATIONS
        for end in own:
            self._plain[f"{layer.name}.{end}" if layer.name else end] = layer, end

    def _reader(self, layer: LayerTensors) -> Callable[[LayerTensors, Layout], StoredWeight] | None:
        weight = layer.places.get("weight")
        if "qweight" in layer.places:
            self._refuse_other_words(layer, "qweight", "qzeros")
            return awq if self._method == "awq" else gptq
        if "weight_packed" in layer.places:
            self._refuse_other_words(layer, "weight_zero_point")
            if layer.places["weight_packed"].dtype != "I32" or "weight_global_scale" in layer.places:
                raise not_read(self._name, f"in the format {self._said.get('format')!r}")
            return packed
        if weight is None or weight.dtype != "I8":
            return None
        return of_bitsandbytes if self._method == "bitsandbytes" else whole

    def _refuse_other_words(self, layer: LayerTensors, *ends: str) -> None:
        for end in ends:
            if end in layer.places and layer.places[end].dtype != "I32":
                raise layer.unread(f"{end} of {layer.places[end].dtype} in place of I32")

    def by_codes(self, config: Any, dtype: torch.dtype) -> PreTrainedModel | None:
        """The model with `quantized` weights, of the unquantised model's `config`; None if some cannot be."""
        model = without_weights(config, dtype)
        self._drop_biases(model)
        self._refuse_turned(model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        known = {*self._codes, *self._plain}
        required = set(dict(model.named_parameters()))
        fits = not self._numbers and known <= set(parameters) and required <= known
        if not fits or not self._tied_alike(parameters):
            return None
        for name in (*self._codes, *self._plain):
            tensor, weight = self._codes.get(name) or self._tensor(name), parameters[name]
            if tuple(tensor.shape) != tuple(weight.shape):
                raise ModelError(
                    f"{self._name!r} has {name!r} of the shape {list(tensor.shape)}, and its config.json has "
                    f"{list(weight.shape)}; fetch its files again, or mend config.json"
                )
            if isinstance(tensor, StoredWeight):
                weight.quantized = tensor
            else:
                weight.data = tensor.to(weight.dtype)
        return model

    def _tied_alike(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        first: dict[int, str] = {}
        for name in (*self._codes, *self._plain):
            other = first.setdefault(id(parameters[name]), name)
            if other != name and (
                not {name, other} <= set(self._plain) or not torch.equal(self._tensor(name), self._tensor(other))
            ):
                return False
        return True

    def _tensor(self, name: str) -> Tensor:
        layer, end = self._plain[name]
        return layer[end]

    def numbers(self, dtype: torch.dtype) -> dict[str, Tensor]:
        made = {name: stored.read().dequantized().to(dtype) for name, stored in self._codes.items()}
        made |= {name: read().to(dtype) for name, read in self._numbers.items()}
        return made | {name: self._tensor(name) for name in self._plain}

    def _drop_biases(self, model: PreTrainedModel) -> None:
        known = dict(model.named_parameters(remove_duplicate=False))
        for weight in self._codes:
            name = f"{weight.removesuffix('.weight')}.bias"
            if name in self._plain and weight in known and name not in known and not self._tensor(name).any():
                del self._plain[name]

    def _refuse_turned(self, model: PreTrainedModel) -> None:
        modules = dict(model.named_modules())
        names = (name.removesuffix(".weight") for name in (*self._codes, *self._numbers))
        if any(isinstance(modules.get(name), Conv1D) for name in names):
            raise not_read(self._name, "of layers that have their inputs first, as GPT-2's")


def _layers(source: str, name: str, revision: str | None) -> Iterator[LayerTensors]:
    found: defaultdict[str, dict[str, Place]] = defaultdict(dict)
    known = _OF_WEIGHTS | _OF_ACTIVATIONS
    for tensor, place in tensors_of(source, name, revision).items():
        parts = tensor.split(".")
        ends = (".".join(parts[first:]) for first in range(len(parts)))  # of "a.b.c" all, "b.c" and "c"
        end = next((each for each in ends if each in known), tensor)
        found[tensor[: -len(end)].removesuffix(".")][end] = place
    if not found:
        raise ModelError(f"{name!r} has quantised weights, and no model.safetensors that holds them; fetch it again")
    for layer, places in found.items():
        yield LayerTensors(name, layer, places)


def _later(reader: Callable[[LayerTensors, Layout], StoredWeight], layer: LayerTensors, layout: Layout) -> StoredWeight:
    """A layer's weight, which is read for its shape, freed, and read again when its codes are needed."""
    read = _naming(layer, reader, layout)
    return replace(read(), rows=lambda index: read().rows(index))


def _naming(layer: LayerTensors, read: Callable[..., Read], *given: Any) -> Callable[[], Read]:
    def reading() -> Read:
        try:
            return read(layer, *given)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise layer.broken(f"has tensors that do not fit together ({first_line(error)})") from error

    return reading


def method_of(config: Any) -> str | None:
    """The quantisation method of a model in config.json; None if it is not quantised."""
    said = getattr(config, "quantization_config", None)
    if not said:
        return None
    settings: dict[str, Any] = said if isinstance(said, dict) else said.to_dict()
    return str(getattr(settings.get("quant_method"), "value", settings.get("quant_method") or "bitsandbytes"))


def make_numbers(model: PreTrainedModel) -> None:
    """Dequantise the weights of a model that transformers read, to its dtype."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if type(weight.data) is not Tensor:
                numbers = weight.dequantize().to(model.dtype)
                setattr(module, name, nn.Parameter(numbers, requires_grad=False))
    model.config.__dict__.pop("quantization_config", None)


def _layout_of(method: str, said: Mapping[str, Any], name: str) -> Layout:
    if method in ("gptq", "awq"):
        return _layout_of_words(method, said, name)
    if method == "compressed-tensors":
        groups = [each.get("weights") or {} for each in (said.get("config_groups") or {}).values()]
        _refuse_unlike(said, groups, name)
        bits = tuple(dict.fromkeys(int(each.get("num_bits") or 8) for each in groups)) or (8,)
        sizes = {max(int(each.get("group_size") or 0), 0) for each in groups}
        return Layout(bits, tuple(sizes) or (0,), others=len(groups) > 1)
    return Layout((8,))


def _refuse_unlike(said: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], name: str) -> None:
    for each in (said, *(said.get("config_groups") or {}).values()):
        if (written := each.get("format")) not in _PACKED:
            raise not_read(name, f"in the format {written!r}")
    if (sparsity := (said.get("sparsity_config") or {}).get("format")) not in (None, "dense"):
        raise not_read(name, f"with a sparsity_config of the format {sparsity!r}")
    if said.get("transform_config"):
        raise not_read(name, f"with the transform_config {said['transform_config']!r}")
    for weights in groups:
        strategy, kind = weights.get("strategy"), weights.get("type", "int")
        if strategy not in (None, "tensor", "channel", "group", *(["block"] if kind == "float" else [])):
            raise not_read(name, f"by the strategy {strategy!r} with codes of the type {kind!r}")


def _layout_of_words(method: str, said: Mapping[str, Any], name: str) -> Layout:
    bits, group = said.get("bits", said.get("w_bit", 4)), said.get("group_size", 128)
    formats = [str(said[place]).lower() for place in ("checkpoint_format", "format", "version") if said.get(place)]
    for written in formats:
        if written not in _FORMATS[method]:
            raise not_read(name, f"in {method.upper()}'s format {written!r}")
    for word, only in (("is_marlin_format", False), ("zero_point", True), ("pack_dtype", "int32")):
        if said.get(word, only) != only:
            raise not_read(name, f"with the {word} {said[word]!r}")
    dynamic = said.get("dynamic") or {}
    sizes = [group, *(each.get("group_size", group) for each in dynamic.values() if isinstance(each, dict))]
    if type(bits) is not int or any(type(size) is not int for size in sizes):
        raise ModelError(
            f"config.json of {name!r} says {bits!r} bits in groups of {group!r}; fetch it again, or write numbers"
        )
    first = method == "gptq" and formats[:1] != ["gptq_v2"]
    return Layout((bits,), tuple(max(size, 0) for size in sizes), others=bool(dynamic), zeros_less_one=first)


def _block_of(said: Mapping[str, Any]) -> tuple[int, int] | None:
    found = said.get("weight_block_size")
    for each in (said.get("config_groups") or {}).values():
        found = found or (each.get("weights") or {}).get("block_structure")
    if isinstance(found, str):
        found = found.split("x")
    return None if found is None else (int(found[0]), int(found[1]))
