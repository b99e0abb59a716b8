"""A packed forward as one call of the native library."""

from __future__ import annotations

import copy
import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from truedraft.core import fused
from truedraft.core.budget import Budget
from truedraft.core.top_k import TopK
from truedraft.core.tree import TreeShape
from truedraft.errors import CacheError, ModelError, UnsupportedModelError
from truedraft.models.attention import ForwardPlan, Full, SegmentPlan
from truedraft.models.backends.base import Backend
from truedraft.models.backends.native.build import built
from truedraft.models.backends.native.chains import NativeChains
from truedraft.models.backends.native.linear import NativeHeads, NativeLmHead
from truedraft.models.backends.native.memory import (
    CHUNK,
    LANES,
    UNIT,
    Addresses,
    CBatch,
    CLayer,
    CLinear,
    CModel,
    CNorms,
    CScratch,
    CSegment,
    Scratch,
    Weights,
    padded_bias,
    pieces,
    quantized_bytes,
)
from truedraft.models.base import DrawnChain, HeadRun, Segment
from truedraft.models.cache import Buffers, RequestCache
from truedraft.models.llama import Experts, Linears, Llama, LlamaLayer
from truedraft.models.mapped import return_freed_memory
from truedraft.models.packed_linear import release
from truedraft.models.quantized import Scheme, in_halves, quantized_of
from truedraft.models.threads import forward_threads

_CPU = torch.device("cpu")
_MOST_HEAD = 256
_GATES = {"silu": 2, "gelu": 3, "clipped": 4}  # kinds of decoder.c
_MOST_COPY_SHARE = 0.7  # most bytes of a copy with fewer bits, as a fraction of those of its weights
_NOTHING = torch.empty(0)
OwnSlots: TypeAlias = tuple[Tensor, Tensor]
"""`[rows + 1]` starts into a list of the uncommitted slots that each row of a segment sees, both int32."""


