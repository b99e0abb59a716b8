"""Linear layers by the native products: an LM head, with or without residual heads, and those of other forwards."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from truedraft.core.top_k import TopK
from truedraft.errors import UnsupportedModelError
from truedraft.machine import has_bfloat16
from truedraft.models.backends.native.build import built
from truedraft.models.backends.native.memory import (
    LANES,
    UNIT,
    CAsked,
    CHeads,
    CLinear,
    CModel,
    Scratch,
    Weights,
    padded_bias,
    quantized_bytes,
)
from truedraft.models.packed_linear import PackedExperts, PackedLinear, is_plain
from truedraft.models.threads import forward_threads

_CPU = torch.device("cpu")
_NO_BLOCKS = (CLinear * 0)()
Source: TypeAlias = PackedLinear | nn.Linear | Conv1D


class NativeLmHead:
    """The packed LM head of a model as a function. One call runs at a time; `scratch` is shared with forwards."""

    def __init__(self, library: Any, model: CModel, dtype: torch.dtype, scratch: Scratch) -> None:
        self.library = library
        self._run = library.truedraft_heads
        self._run.restype = None
        self._model = model
        self.dtype = dtype
        self._scratch = scratch
        self._headless: dict[int, CHeads] = {}  # the LM head by itself, by number of inputs

    def logits(self, vectors: Tensor) -> Tensor:
        """Logits `[rows, ids]` for vectors `[rows, up to width]`; missing entries are zeros."""
        return self.run(self._without_heads(vectors.shape[1]), vectors, 0, 0, 1.0)[0]

    def likeliest(self, vectors: Tensor, count: int, vocab: int, factor: float) -> TopK:
        """The likeliest `[rows, count]` of the first `vocab` ids, where the model multiplies its logits by `factor`."""
        return self.run(self._without_heads(vectors.shape[1]), vectors, count, vocab, factor)[1]

    def _without_heads(self, width: int) -> CHeads:
        if width not in self._headless:
            self._headless[width] = self.heads(width, _NO_BLOCKS, 0, 1)
        return self._headless[width]

    def heads(self, width: int, blocks: ctypes.Array[CLinear], layers: int, heads: int) -> CHeads:
        """The structure of heads with `width` inputs before the LM head; it keeps its pointers' targets alive."""
        head = self._model.lm_head
        read = CLinear.from_buffer_copy(head)
        read.read = -(-width // 2) * 2  # two inputs of bfloat16 make a cell
        return CHeads(ctypes.pointer(read), blocks, layers, heads, heads, -(-width // UNIT) * UNIT)

    def run(self, heads: CHeads, hidden: Tensor, count: int, vocab: int, factor: float) -> tuple[Tensor, TopK]:
        """Logits `[heads * rows, ids]` of vectors `[rows, width]`, and the likeliest ids `[heads * rows, count]`."""
        rows, outputs = len(hidden), self._model.lm_head.outputs
        hidden = hidden.to(self.dtype)
        hidden = (
            pad(hidden, (0, heads.wide - hidden.shape[1])) if heads.wide != hidden.shape[1] else hidden.contiguous()
        )
        total, threads = heads.used * rows, forward_threads()
        logits = torch.empty(total, -(-outputs // UNIT) * UNIT, dtype=self.dtype, device=_CPU)
        values = torch.empty(total, count, dtype=torch.float32, device=_CPU)
        ids = torch.empty(total, count, dtype=torch.int64, device=_CPU)
        memory = (each.data_ptr() for each in (hidden, logits, values, ids))
        request = CAsked(rows, vocab, count, factor, *memory)
        scratch, stride = self._scratch.of(total, 1, threads), ctypes.c_int64(self._model.stride)
        self._run(ctypes.byref(heads), ctypes.byref(request), ctypes.byref(scratch), stride, threads)
        return logits[:, :outputs], TopK(ids, values)

    def forget(self) -> None:
        self._headless.clear()

    def settle(self) -> None:
        self._scratch.settle()


class NativeHeads:
    """Residual heads with packed weights of equal sizes, before a model's LM head; `factor` multiplies logits."""

    def __init__(self, lm_head: NativeLmHead, blocks: Sequence[Sequence[nn.Linear]], vocab: int, factor: float) -> None:
        self._lm_head = lm_head
        self._vocab, self._factor = vocab, factor
        self._weights = weights = Weights(lm_head.library)
        width, layers, heads = blocks[0][0].in_features, len(blocks[0]), len(blocks)
        in_order = [head[layer] for layer in range(layers) for head in blocks]
        made = [
            weights.linear([each.weight.to(_CPU, lm_head.dtype)], padded_bias([each.bias], [each.out_features]))
            for each in in_order
        ]
        self._heads = lm_head.heads(width, (CLinear * len(made))(*made), layers, heads)

    def __del__(self) -> None:
        if hasattr(self, "_heads"):
            self._lm_head.settle()

    def likeliest(self, hidden: Tensor, depth: int, ranks: int) -> TopK:
        """The likeliest ids `[depth, rows, ranks]` of the first `depth` heads for vectors `[rows, width]`."""
        self._heads.used = depth
        return self._lm_head.run(self._heads, hidden, ranks, self._vocab, self._factor)[1].view(depth, len(hidden))


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


def likeliest_of(logits: Tensor, count: int) -> TopK:
    """The likeliest of distributions given by logits `[rows, vocab]`, natively if that is possible."""
    library = built(logits.dtype).library if logits.device.type == "cpu" else None
    if library is None:
        return TopK.of(logits, count)
    rows, vocab = logits.shape
    # Whole vectors are read, also of the last row.
    logits = pad(logits, (0, -vocab % LANES)) if vocab % LANES else logits
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    values = torch.empty(rows, count, dtype=torch.float32, device=_CPU)
    ids = torch.empty(rows, count, dtype=torch.int64, device=_CPU)
    numbers = map(ctypes.c_int64, (rows, logits.stride(0), vocab, count))
    read, *written = (ctypes.c_void_p(each.data_ptr()) for each in (logits, values, ids))
    library.truedraft_likeliest(read, *numbers, *written)
    return TopK(ids, values)


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
