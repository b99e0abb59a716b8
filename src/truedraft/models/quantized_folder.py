"""Hugging Face folders with quantised weights: the tensors of a layer, their readers, and the model."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import Mxfp4Config, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from truedraft.errors import ModelError, UnsupportedModelError, first_line
from truedraft.models import integer_codes, small_floats
from truedraft.models.gguf import without_weights
from truedraft.models.integer_codes import Layout
from truedraft.models.mapped import in_memory
from truedraft.models.quantized import StoredWeight

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
    *small_floats.STATES,
}
_FLOATS = {"F64", "F32", "F16", "BF16"}
_NUMBERS_OF = {"F8_E4M3", "F8_E5M2"}
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class _Place:
    file: Any
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The tensors of a layer by the last part of their names, as `integer_codes.Tensors`."""

    folder: str
    name: str
    places: Mapping[str, _Place]

    def __getitem__(self, end: str) -> Tensor:
        self.shape(end)
        tensor: Tensor = self.places[end].file.get_tensor(f"{self.name}.{end}" if self.name else end)
        return in_memory(tensor)

    def get(self, end: str) -> Tensor | None:
        return self[end] if end in self.places else None

    def shape(self, end: str) -> tuple[int, ...]:
        if end not in self.places:
            raise self.broken(f"lacks its {end}")
        return self.places[end].shape

    def broken(self, what: str) -> ModelError:
        return ModelError(f"layer {self.name!r} of {self.folder!r} {what}; fetch its files again, or mend config.json")

    def unread(self, what: str) -> UnsupportedModelError:
        return _not_read(self.folder, f"(layer {self.name!r}) with {what}")


