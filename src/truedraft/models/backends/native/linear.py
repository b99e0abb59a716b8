"""Linear layers by the native products, for other forwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TypeAlias, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from truedraft.errors import UnsupportedModelError
from truedraft.machine import has_bfloat16
from truedraft.models.backends.native.backend import NativeLmHead
from truedraft.models.backends.native.build import built
from truedraft.models.backends.native.memory import (
    LANES,
    UNIT,
    CLinear,
    CModel,
    Scratch,
    Weights,
    padded_bias,
    quantized_bytes,
)
from truedraft.models.packed_linear import PackedExperts, PackedLinear, is_plain

Source: TypeAlias = PackedLinear | nn.Linear | Conv1D


class NativeLinear(nn.Module):
    """`x W^T + b` with weights that are packed, or quantised to 8 or 4 bits (0: packed), at its first run.

    `source` is the layer to replace, with `in_features` a multiple of `LANES`; `scratch`, with rows of `stride`
    elements, is shared by all such layers of a model, of which one runs at a time.
    """

    def __init__(self, source: Source, bits: int, scratch: Scratch, stride: int) -> None:
        super().__init__()
        self._source: list[Source] = [source]  # in a list, so that it is not registered as a submodule
        self._bits = bits
        self._scratch = scratch
        self._stride = stride
        self.out_features, self.in_features = _shape(source)
        shape = CLinear(None, None, self.in_features, self.out_features, self.in_features, 0)
        self.weight_bytes = (
            quantized_bytes(shape, bits) if bits else self.out_features * self.in_features * _dtype(source).itemsize
        )

    @cached_property
    def _product(self) -> NativeLmHead:
        (source,) = self._source
        whole = _weight(source)
        library = built(whole.dtype).library
        assert library is not None
        self._weights = weights = Weights(library)
        bias = padded_bias([source.bias], [self.out_features])
        if bias is not None:
            weights.keep(bias)
        model = CModel()
        if self._bits:
            packed = Weights(library)  # of the source's dtype, freed on return
            model.lm_head = weights.quantized(packed.linear([whole], bias), self._bits)
        else:
            model.lm_head = weights.linear([whole], bias)
        model.stride = self._stride
        self._source.clear()
        return NativeLmHead(library, model, whole.dtype, self._scratch)

    def forward(self, x: Tensor) -> Tensor:
        return self._product.logits(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + x W^T + b`; `residual` is `[..., out]`."""
        return residual + self(x)


def quantized_linears(model: PreTrainedModel, bits: int) -> Mapping[object, NativeLinear]:
    """Replacements for linear layers, LM head included; UnsupportedModelError if there are none for most weights."""
    reason = "it is not on the CPU" if model.device.type != "cpu" else built(model.dtype).reason
    if reason:
        raise UnsupportedModelError(reason)
    head = model.get_output_embeddings()
    plain = [each for each in model.modules() if each is head or any(is_plain(each, kind) for kind in get_args(Source))]
    linears = native_linears(plain, bits, model.dtype)
    others = [each for each in model.modules() if each not in linears and not isinstance(each, nn.Embedding)]
    left = sum(weight.numel() for each in others for weight in each.parameters(recurse=False))
    taken = sum(linear.in_features * linear.out_features for linear in linears.values())
    if left > taken or any(isinstance(each, PackedExperts) for each in others):
        raise UnsupportedModelError("most of its weights are in no linear layers, as those of experts")
    return linears


def is_fastest(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether nothing else multiplies weights of a dtype as fast: bfloat16 without instructions for it."""
    emulated = device.type == "cpu" and dtype is torch.bfloat16 and not has_bfloat16(device)
    return emulated and built(dtype).library is not None


def native_linears(found: Iterable[object], bits: int, dtype: torch.dtype) -> Mapping[object, NativeLinear]:
    """Replacements for linear layers among `found` with inputs divisible by `LANES`; 0 `bits` keep the dtype."""
    sources = [each for each in found if isinstance(each, Source) and _shape(each)[1] % LANES == 0]
    stride = max((-(-max(_shape(source)) // UNIT) * UNIT for source in sources), default=UNIT)
    scratch = Scratch(built(dtype).library, dtype, stride)
    return {each: NativeLinear(each, bits, scratch, stride) for each in sources}


def _shape(source: Source) -> tuple[int, int]:
    if isinstance(source, Conv1D):
        inputs, outputs = source.weight.shape
        return outputs, inputs
    return source.out_features, source.in_features


def _dtype(source: Source) -> torch.dtype:
    return source.dtype if isinstance(source, PackedLinear) else source.weight.dtype


def _weight(source: Source) -> Tensor:
    if isinstance(source, PackedLinear):
        return source.unpacked()
    return source.weight.detach().T.contiguous() if isinstance(source, Conv1D) else source.weight.detach()
