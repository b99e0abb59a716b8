"""One model in several processes: each runs the same forward over its part of the weights and of the attention heads.

Rank 0 records its changes of caches, and sends them to the other processes with the next forward. So a cache has the
same tokens in all processes, and each process has the keys and values of its own heads.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.core.tree import TreeShape
from truedraft.errors import ModelError, UnsupportedModelError
from truedraft.models.attention import AttentionPattern, ForwardPlan
from truedraft.models.backends.base import Backend, BackendMaker
from truedraft.models.backends.stock import StockBackend
from truedraft.models.base import Segment
from truedraft.models.cache import CachePool, Entries, RequestCache
from truedraft.models.packed_linear import LEAST_ROWS, can_pack, multiplies_only_packed, pack_weights
from truedraft.models.probe import probe_patterns
from truedraft.models.ranks import RankLostError, Ranks, shard

_Note: TypeAlias = tuple[str, int, tuple[Any, ...]]
"""The name of an operation, the cache's number, and the arguments."""


class ParallelBackend(StockBackend):
    """Rank 0's part of a model; `ranks` repeat what it does. UnsupportedModelError for layers with states."""

    def __init__(self, model: PreTrainedModel, patterns: Sequence[AttentionPattern], ranks: Ranks) -> None:
        super().__init__(model, patterns)
        if self._carries:
            raise UnsupportedModelError(
                "its layers carry states, which processes cannot share; leave --tensor-parallel out"
            )
        self.input_names = frozenset()
        self.note = (
            f"runs in {ranks.count} processes by tensor parallelism; answers of seeds are those of this number of "
            "processes"
        )
        self._ranks = ranks
        self._notes: deque[_Note] = deque()

    @property
    def failure(self) -> str | None:  # type: ignore[override]
        return self._ranks.failure

    def new_pool(self, limit: int) -> CachePool:
        return _NotedPool(limit, self._notes)

    def run(self, plan: ForwardPlan, layers: Sequence[int]) -> tuple[Tensor, ...]:
        self._ranks.check()
        described = [_plain(part.segment) for part in plan.segments]
        with self._ranks.in_step():
            self._ranks.send((self._taken(), described))
            return super().run(plan, layers)

    def unembed(self, vectors: Tensor) -> Tensor:
        self._ranks.check()
        with self._ranks.in_step():
            self._ranks.send((self._taken(), vectors.cpu()))
            return super().unembed(vectors)

    def quantized(self, bits: int) -> StockBackend:
        raise UnsupportedModelError(
            "such weights are for the native forward, which runs in one process; leave --tensor-parallel out"
        )

    def _taken(self) -> list[_Note]:
        return [self._notes.popleft() for _ in range(len(self._notes))]


def parallel_backend(ranks: Ranks, place: torch.device, name: str, fast_paths: bool) -> BackendMaker:
    """Makes the backend of this process's part of a whole model on the device `place`, and joins the others."""

    def made(model: PreTrainedModel) -> StockBackend:
        patterns = probe_patterns(model)
        join = shard(model, name, ranks)
        model.to(place)
        packed = pack_weights(model) if fast_paths and can_pack(model.device, model.dtype) else 0
        join()
        backend = StockBackend(model, patterns) if ranks.rank else ParallelBackend(model, patterns, ranks)
        if packed and multiplies_only_packed(model):
            backend.least_rows = LEAST_ROWS
        backend.fast_paths = (f"tensor parallel over {ranks.count}", *(["packed weights"] if packed else []))
        ranks.join(place)
        return backend

    return made


@torch.inference_mode()
def follow(backend: Backend, ranks: Ranks, device: torch.device, limit: int) -> None:
    """Repeat the operations of rank 0 until a process ends; requests have up to `limit` tokens."""
    caches: dict[int, RequestCache] = {}
    copies: dict[int, Entries] = {}
    with contextlib.suppress(RankLostError):
        while True:
            notes, request = ranks.receive()
            for note in notes:
                _repeat(note, caches, copies, limit)
            if isinstance(request, Tensor):
                backend.unembed(request.to(device))
            else:
                backend.forward([_segment(each, caches, limit) for each in request], device)


def _repeat(note: _Note, caches: dict[int, RequestCache], copies: dict[int, Entries], limit: int) -> None:
    what, number, given = note
    if what == "forget":
        caches.pop(number, None)
        copies.pop(number, None)
        return
    cache = caches.setdefault(number, RequestCache(limit))
    if what == "part":
        copies[given[0]] = cache.part(*given[1:])
    elif what == "extend":
        cache.extend([(copies[copy], first, end) for copy, first, end in given[0]])
    else:
        getattr(cache, what)(*given)


def _plain(segment: Segment) -> tuple[Any, ...]:
    cache = segment.cache
    if not isinstance(cache, _NotedCache):
        raise ModelError("a model in several processes has caches of its own; take one with new_cache()")
    fields = segment.tokens.tolist(), segment.shape.parents, tuple(segment.rows), segment.written, segment.prompt
    return cache.number, *fields


def _segment(described: tuple[Any, ...], caches: dict[int, RequestCache], limit: int) -> Segment:
    number, tokens, parents, rows, written, prompt = described
    cache = caches.setdefault(number, RequestCache(limit))
    return Segment(cache, torch.tensor(tokens, dtype=torch.int64), TreeShape(parents), rows, written, prompt)


_numbers = itertools.count()


class _NotedCache(RequestCache):
    """A cache that records its operations between forwards in `notes`; `number` identifies it in all processes."""

    def __init__(self, limit: int, notes: deque[_Note]) -> None:
        super().__init__(limit)
        self.number = next(_numbers)
        self._notes = notes
        weakref.finalize(self, notes.append, ("forget", self.number, ()))

    def _note(self, what: str, *given: Any) -> None:
        self._notes.append((what, self.number, given))

    def limit_to(self, limit: int) -> None:
        self._note("limit_to", limit)
        super().limit_to(limit)

    def reserve(self, count: int, written: int = 0) -> None:
        super().reserve(count, written)
        self._note("reserve", count, written)

    def commit(self, path: Sequence[int]) -> None:
        super().commit(path)
        self._note("commit", tuple(path))

    def rollback(self, length: int) -> None:
        super().rollback(length)
        self._note("rollback", length)

    def part(self, first: int, end: int, lasting: bool) -> Entries:
        part = super().part(first, end, lasting)
        part.number = next(_numbers)
        self._note("part", part.number, first, end, lasting)
        weakref.finalize(part, self._notes.append, ("forget", part.number, ()))
        return part

    def extend(self, parts: Sequence[tuple[Entries, int, int]]) -> None:
        self._note("extend", [(part.number, first, end) for part, first, end in parts])
        notes, self._notes = self._notes, deque()  # its inner operations are not sent separately
        try:
            super().extend(parts)
        finally:
            self._notes = notes


class _NotedPool(CachePool):
    def __init__(self, limit: int, notes: deque[_Note]) -> None:
        super().__init__(limit, drops=False)
        self._notes = notes

    def _new(self) -> RequestCache:
        return _NotedCache(self._limit, self._notes)