class QuantizedFolder:
    """The tensors of a folder, layer by layer.

    Args:
        source: a folder, or a name on the hub.
        config: its configuration, quantised.

    Raises:
        UnsupportedModelError: its codes are of a kind that cannot be read.
        ModelError: tensors are missing, or do not fit each other.
    """

    def __init__(self, source: str, config: Any, name: str, revision: str | None) -> None:
        self._source, self._name, self._revision = source, name, revision
        said = config.quantization_config
        self._said: dict[str, Any] = said if isinstance(said, dict) else said.to_dict()
        self._method = method_of(config)
        self._layout, self._block = _layout_of(self._method or "", self._said, name), _block_of(self._said)
        self._plain: dict[str, _Layer] = {}
        self._numbers: dict[str, tuple[Callable[[_Layer], Tensor], _Layer]] = {}
        self._codes: dict[str, StoredWeight] = {}
        for layer in self._layers():
            self._add(layer)

    def _layers(self) -> Iterator[_Layer]:
        found: defaultdict[str, dict[str, _Place]] = defaultdict(dict)
        known = _OF_WEIGHTS | _OF_ACTIVATIONS
        files = weight_files(self._source, self._name, self._revision)
        if not files:
            raise ModelError(
                f"{self._name!r} has quantised weights, and no model.safetensors that holds them; fetch it again"
            )
        for file in files:
            try:
                opened = safe_open(file, framework="pt")
                for tensor in opened.keys():  # noqa: SIM118 - it is no dict
                    end = next((each for each in _ends_of(tensor) if each in known), tensor)
                    part = opened.get_slice(tensor)
                    layer = tensor[: -len(end)].removesuffix(".")
                    found[layer][end] = _Place(opened, part.get_dtype(), tuple(part.get_shape()))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot load the weights of {self._name!r}: {first_line(error)}") from error
        for name, places in found.items():
            yield _Layer(self._name, name, places)

    def _add(self, layer: _Layer) -> None:
        ends = set(layer.places)
        weight = layer.places.get("weight")
        reader = self._reader(layer)
        own = {"bias"} & ends
        if reader is not None:
            self._codes[f"{layer.name}.weight"] = _later(reader, layer, self._layout)
        elif any(state in ends for state in small_floats.STATES):
            self._numbers[f"{layer.name}.weight"] = (_whole(small_floats.four_bits), layer)
        elif weight is not None and weight.dtype in _NUMBERS_OF:
            layer.shape("weight_scale_inv" if "weight_scale_inv" in ends else "weight_scale")
            self._numbers[f"{layer.name}.weight"] = (_whole(partial(small_floats.fp8, block=self._block)), layer)
        else:
            if weight is not None and weight.dtype not in _FLOATS:
                raise layer.broken(f"has a weight of {weight.dtype}, and no scales that would make it numbers")
            own = ends - _OF_ACTIVATIONS
        for end in own:
            self._plain[f"{layer.name}.{end}" if layer.name else end] = layer

    def _reader(self, layer: _Layer) -> Callable[[_Layer, Layout], StoredWeight] | None:
        """The reader of a layer of integer codes; None for others."""
        weight = layer.places.get("weight")
        if "qweight" in layer.places:
            self._refuse_other_words(layer, "qweight", "qzeros")
            return integer_codes.awq if self._method == "awq" else integer_codes.gptq
        if "weight_packed" in layer.places:
            self._refuse_other_words(layer, "weight_zero_point")
            if layer.places["weight_packed"].dtype != "I32" or "weight_global_scale" in layer.places:
                raise _not_read(self._name, f"in the format {self._said.get('format')!r}")
            return integer_codes.packed
        if weight is None or weight.dtype != "I8":
            return None
        return integer_codes.of_bitsandbytes if self._method == "bitsandbytes" else integer_codes.whole

    def _refuse_other_words(self, layer: _Layer, *ends: str) -> None:
        for end in ends:
            if end in layer.places and layer.places[end].dtype != "I32":
                raise layer.unread(f"{end} of {layer.places[end].dtype} in place of I32")

    def by_codes(self, config: Any, dtype: torch.dtype) -> PreTrainedModel | None:
        """The model with `quantized` weights; None if its parameters have other names, or some are no codes.

        Args:
            config: without quantization.
            dtype: of unquantised weights and of intermediate values.
        """
        model = without_weights(config, dtype)
        self._drop_biases(model)
        self._refuse_turned(model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        known = {*self._codes, *self._plain}
        required = set(dict(model.named_parameters()))
        if self._numbers or not known <= set(parameters) or not required <= known:
            return None
        if not self._tied_alike(parameters):
            return None
        for name, stored in self._codes.items():
            weight = parameters[name]
            self._refuse_other_shape(name, weight, stored.shape)
            weight.quantized = stored
        for name in self._plain:
            self._fill(parameters[name], name)
        return model

    def _tied_alike(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Whether duplicates of tied weights, such as the embedding and the LM head, are equal."""
        first: dict[int, str] = {}
        for name in (*self._codes, *self._plain):
            other = first.setdefault(id(parameters[name]), name)
            if other != name and (
                not {name, other} <= set(self._plain) or not torch.equal(self._tensor(name), self._tensor(other))
            ):
                return False
        return True

    def _tensor(self, name: str) -> Tensor:
        layer = self._plain[name]
        return layer[name[len(layer.name) :].removeprefix(".")]

    def _fill(self, weight: nn.Parameter, name: str) -> None:
        tensor = self._tensor(name)
        self._refuse_other_shape(name, weight, tensor.shape)
        weight.data = tensor.to(weight.dtype)

    def _refuse_other_shape(self, name: str, weight: nn.Parameter, shape: Sequence[int]) -> None:
        if tuple(shape) != tuple(weight.shape):
            raise ModelError(
                f"{self._name!r} has {name!r} of the shape {list(shape)}, and its config.json asks for "
                f"{list(weight.shape)}; fetch its files again, or mend config.json"
            )

    def numbers(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All tensors dequantised, by the names of the unquantised model's folder."""
        made = {name: stored.read().dequantized().to(dtype) for name, stored in self._codes.items()}
        made |= {name: read(layer).to(dtype) for name, (read, layer) in self._numbers.items()}
        return made | {name: self._tensor(name) for name in self._plain}

    def _drop_biases(self, model: PreTrainedModel) -> None:
        """Drop biases of zeros that some tools write for layers without biases."""
        known = dict(model.named_parameters(remove_duplicate=False))
        for weight in self._codes:
            name = f"{weight.removesuffix('.weight')}.bias"
            if name in self._plain and weight in known and name not in known and not self._plain[name]["bias"].any():
                del self._plain[name]

    def _refuse_turned(self, model: PreTrainedModel) -> None:
        modules = dict(model.named_modules())
        if any(
            isinstance(modules.get(name.removesuffix(".weight")), Conv1D) for name in (*self._codes, *self._numbers)
        ):
            raise _not_read(self._name, "of layers that have their inputs first, as GPT-2's")


def _later(reader: Callable[[_Layer, Layout], StoredWeight], layer: _Layer, layout: Layout) -> StoredWeight:
    """A layer's weight, which is read for its shape, freed, and read again when its codes are needed."""
    read = _whole(lambda own: reader(own, layout))
    return replace(read(layer), rows=lambda index: read(layer).rows(index))


def _whole(read: Callable[[_Layer], Read]) -> Callable[[_Layer], Read]:
    """A reader with an error that names the layer if its tensors do not fit together."""

    def reading(layer: _Layer) -> Read:
        try:
            return read(layer)
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


def without_quantization(config: Any) -> Any:
    """The configuration of the unquantised model."""
    bare = copy.deepcopy(config)
    del bare.quantization_config
    return bare


def options_of(config: Any) -> dict[str, Any]:
    """Arguments for transformers if it reads the weights."""
    return {"quantization_config": Mxfp4Config(dequantize=True)} if method_of(config) == "mxfp4" else {}


def make_numbers(model: PreTrainedModel) -> None:
    """Dequantise the weights of a model that transformers read, to its dtype."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if type(weight.data) is not Tensor:
                numbers = weight.dequantize().to(model.dtype)
                setattr(module, name, nn.Parameter(numbers, requires_grad=False))
    model.config.__dict__.pop("quantization_config", None)


def _not_read(name: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name!r} has quantised weights {what}, which truedraft does not read; name the model that it was made from, "
        "in bfloat16 or float32, or one by GPTQ, AWQ or compressed-tensors in 4 or 8 bits"
    )


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
    """Refuse settings of compressed-tensors that change the meaning of the tensors."""
    for each in (said, *(said.get("config_groups") or {}).values()):
        if (written := each.get("format")) not in _PACKED:
            raise _not_read(name, f"in the format {written!r}")
    if (sparsity := (said.get("sparsity_config") or {}).get("format")) not in (None, "dense"):
        raise _not_read(name, f"with a sparsity_config of the format {sparsity!r}")
    if said.get("transform_config"):
        raise _not_read(name, f"with the transform_config {said['transform_config']!r}")
    for weights in groups:
        strategy, kind = weights.get("strategy"), weights.get("type", "int")
        if strategy not in (None, "tensor", "channel", "group", *(["block"] if kind == "float" else [])):
            raise _not_read(name, f"by the strategy {strategy!r} with codes of the type {kind!r}")


def _layout_of_words(method: str, said: Mapping[str, Any], name: str) -> Layout:
    bits, group = said.get("bits", said.get("w_bit", 4)), said.get("group_size", 128)
    formats = [str(said[place]).lower() for place in ("checkpoint_format", "format", "version") if said.get(place)]
    for written in formats:
        if written not in _FORMATS[method]:
            raise _not_read(name, f"in {method.upper()}'s format {written!r}")
    for word, only in (("is_marlin_format", False), ("zero_point", True), ("pack_dtype", "int32")):
        if said.get(word, only) != only:
            raise _not_read(name, f"with the {word} {said[word]!r}")
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


def _ends_of(tensor: str) -> Iterator[str]:
    """Possible last parts of a tensor's name, the longest first: of "a.b.c" all of it, then "b.c", then "c"."""
    parts = tensor.split(".")
    for first in range(len(parts)):
        yield ".".join(parts[first:])


def file_of(source: str, name: str, revision: str | None) -> str | None:
    """The path of a file of a folder or a hub name; None if there is none."""
    found: str | None = cached_file(
        source,
        name,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return found


def weight_files(source: str, name: str, revision: str | None) -> list[str]:
    """The safetensors files with a folder's weights; empty if it has others."""
    whole = file_of(source, "model.safetensors", revision)
    if whole is not None:
        return [whole]
    index = file_of(source, "model.safetensors.index.json", revision)
    if index is None:
        return []
    try:
        files, _ = get_checkpoint_shard_files(source, index, revision=revision)
        if Path(source).is_dir() and (lost := [each for each in files if not Path(each).is_file()]):
            raise ModelError(f"{name!r} lacks {Path(lost[0]).name}, a file of its weights; fetch it again")
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ModelError(f"cannot load the weights of {name!r}: {first_line(error)}") from error
    return list(files)
