"""A packed forward as one call of the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truedraft.cache import RequestCache
from truedraft.core.trees import TreeShape
from truedraft.errors import CacheError, ModelError
from truedraft.models.bodies import Body
from truedraft.models.fused import is_fusible, is_silu
from truedraft.models.native import structs
from truedraft.models.native.build import built
from truedraft.models.native.lm_head import NativeHeads, NativeLmHead
from truedraft.models.native.scratch import Scratch
from truedraft.models.native.weights import LANES, UNIT, interleaved, packed, padded_bias
from truedraft.models.packed_linear import release
from truedraft.models.patterns import AttentionPattern, Full
from truedraft.models.plan import ForwardPlan, SegmentPlan
from truedraft.models.ranking import Likeliest
from truedraft.models.rotary import RotaryTable
from truedraft.models.threads import forward_threads

_CPU = torch.device("cpu")
_MOST_HEAD = 256


class NativeBody(Body):
    """Runs a Llama-like decoder by decoder.c, from the loaded model's own weights, which are freed.

    Rows do not depend on each other, to the last bit, whatever their number, so nothing is padded.

    Args:
        model: a model that `fits`.
        patterns: of each attention call.
    """

    def __init__(self, model: PreTrainedModel, patterns: Sequence[AttentionPattern]) -> None:
        decoder: Any = model.model
        library = built(model.dtype).library
        assert library is not None
        self._forward = library.truedraft_forward
        self._forward.restype = ctypes.c_int
        self._dtype = model.dtype
        self._keep: list[Tensor] = []  # what the structures point to
        self._caches: WeakKeyDictionary[RequestCache, _Buffers] = WeakKeyDictionary()
        embedding = decoder.embed_tokens.weight.detach()
        self._rotary = RotaryTable(decoder.rotary_emb, embedding)
        self._patterns = tuple(dict.fromkeys(patterns))
        attention, mlp = decoder.layers[0].self_attn, decoder.layers[0].mlp
        self._head, self._width = attention.head_dim, embedding.shape[1]
        self._kv_heads = attention.k_proj.out_features // self._head
        heads = attention.q_proj.out_features // self._head
        self._calls = len(decoder.layers)
        wide = (self._width, (heads + 2 * self._kv_heads) * self._head, mlp.gate_proj.out_features)
        self._stride = -(-max(wide) // UNIT) * UNIT
        layers = [self._layer(layer, pattern) for layer, pattern in zip(decoder.layers, patterns, strict=True)]
        self._layers = (structs.Layer * len(layers))(*layers)
        head = model.get_output_embeddings()
        self._vocab = head.weight.shape[0]
        self._model = structs.Model(
            self._width, heads, self._kv_heads, self._head, mlp.gate_proj.out_features, len(layers), self._stride,
            len(embedding), self._held(embedding), self._held(decoder.norm.weight), decoder.norm.variance_epsilon,
            self._linear([head], free=head.weight is not decoder.embed_tokens.weight), self._layers,
        )  # fmt: skip
        self._scratch = Scratch(library, model.dtype, self._stride)
        self._lm_head = NativeLmHead(library, self._model, model.dtype, self._scratch)
        self.least_rows = 1
        self.own_threads = True
        self.fast_paths = ("native forward", "packed weights")

    def __del__(self) -> None:
        """The weights may go when no thread is late with a forward that is long over."""
        if hasattr(self, "_scratch"):
            self._scratch.settle()

    @staticmethod
    def fits(model: PreTrainedModel, patterns: Sequence[AttentionPattern]) -> bool:
        """Whether the model is of a family and of sizes that decoder.c is for, and the machine could compile it."""
        if model.device.type != "cpu" or not is_fusible(model, patterns):
            return False
        decoder: Any = model.model
        attention, mlp = decoder.layers[0].self_attn, decoder.layers[0].mlp
        sizes = (model.config.hidden_size, mlp.gate_proj.out_features, attention.head_dim // 2)
        fitting = all(size % LANES == 0 for size in sizes) and attention.head_dim <= _MOST_HEAD
        fitting = fitting and attention.head_dim % 2 == 0 and _is_uniform(model)
        silu = all(is_silu(layer.mlp.act_fn) for layer in decoder.layers)
        rotary = RotaryTable(decoder.rotary_emb, decoder.embed_tokens.weight).width == attention.head_dim
        return fitting and silu and rotary and built(model.dtype).library is not None

    def _layer(self, layer: Any, pattern: AttentionPattern) -> structs.Layer:
        attention, mlp = layer.self_attn, layer.mlp
        normed = hasattr(attention, "q_norm")
        return structs.Layer(
            self._held(layer.input_layernorm.weight),
            self._held(layer.post_attention_layernorm.weight),
            self._held(attention.q_norm.weight) if normed else None,
            self._held(attention.k_norm.weight) if normed else None,
            self._linear([attention.q_proj, attention.k_proj, attention.v_proj]),
            self._linear([attention.o_proj]),
            self._gate_up(mlp.gate_proj, mlp.up_proj),
            self._linear([mlp.down_proj]),
            layer.input_layernorm.variance_epsilon,
            layer.post_attention_layernorm.variance_epsilon,
            attention.q_norm.variance_epsilon if normed else 0.0,
            attention.scaling,
            self._patterns.index(pattern),
        )

    def _held(self, tensor: Tensor) -> int:
        """The address of a tensor that is kept alive."""
        self._keep.append(tensor.detach().contiguous())
        return self._keep[-1].data_ptr()

    def _linear(self, layers: Sequence[nn.Linear], *, free: bool = True) -> structs.Linear:
        """Layers of one input, one behind another."""
        weight = torch.cat([layer.weight for layer in layers]) if len(layers) > 1 else layers[0].weight
        return self._packed(weight.detach(), padded_bias(layers), layers if free else ())

    def _gate_up(self, gate: nn.Linear, up: nn.Linear) -> structs.Linear:
        bias = padded_bias([gate, up])
        if bias is not None:
            inner = gate.out_features
            turns = interleaved(bias[:inner, None], bias[inner : 2 * inner, None]).flatten()
            bias = torch.cat([turns, turns.new_zeros(-len(turns) % UNIT)])
        return self._packed(interleaved(gate.weight.detach(), up.weight.detach()), bias, (gate, up))

    def _packed(self, weight: Tensor, bias: Tensor | None, free: Sequence[nn.Linear]) -> structs.Linear:
        outputs, inputs = weight.shape
        cells = packed(weight)
        for layer in free:
            release(layer)
        return structs.Linear(self._held(cells), None if bias is None else self._held(bias), inputs, outputs, inputs)

    def run(self, plan: ForwardPlan) -> tuple[Tensor, Tensor]:
        """See `Body.run`."""
        tokens = plan.tokens
        if tokens.dtype is not torch.int64 or not tokens.is_contiguous():  # as a column of a table of tokens
            tokens = tokens.to(torch.int64).contiguous()
        total, wanted = tokens.shape[1], len(plan.rows)
        positions = plan.positions[0]
        self._rotary.reach(plan.furthest)
        first = self._first_visible(plan)
        trees = [_slots_of(part) for part in plan.segments]  # held, for `_own_slots` may forget them meanwhile
        segments = (structs.Segment * len(trees))(*map(self._segment, plan.segments, trees))
        keys = max(part.length + len(part.segment.shape) for part in plan.segments)
        threads = forward_threads()
        batch = structs.Batch(
            total, len(segments), wanted, tokens.data_ptr(), positions.data_ptr(), plan.rows.data_ptr(),
            self._rotary.table.data_ptr(), first.data_ptr(), segments,
        )  # fmt: skip
        logits = torch.empty(wanted, -(-self._vocab // UNIT) * UNIT, dtype=self._dtype, device=_CPU)
        hidden = torch.empty(wanted, self._width, dtype=self._dtype, device=_CPU)
        scratch = self._scratch.of(max(total, wanted), keys, threads)
        refused = self._forward(
            ctypes.byref(self._model), ctypes.byref(batch), ctypes.byref(scratch),
            ctypes.c_void_p(logits.data_ptr()), ctypes.c_void_p(hidden.data_ptr()), threads,
        )  # fmt: skip
        if refused:
            reasons = (
                f"a token id is outside 0 to {self._model.embedded - 1}; use ids of this model",
                f"a row that needs logits is outside 0 to {total - 1}; use rows of the new tokens",
            )
            raise ModelError(reasons[refused - 1])
        return logits[:, : self._vocab], hidden

    def unembed(self, vectors: Tensor) -> Tensor:
        """See `Body.unembed`."""
        return self._lm_head.logits(vectors)

    def likeliest(self, vectors: Tensor, count: int, vocab: int, factor: float) -> Likeliest:
        """See `Body.likeliest`."""
        return self._lm_head.likeliest(vectors, count, vocab, factor)

    def shared_heads(self, blocks: Sequence[Sequence[nn.Linear]]) -> NativeHeads | None:
        """See `Body.shared_heads`."""
        if blocks[0][0].in_features % LANES:
            return None
        return NativeHeads(self._lm_head, blocks, self._dtype)

    def _first_visible(self, plan: ForwardPlan) -> Tensor:
        """`[patterns, rows]`: the first position that each row may see."""
        if self._patterns == (Full(),):
            return torch.zeros_like(plan.positions)
        positions = plan.positions[0].tolist()
        first = [[pattern.first(position) for position in positions] for pattern in self._patterns]
        return torch.tensor(first, device=_CPU)

    def _segment(self, part: SegmentPlan, own: tuple[Tensor, Tensor] | None) -> structs.Segment:
        segment = part.segment
        buffers = self._buffers(segment.cache)
        return structs.Segment(
            part.start, part.count, part.length, segment.written, segment.cache.capacity,
            ctypes.addressof(buffers.keys), ctypes.addressof(buffers.values),
            None if own is None else own[0].data_ptr(), None if own is None else own[1].data_ptr(),
        )  # fmt: skip

    def _buffers(self, cache: RequestCache) -> _Buffers:
        """Addresses of a cache's buffers; they change only when it grows."""
        buffers = self._caches.get(cache)
        if buffers is None or buffers.capacity != cache.capacity:
            shape = (self._kv_heads, self._head, self._head)
            buffers = self._caches[cache] = _Buffers(cache, self._calls, shape, self._dtype)
        return buffers