class NativeBackend(Backend):
    """Runs a Llama-like decoder by decoder.c, from the loaded model's own weights, which are freed.

    Rows do not depend on each other, to the last bit, for any number of rows, so nothing is padded. `widest` are the
    entries of the widest row outside the layers.
    """

    def __init__(self, llama: Llama, widest: int = 0) -> None:
        library = built(llama.dtype).library
        assert library is not None
        self._library: Any = library
        self._forward = library.truedraft_forward
        self._forward.restype = ctypes.c_int
        self._dtype = llama.dtype
        self._weights = Weights(library)
        self._table = llama.embedding if llama.tied else None
        self._rotaries = llama.rotaries
        self._patterns = llama.patterns
        self._caches: WeakKeyDictionary[Buffers, Addresses] = WeakKeyDictionary()
        self._zeros = torch.zeros(0, dtype=torch.int64, device=_CPU)
        self._model = model = _model(llama, self._weights, widest)
        self._width, self._vocab = model.width, model.lm_head.outputs
        self._found = model.heads * (model.head + 2)  # numbers that a row finds in a chunk
        self._cache_shape = (model.layers, model.kv_heads, model.head, model.head)
        self._scratch = Scratch(library, llama.dtype, model.stride, model.experts, model.chosen, model.spread)
        self._lm_head = NativeLmHead(library, model, llama.dtype, self._scratch)
        self._ids: Tensor | None = None  # of the logits' columns; None: all
        self._chains: NativeChains | None = None  # made when first needed
        self._make_model: Callable[[], CModel]
        self._whole: NativeBackend | None = None  # owner of the norms and the embedding of a quantised copy
        self.least_rows = 1
        self.own_threads = self.reads_codes = True
        self.shown_layers = model.layers
        bits = sorted({linear.bits for whole, _ in _linears(model) for linear in pieces(whole)})
        self.fast_paths = ("native forward", "packed weights")
        if any(bits):
            self.bits = min(filter(None, bits))
            self.fast_paths = ("native forward", _weights_of(library, bits))
            self.weight_bytes = sum(
                self._weights.bytes_of(linear) * count for whole, count in _linears(model) for linear in pieces(whole)
            )

    @cached_property
    def _model(self) -> CModel:
        return self._make_model()

    def __del__(self) -> None:
        """Wait until no late thread of a finished forward reads the weights."""
        if hasattr(self, "_scratch"):
            self._scratch.settle()

    @staticmethod
    def fits(llama: Llama) -> bool:
        layer = llama.layers[0]
        turned = {table.width for table in llama.rotaries}
        sizes = (llama.embedding.shape[1], llama.inner, layer.head, min(turned) // 2)
        return (
            llama.device.type == "cpu"
            and llama.uniform  # the addresses of decoder.c would miss in other layers
            and all(size % LANES == 0 for size in sizes)
            and layer.head % 2 == 0
            and layer.head <= _MOST_HEAD
            and len(turned) == 1
            and len({_activation(layer) for layer in llama.layers}) == 1
            and _activation(layer) is not None
            and all(map(_fits_quantized, llama.layers))
            and built(llama.dtype).library is not None
        )

    @contextmanager
    def shallow(self, layers: int) -> Iterator[None]:
        all_of_them, self._model.layers = self._model.layers, layers
        try:
            yield
        finally:
            self._model.layers = all_of_them

    def quantize(self, bits: int) -> None:
        model, weights = self._model, self._weights
        if self.weight_bytes:
            raise UnsupportedModelError("its own are quantised already; leave --weights out")
        before = {whole.weights for whole, _ in _linears(model)}
        made = _quantized(model, weights, bits)
        self._scratch.settle()
        if self._table is not None:
            before.add(model.embedding)
            model.coded, model.embedding = made.lm_head, None
            self._table.data = self._table.new_zeros(()).expand(self._table.shape)
        model.layer, model.lm_head = made.layer, made.lm_head
        weights.free(before)
        self._lm_head.forget()
        self.weight_bytes = sum(quantized_bytes(linear, bits, count) for linear, count in _linears(model))
        self.bits, self.fast_paths = bits, ("native forward", _weights_of(self._library, [bits]))

    def quantized(self, bits: int) -> NativeBackend:
        fewer = sum(quantized_bytes(linear, bits, count) for linear, count in _linears(self._model))
        if self.weight_bytes and fewer > _MOST_COPY_SHARE * self.weight_bytes:
            raise UnsupportedModelError(
                f"its own are quantised, and such a copy has {fewer / self.weight_bytes:.0%} of their bytes"
            )
        twin = copy.copy(self)  # shares scratch memory, so that only one of the two may run at a time
        twin._whole, twin._chains = self, None
        twin._weights = Weights(self._library)
        del twin._model
        twin._make_model = partial(_quantized, self._model, twin._weights, bits)
        twin.weight_bytes = fewer
        twin.fast_paths = ("native forward", _weights_of(self._library, [bits]))
        return twin

    def narrowed(self, ids: Tensor) -> NativeBackend:
        head = self._model.lm_head
        if head.more or head.bias:
            raise UnsupportedModelError("its LM head has a bias, or is quantised in several ways")
        twin = copy.copy(self)  # shares scratch memory, as above
        twin._whole, twin._weights = self, Weights(self._library)
        twin._model = CModel.from_buffer_copy(self._model)
        twin._ids, twin._vocab, twin._chains = ids.to(_CPU, torch.int64).contiguous(), len(ids), None
        twin._model.lm_head = twin._weights.outputs(head, twin._ids)
        twin._lm_head = NativeLmHead(self._library, twin._model, self._dtype, self._scratch)
        return twin

    def run(self, plan: ForwardPlan, layers: Sequence[int]) -> tuple[Tensor, ...]:
        return self._run(plan, layers)

    def _run(
        self, plan: ForwardPlan, layers: Sequence[int], inputs: Sequence[int | None] = (), own: OwnSlots | None = None
    ) -> tuple[Tensor, ...]:
        """`run`, of what is read instead of tokens, the last fields of `CBatch`, with what rows see of their segment.

        By default, they see their path.
        """
        requested, shown = len(plan.rows), sorted(set(layers))
        vectors = torch.empty(len(shown), requested, self._width, dtype=self._dtype, device=_CPU) if shown else _NOTHING
        with self._batch(plan, shown, vectors, inputs, own) as (batch, scratch, threads):
            logits = torch.empty(requested, -(-self._vocab // UNIT) * UNIT, dtype=self._dtype, device=_CPU)
            hidden = torch.empty(requested, self._width, dtype=self._dtype, device=_CPU)
            refused = self._forward(
                ctypes.byref(self._model), ctypes.byref(batch), ctypes.byref(scratch),
                ctypes.c_void_p(logits.data_ptr()), ctypes.c_void_p(hidden.data_ptr()), threads,
            )  # fmt: skip
        self._refuse(refused, batch.total)
        seen = dict(zip(shown, vectors, strict=True))
        logits = logits if logits.shape[1] == self._vocab else logits[:, : self._vocab]
        return logits, hidden, *(seen[layer] for layer in layers)

    @contextmanager
    def _batch(
        self,
        plan: ForwardPlan,
        shown: Sequence[int],
        vectors: Tensor,
        inputs: Sequence[int | None],
        own: OwnSlots | None = None,
    ) -> Iterator[tuple[CBatch, CScratch, int]]:
        """A plan's structure, valid inside, with scratch memory and the number of threads that it has room for."""
        tokens = plan.tokens
        if tokens.dtype is not torch.int64 or not tokens.is_contiguous():  # such as a column of a matrix
            tokens = tokens.to(torch.int64).contiguous()
        total, requested = tokens.shape[1], plan.rows.shape[0]
        for table in self._rotaries:
            table.reach(plan.furthest)
        tables = (ctypes.c_void_p * len(self._rotaries))(*(each.table.data_ptr() for each in self._rotaries))
        first = self._first_visible(plan)
        shapes = ((part.segment.shape, part.segment.written) for part in plan.segments)
        # Kept alive: `_own_slots` may evict them.
        trees = [own or (None if shape.is_chain else _own_slots(shape, written)) for shape, written in shapes]
        segments = (CSegment * len(trees))(*map(self._segment, plan.segments, trees))
        keys = max(min(part.length, CHUNK) + len(part.segment.shape) for part in plan.segments)
        chunks = max((part.length + len(part.segment.shape)) // CHUNK + 1 for part in plan.segments)
        numbers = (ctypes.c_int64 * len(shown))(*shown)
        batch = CBatch(
            total, len(segments), requested, tokens.data_ptr(), plan.positions[0].data_ptr(), plan.rows.data_ptr(),
            ctypes.addressof(tables), first.data_ptr(), segments,
            len(shown), ctypes.addressof(numbers), vectors.data_ptr(), *inputs,
        )  # fmt: skip
        threads = forward_threads()  # once: torch's number may change in between
        yield batch, self._scratch_for(max(total, requested), keys, chunks, threads), threads

    @property
    def draws_chains(self) -> bool:  # type: ignore[override]
        return self._draws is not None

    @cached_property
    def _draws(self) -> Sequence[int] | None:
        return fused.addresses(self._dtype, "softmax", "draw", "largest", "token_probs")

    def draft_chain(
        self, segment: Segment, budget: Budget, numbers: Sequence[Sequence[float]], columns: int, vocab: int
    ) -> DrawnChain:
        if self._chains is None:
            assert self._draws is not None
            logits = torch.empty(-(-self._vocab // UNIT) * UNIT, dtype=self._dtype, device=_CPU)
            self._chains = NativeChains(
                self._library, self._model, self._rotaries, self._patterns, logits, self._ids, self._draws,
                columns, vocab,
            )  # fmt: skip
        cache, fed = segment.cache, len(segment.tokens)
        rows = fed + min(budget.depth, budget.nodes) - 1
        cache.reserve(rows)
        buffers = self._addresses(cache)
        threads, keys = forward_threads(), min(cache.stored, CHUNK) + rows
        scratch = self._scratch_for(fed, keys, (cache.stored + rows) // CHUNK + 1, threads)
        count, drawn = self._chains.draw(segment, buffers, scratch, threads, budget, numbers)
        self._refuse(-count, fed)
        cache.commit(range(fed))
        cache.reserve(max(count - 1, 0))  # written after it
        return drawn

    def _scratch_for(self, rows: int, keys: int, chunks: int, threads: int) -> CScratch:
        """Memory for rows, keys of one chunk and what queries find in chunks."""
        found = rows * chunks * self._found if threads > 1 and chunks > 1 else 0
        return self._scratch.of(rows, keys, threads, found)

    def _refuse(self, code: int, total: int) -> None:
        """Raise ModelError for what a forward of `total` tokens returned if that is 1 or more."""
        if code > 0:
            reasons = (
                f"a token id is outside 0 to {self._model.embedded - 1}; use ids of this model",
                f"a row that needs logits is outside 0 to {total - 1}; use rows of the new tokens",
            )
            raise ModelError(reasons[code - 1])

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        if not self._model.coded.bits:
            return super().embed(tokens, table)
        ids = tokens.to(_CPU, torch.int64).contiguous()
        found = torch.empty(len(ids), self._width, dtype=self._dtype, device=_CPU)
        self._library.truedraft_look_up(
            ctypes.byref(self._model.coded), ctypes.c_void_p(ids.data_ptr()), ctypes.c_int64(len(ids)),
            ctypes.c_void_p(found.data_ptr()),
        )  # fmt: skip
        return found

    def unembed(self, vectors: Tensor) -> Tensor:
        return self._lm_head.logits(vectors)

    def likeliest(self, vectors: Tensor, count: int, vocab: int, factor: float) -> TopK:
        return self._lm_head.likeliest(vectors, count, vocab, factor)

    def shared_heads(self, blocks: Sequence[Sequence[nn.Linear]], vocab: int, factor: float) -> HeadRun | None:
        if blocks[0][0].in_features % LANES:
            return None
        return NativeHeads(self._lm_head, blocks, vocab, factor).likeliest

    def _first_visible(self, plan: ForwardPlan) -> Tensor:
        """`[patterns, rows]`: each row's first visible position; as many zeros or more if all are visible."""
        if self._patterns == (Full(),):
            if len(self._zeros) < plan.positions.shape[1]:
                self._zeros = torch.zeros(2 * plan.positions.shape[1], dtype=torch.int64, device=_CPU)
            return self._zeros
        first = [[max(0, first) for part in plan.segments for first in part.first(each)] for each in self._patterns]
        return pad(torch.tensor(first, device=_CPU), (0, plan.positions.shape[1] - len(first[0])))

    def _segment(self, part: SegmentPlan, own: OwnSlots | None) -> CSegment:
        segment = part.segment
        buffers = self._addresses(segment.cache)
        return CSegment(
            part.start, part.count, part.length, segment.written, segment.cache.capacity, buffers.coded,
            ctypes.addressof(buffers.keys), ctypes.addressof(buffers.values),
            None if own is None else own[0].data_ptr(), None if own is None else own[1].data_ptr(),
        )  # fmt: skip

    def _addresses(self, cache: RequestCache) -> Addresses:
        buffers = cache.storage
        if not isinstance(buffers, Buffers):
            raise CacheError("a cache of another model was given; make it by this model's new_cache")
        known = self._caches.get(buffers)
        if known is None or known.generation != buffers.generation:
            if known is not None:
                return_freed_memory()  # of the buffers before they grew
            known = self._caches[buffers] = Addresses(buffers, *self._cache_shape, self._dtype)
        return known


def _weights_of(library: Any, bits: Sequence[int]) -> str:
    """A description of the weights' bits (ascending; 0 is the dtype's) and of the instructions that multiply them."""
    named = (
        f"weights of {bits[0] or 'all'} bits" if len(bits) == 1 else f"weights of {bits[0] or 'all'} to {bits[-1]} bits"
    )
    slower = ("one by one, for want of AVX2", "in pairs, for want of VNNI", "")[library.truedraft_dot()]
    return f"{named}, multiplied {slower}" if slower else named


def _fits_quantized(layer: LlamaLayer[Linears]) -> bool:
    """Whether parts of other quantisation begin units, both MLP factors have one, and each input has one order."""

    def forms(linears: Linears) -> list[tuple[int, Scheme] | None]:
        stored = [quantized_of(linear.weight) for linear in linears]
        return [None if each is None else each.form for each in stored]

    at = 0
    for (before, after), linear in zip(itertools.pairwise(forms(layer.qkv)), layer.qkv, strict=False):
        at += linear.out_features
        if before != after and None not in (before, after) and at % UNIT:
            return False
    return len(set(forms(layer.gate_up))) < 2 and _of_one_order(layer.qkv) and _of_one_order(layer.gate_up)


def _of_one_order(linears: Linears) -> bool:
    orders = [stored.order for linear in linears if (stored := quantized_of(linear.weight)) is not None]
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in itertools.pairwise(orders)
    )


def _model(llama: Llama, weights: Weights, widest: int) -> CModel:
    """The structure of a decoder; frees its linear weights, and `weights` owns the copies."""
    first, width = llama.layers[0], llama.embedding.shape[1]
    inner, (table, *_), experts = llama.inner, llama.rotaries, first.experts
    several = 0 if experts is None else len(experts.router)
    widest = max(widest, width, (first.heads + 2 * first.kv_heads) * first.head, inner, several)
    patterns = llama.patterns
    layers = [_layer(layer, patterns.index(layer.pattern), weights) for layer in llama.layers]
    lm_head = weights.linear([llama.lm_head.weight], _bias([llama.lm_head]))
    coded = CLinear()
    if quantized_of(llama.embedding) is not None:
        coded = lm_head if llama.tied else weights.linear([llama.embedding], None)
    if not llama.tied:
        release(llama.lm_head)
    return CModel(
        width, first.heads, first.kv_heads, first.head, inner, len(layers), _units(widest),
        len(llama.embedding), table.width, table.interleaved, _GATES[_activation(first) or ""],
        several, 0 if experts is None else experts.chosen, experts is not None and experts.normed,
        0 if experts is None else _units(max(width, inner)),
        None if coded.bits else weights.keep(llama.embedding),
        weights.keep(llama.norm.weight), llama.norm.eps, llama.scale,
        CNorms(llama.norm.offset, llama.norm.rounds_once),
        lm_head, coded, (CLayer * len(layers))(*layers),
    )  # fmt: skip


def _quantized(model: CModel, weights: Weights, bits: int) -> CModel:
    """A decoder with linears of 8 or 4 bits, owned by `weights`; the rest is the given one's, routers included."""
    experts = max(model.experts, 1)
    layers = (CLayer * model.layers)()
    for number, layer in enumerate(layers):
        ctypes.pointer(layer)[0] = model.layer[number]
        layer.qkv, layer.out = weights.quantized(layer.qkv, bits), weights.quantized(layer.out, bits)
        layer.gate_up = weights.quantized(layer.gate_up, bits, experts)
        layer.down = weights.quantized(layer.down, bits, experts)
    twin = CModel.from_buffer_copy(model)
    twin.layer, twin.lm_head = layers, weights.quantized(model.lm_head, bits)
    return twin


def _linears(model: CModel) -> Iterator[tuple[CLinear, int]]:
    """The layers that `_quantized` quantises, and how many equally sized ones begin at each."""
    experts = max(model.experts, 1)
    for number in range(model.layers):
        layer = model.layer[number]
        yield from ((layer.qkv, 1), (layer.out, 1), (layer.gate_up, experts), (layer.down, experts))
    yield model.lm_head, 1


def _units(outputs: int) -> int:
    return -(-outputs // UNIT) * UNIT


def _layer(layer: LlamaLayer[Linears], pattern: int, weights: Weights) -> CLayer:
    norms = (
        layer.before_attention, layer.before_mlp, layer.query_norm, layer.key_norm, layer.after_attention,
        layer.after_mlp,
    )  # fmt: skip
    kept = [None if each is None else weights.keep(each.weight) for each in norms]
    before_attention, before_mlp, of_query, _, *after = (0.0 if each is None else each.eps for each in norms)
    qkv, out = _linear(layer.qkv, weights), _linear(layer.out, weights)
    if layer.experts is None:
        gate_up, down, router = _gate_up(layer.gate_up, weights), _linear(layer.down, weights), CLinear()
    else:
        gate_up, down, router = _experts(layer.experts, weights)
    return CLayer(
        *kept, None if layer.sinks is None else weights.keep(layer.sinks.float()), qkv, out, gate_up, down, router,
        before_attention, before_mlp, of_query, *after, layer.scaling, pattern, layer.rotary,
    )  # fmt: skip


def _activation(layer: LlamaLayer[Linears]) -> str | None:
    if layer.experts is not None and layer.experts.clipped:
        return "clipped"
    if layer.activation is silu:
        return "silu"
    tanh = type(layer.activation).__name__ in ("GELUTanh", "PytorchGELUTanh")
    return "gelu" if tanh else None


def _bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    return padded_bias([layer.bias for layer in layers], [layer.out_features for layer in layers])


def _linear(layers: Linears, weights: Weights) -> CLinear:
    made = weights.linear([layer.weight for layer in layers], _bias(layers))
    for layer in layers:
        release(layer)
    return made


def _gate_up(layers: Linears, weights: Weights) -> CLinear:
    gate, up = [layer.weight for layer in layers] if len(layers) > 1 else in_halves(layers[0].weight)
    bias = _bias(layers)
    made = weights.linear([gate, up], None if bias is None else _alternating(bias, len(gate)), alternate=True)
    for layer in layers:
        release(layer)
    return made


def _alternating(bias: Tensor, inner: int) -> Tensor:
    blocks = torch.stack([bias[:inner].view(-1, LANES), bias[inner : 2 * inner].view(-1, LANES)], dim=1)
    return pad(blocks.flatten(), (0, -2 * inner % UNIT))


def _experts(experts: Experts, weights: Weights) -> tuple[CLinear, CLinear, CLinear]:
    each = range(len(experts.router))
    inner, width = experts.down.shape[2], experts.down.shape[1]
    gates = down_bias = router_bias = None
    if experts.gate_bias is not None and experts.up_bias is not None and experts.down_bias is not None:
        of_each = [padded_bias([experts.gate_bias[e], experts.up_bias[e]], [inner, inner]) for e in each]
        gates = torch.cat([_alternating(bias, inner) for bias in of_each if bias is not None])
        of_downs = [padded_bias([bias], [width]) for bias in experts.down_bias]
        down_bias = torch.cat([bias for bias in of_downs if bias is not None])
    if experts.router_bias is not None:
        router_bias = padded_bias([experts.router_bias], [len(each)])
    made = (
        weights.linears([(experts.gate[e], experts.up[e]) for e in each], gates, alternate=True),
        weights.linears([(experts.down[e],) for e in each], down_bias),
        weights.linear([experts.router], router_bias),
    )
    experts.release()
    return made


@lru_cache(maxsize=1024)
def _own_slots(shape: TreeShape, written: int) -> OwnSlots:
    """The uncommitted slots that each new node sees.

    Worked example: parents (-1, 0, 0, 2) with nothing written give starts 0, 1, 3, 5, 8 into 0, 0, 1, 0, 2, 0, 2, 3.
    """
    paths = [shape.path(node) for node in range(written, len(shape))]
    starts = [0]
    for path in paths:
        starts.append(starts[-1] + len(path))
    slots = [node for path in paths for node in path]
    return torch.tensor(starts, dtype=torch.int32, device=_CPU), torch.tensor(slots, dtype=torch.int32, device=_CPU)
