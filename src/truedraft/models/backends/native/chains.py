"""Chains of a draft on the native forward: the forwards and draws of a whole chain are one call of its library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from truedraft.core.budget import LEAST_KNOWN, Budget
from truedraft.models.attention import AttentionPattern, Full
from truedraft.models.backends.native.memory import Addresses, CBatch, CChain, CModel, CScratch, CSegment
from truedraft.models.base import DrawnChain, Segment
from truedraft.models.cache import FEW
from truedraft.models.cache.request import stored_place
from truedraft.models.llama import RotaryTable

_CPU = torch.device("cpu")
_LEVELS = 16


class NativeChains:
    """Draws chains of one model, for one request at a time, with structures that are made once.

    After a target's forward no near cache has the host's data, and each new object costs several times what it does
    otherwise. Only distributions are made anew. `logits` is memory for those of one row, padding included, of which
    `columns` are ids `[columns]`, int64 (None: their numbers). Distributions are over `vocab` ids, by `functions` of
    fused.c, as `fused.addresses` gives them.
    """

    def __init__(
        self,
        library: Any,
        model: CModel,
        rotaries: Sequence[RotaryTable],
        patterns: Sequence[AttentionPattern],
        logits: Tensor,
        ids: Tensor | None,
        functions: Sequence[int],
        columns: int,
        vocab: int,
    ) -> None:
        self._run = library.truedraft_chain
        self._run.restype = ctypes.c_int64
        self._model = model
        self._rotaries, self._patterns = rotaries, patterns
        self._logits, self._ids, self._vocab = logits, ids, vocab
        self._hidden = logits.new_empty(model.width)
        self._own = torch.empty(0 if ids is None else len(ids), dtype=torch.float32, device=_CPU)
        self._tables = (ctypes.c_void_p * len(rotaries))()
        self._last = ctypes.c_int64()
        self._segment, self._batch, self._chain = CSegment(), CBatch(), CChain()
        chain = self._chain
        chain.softmax, chain.draw, chain.largest, chain.token_probs = functions
        chain.vocab, chain.named, chain.patterns = columns, vocab, len(patterns)
        chain.names = None if ids is None else ids.data_ptr()
        chain.own, chain.least_known = self._own.data_ptr(), LEAST_KNOWN
        self._make_room(FEW, _LEVELS)

    def _make_room(self, fed: int, levels: int) -> None:
        rows = fed + levels
        self._fed, self._levels = fed, levels
        self._tokens, self._positions = (ctypes.c_int64 * rows)(), (ctypes.c_int64 * rows)()
        self._first = (ctypes.c_int64 * (rows * len(self._patterns)))()
        self._uniforms, self._drawn = (ctypes.c_double * levels)(), (ctypes.c_int64 * levels)()
        self._chances = (ctypes.c_float * levels)()
        chain, at = self._chain, ctypes.addressof
        chain.uniforms, chain.tokens, chain.chances = at(self._uniforms), at(self._drawn), at(self._chances)

    def draw(
        self,
        segment: Segment,
        buffers: Addresses,
        scratch: CScratch,
        threads: int,
        budget: Budget,
        numbers: Sequence[Sequence[float]],
    ) -> tuple[int, DrawnChain]:
        """See `Backend.draft_chain`; what the library returned comes first. The cache has room for all rows."""
        fed, levels = len(segment.tokens), min(budget.depth, budget.nodes)
        if fed > self._fed or levels > self._levels:
            self._make_room(max(fed, self._fed), max(2 * levels, self._levels))
        chain, probs = self._chain, None
        chain.levels, chain.looks, chain.probs = levels, budget.looks, None
        if numbers:
            (chain.temperature, *_), uniforms = numbers
            self._uniforms[:levels] = [*uniforms]
            # Torch's default dtype is another one while transformers loads a model.
            probs = torch.empty(levels, self._vocab, dtype=torch.float32, device=_CPU)
            chain.probs = probs.data_ptr()
        self._place(segment, buffers, fed + levels - 1)
        chain.least, chain.floor, (chain.odds, chain.odds_slope) = budget.min_probability, budget.floor, budget.odds
        count: int = self._run(
            ctypes.byref(self._model), ctypes.byref(self._batch), ctypes.byref(scratch),
            ctypes.c_void_p(self._logits.data_ptr()), ctypes.c_void_p(self._hidden.data_ptr()), threads,
            ctypes.byref(chain),
        )  # fmt: skip
        drawn = max(count, 0)
        confidence = self._chances[:drawn] if budget.looks else ()
        return count, (self._drawn[:drawn], None if probs is None else probs[:drawn], confidence)

    def _place(self, segment: Segment, buffers: Addresses, rows: int) -> None:
        """Describe the rows of the first forward, then those of the others, one each."""
        cache, fed = segment.cache, len(segment.tokens)
        before = cache.length + cache.family.shift
        self._tokens[:fed] = segment.tokens.tolist()
        self._positions[:rows] = [*range(before, before + rows)]
        for number, rotary in enumerate(self._rotaries):
            rotary.reach(before + rows - 1)
            self._tables[number] = rotary.table.data_ptr()
        if self._patterns != (Full(),):
            places = [(each, row) for each in self._patterns for row in range(fed)]
            places += [(each, row) for row in range(fed, rows) for each in self._patterns]
            self._first[: len(places)] = [
                max(0, stored_place(each.first(cache.length + row), cache.dropped)) for each, row in places
            ]
        of, batch, at = self._segment, self._batch, ctypes.addressof
        of.keys, of.values = at(buffers.keys), at(buffers.values)
        of.count, of.length, of.capacity, of.coded = fed, cache.stored, cache.capacity, buffers.coded
        batch.total, batch.segments, batch.wanted, self._last.value = fed, 1, 1, fed - 1
        batch.tokens, batch.positions, batch.rows = at(self._tokens), at(self._positions), at(self._last)
        batch.rotary, batch.first, batch.segment = at(self._tables), at(self._first), ctypes.pointer(of)
        self._chain.later = at(self._first) + fed * len(self._patterns) * ctypes.sizeof(ctypes.c_int64)