class _Buffers:
    """Where the keys and values of one request lie, for every layer."""

    def __init__(self, cache: RequestCache, calls: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        keys, values = cache.buffers(calls, *shape, dtype)
        kv_heads, key_width, value_width = shape
        sizes = ((kv_heads, key_width, cache.capacity), (kv_heads, cache.capacity, value_width))
        there = {(tuple(k.shape), tuple(v.shape), k.dtype, v.dtype) for k, v in zip(keys, values, strict=True)}
        if len(keys) != calls or there != {(*sizes, dtype, dtype)}:
            raise CacheError("a cache of another model was given; make it by this model's new_cache")
        self.capacity = cache.capacity
        self.keys = (ctypes.c_void_p * calls)(*(each.data_ptr() for each in keys))
        self.values = (ctypes.c_void_p * calls)(*(each.data_ptr() for each in values))


def _is_uniform(model: PreTrainedModel) -> bool:
    """Whether all layers have the sizes of the first, and all weights the model's dtype, on the CPU.

    Models that were pruned or adapted may not; the addresses of decoder.c would then miss.
    """
    decoder: Any = model.model
    sizes = {tuple((name, each.shape) for name, each in layer.named_parameters()) for layer in decoder.layers}
    return len(sizes) == 1 and all(
        each.dtype is model.dtype and each.device.type == "cpu" for each in model.parameters()
    )


def _slots_of(part: SegmentPlan) -> tuple[Tensor, Tensor] | None:
    segment = part.segment
    return None if segment.shape.is_chain else _own_slots(segment.shape, segment.written)


@lru_cache(maxsize=4096)
def _own_slots(shape: TreeShape, written: int) -> tuple[Tensor, Tensor]:
    """The uncommitted slots that each new node sees: `[new + 1]` starts into a list of slots, both int32.

    Worked example: parents (-1, 0, 0, 2) with nothing written give the paths 0; 0, 1; 0, 2; 0, 2, 3, so starts
    0, 1, 3, 5, 8 into 0, 0, 1, 0, 2, 0, 2, 3.
    """
    paths = [shape.path(node) for node in range(written, len(shape))]
    starts = [0]
    for path in paths:
        starts.append(starts[-1] + len(path))
    slots = [node for path in paths for node in path]
    return torch.tensor(starts, dtype=torch.int32, device=_CPU), torch.tensor(slots, dtype=torch.int32, device=_CPU)
