"""Hugging Face folders with quantised weights: the tensors of a layer, their readers, and the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from truedraft.errors import ModelError, first_line
from truedraft.models import quantized_layers
from truedraft.models.gguf import without_weights
from truedraft.models.quantized import StoredWeight
from truedraft.models.quantized_layers import LayerTensors, Layout, not_read
from truedraft.models.weight_files import Place, tensors_of

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
    *quantized_layers.STATES,
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
        elif ends.intersection(quantized_layers.STATES):
            self._numbers[name] = _naming(layer, quantized_layers.four_bits)
        elif weight is not None and weight.dtype in _NUMBERS_OF:
            layer.shape("weight_scale_inv" if "weight_scale_inv" in ends else "weight_scale")
            self._numbers[name] = _naming(layer, quantized_layers.fp8, self._block)
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
            return quantized_layers.awq if self._method == "awq" else quantized_layers.gptq
        if "weight_packed" in layer.places:
            self._refuse_other_words(layer, "weight_zero_point")
            if layer.places["weight_packed"].dtype != "I32" or "weight_global_scale" in layer.places:
                raise not_read(self._name, f"in the format {self._said.get('format')!r}")
            return quantized_layers.packed
        if weight is None or weight.dtype != "I8":
            return None
        return quantized_layers.of_bitsandbytes if self._method == "bitsandbytes" else quantized_layers.whole

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
