"""Memory of requests: key/value caches of the target and the drafters, and free buffers. A request is granted room for
its prompt and the next 256 tokens. When memory is short, drafters release theirs, then the latest request is preempted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from truedraft.core.tree import chain_shape
from truedraft.drafters.base import Drafter
from truedraft.drafters.held import HeadCaches, ModelCaches
from truedraft.engine.policy.measuring import most_held
from truedraft.engine.request import Request
from truedraft.errors import OptionError, PromptError
from truedraft.machine import free_memory, gpu_memory, in_bytes
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.cache import CachePool, PrefixCache, RequestCache
from truedraft.models.mapped import return_freed_memory
from truedraft.options import check_whole

RESUMES_AT = 0.9
"""Share of the memory within which a drafter must fit to be resumed, so that it is not released and resumed in turn."""


_AHEAD = 256
"""Tokens that a request is granted beyond its current length."""
_NEAR = 64
"""Number of tokens before the end of a grant at which it is extended, so that drafts are not cut short."""


GPU_MEMORY_UTILIZATION = 0.9
"""Default share of a GPU's memory that may be in use."""
_WORKSPACE = 3 << 29
"""Bytes of a GPU for activations and for recorded forwards."""


def gpu_cache_bytes(device: torch.device, utilization: float, reserved: int = 0) -> int | None:
    """Bytes available for keys and values on a GPU; None on a CPU. A share `utilization` of the total memory, less what
    weights and other processes use now, and less 1.5 GiB for activations; `reserved` bytes of what is in use now are
    for keys and values of these models.
    """
    if isinstance(utilization, bool) or not isinstance(utilization, int | float) or not 0.0 < utilization <= 1.0:
        raise OptionError(f"must be above 0 and at most 1, got {utilization!r}", field="gpu_memory_utilization")
    memory = gpu_memory(device)
    if memory is None:
        return None
    used, total = memory
    left = int(utilization * total) - (used - reserved) - _WORKSPACE
    if left <= 0:
        raise OptionError(
            f"{utilization:g} of the GPU's {in_bytes(total)} leaves nothing for keys and values: {in_bytes(used)} are "
            f"in use, and {in_bytes(_WORKSPACE)} are for what forwards compute; free some, or set max_cache_bytes",
            field="gpu_memory_utilization",
        )
    return left


@dataclass(frozen=True, slots=True)
class Holding:
    """A drafter's caches and state for one request, present or possible."""

    request: Request
    drafter: str

    @property
    def is_held(self) -> bool:
        return self.drafter not in self.request.drafting.no_room


class CacheMemory:
    """Distributes memory among the requests of one engine.

    Args:
        limit: bytes; None is no limit, on a GPU what `utilization` leaves.
        utilization: see `gpu_cache_bytes`; the caches for measuring costs are taken from it.
    """

    _holding: Sequence[CachePool] = ()  # pools with reserved memory
    _limited_by = "max_cache_bytes"

    def __init__(
        self,
        target: LanguageModel,
        members: Mapping[str, Drafter],
        limit: int | None,
        prefixes: Sequence[tuple[PrefixCache, CachePool | None]] = (),
        utilization: float = GPU_MEMORY_UTILIZATION,
        requests: int | None = None,
    ) -> None:
        self.limit = None if limit is None else check_whole("max_cache_bytes", limit, least=1)
        self._target = target
        self._members = members
        self._reserved = 0  # bytes of running requests and of drafters for them
        self._changed = False  # since memory was last distributed
        models = [target, *(own.model for each in members.values() for own in each.held.models)]
        heads = [own for each in members.values() for own in each.held.heads]
        self._pools = {id(model): _pool_of(model) for model in models}  # several models may share one
        pools = [*self._pools.values(), *(own.pool for own in heads)]
        distinct = list({id(pool): pool for pool in pools}.values())
        if self.limit is None:
            self._limited_by = "gpu_memory_utilization"
            self.limit = gpu_cache_bytes(target.device, utilization, sum(each.most_bytes or 0 for each in distinct))
        self._stores = [store for store, _ in prefixes]
        if self.limit is not None:
            drafted = sum(each.limits.nodes for each in members.values()) + sum(own.drafted for own in heads)
            self._longest = max(model.context_length for model in models) + drafted + _AHEAD
            for model in models:
                pool = self._pools[id(model)]
                _use_a_cache(model, pool)
                pool.expect(1 + drafted)  # most tokens that a step adds
            spare = max(map(most_held, models))
            measured = sum(pool.bytes_for_one(spare) for pool in distinct)
            if self._limited_by == "gpu_memory_utilization":
                if measured >= self.limit:
                    raise OptionError(
                        f"leaves {in_bytes(self.limit)} for keys and values, and those with which costs are measured "
                        f"take {in_bytes(measured)}; raise it, free some memory, or set max_cache_bytes",
                        field="gpu_memory_utilization",
                    )
                self.limit -= measured
            self._reserve(distinct, requests, spare)
        self._distinct_pools = distinct
        # Prefixes in a reserved block are evicted by the pool when a request needs the room.
        self._prefixes = [store for store, pool in prefixes if pool is None or pool.most_bytes is None]

    def _reserve(self, pools: Sequence[CachePool], requests: int | None, spare: int) -> None:
        """Allocate pools in proportion to their bytes per token: target and drafts cache the same tokens."""
        assert self.limit is not None
        of_all = max(sum(pool.position_bytes for pool in pools), 1)
        kept = sum(store.most_bytes for store in self._stores)
        for pool in pools:
            share = self.limit * pool.position_bytes // of_all
            most = share if requests is None else requests * pool.bytes_for_one(self._longest) + kept
            try:
                pool.reserve(min(share, most), spare)
            except torch.OutOfMemoryError:
                requested, free = min(share, most) + pool.bytes_for_one(spare), free_memory(self._target.device) or 0
                raise OptionError(
                    f"asks for {in_bytes(requested)} for keys and values at once, and {in_bytes(free)} are free; lower "
                    "gpu_memory_utilization or max_cache_bytes",
                    field=self._limited_by,
                ) from None
            self._holding = [*self._holding, pool]

    def __del__(self) -> None:
        for store in self._stores if self._holding else ():
            store.trim(0)
        for pool in self._holding:
            pool.unreserve()

    def refuse(self, request: Request) -> None:
        """Refuse a request that could never run, even as the only one and without drafts."""
        if self.limit is None:
            return
        request.granted = _grant(request)
        pool = self._pools[id(self._target)]
        needed, most = pool.bytes_for_one(request.most_tokens), pool.most_bytes
        most = self.limit if most is None else min(most, self.limit)
        if needed > most:
            answer = request.most_tokens - request.prompt_tokens
            raise PromptError(
                f"{request.prompt_tokens} tokens of prompt and up to {answer} of answer need {needed:,} bytes of cache "
                f"and {self._limited_by} {'is' if self._limited_by == 'max_cache_bytes' else 'leaves'} {most:,}; "
                "ask for fewer max_tokens, shorten the prompt, or allow more"
            )

    def fits(self, running: Sequence[Request], request: Request) -> bool:
        """Whether a request can join the running ones: its target cache fits if drafters release everything."""
        return self.limit is None or not running or self._has_room([*running, request], ())

    def grow(self, running: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        """Extend the grants that are nearly used up; returns their requests, and those to preempt, the latest first."""
        if self.limit is None:
            return [], []
        near = [each for each in running if each.granted < min(each.most_tokens, len(each.tokens) + _NEAR)]
        if not near:
            return [], []
        for request in near:
            request.granted = _grant(request)
        self._changed = True
        stay, out = list(running), []
        while len(stay) > 1 and not self._has_room(stay, ()):
            out.append(stay.pop())
        return [each for each in near if each in stay], out

    def released(self) -> None:
        self._changed = True

    def give_back(self) -> None:
        for pool in self._distinct_pools:
            pool.trim(pool.kept_bytes)
        return_freed_memory()

    def share(self, running: Sequence[Request], new: Collection[Request]) -> tuple[list[Holding], list[Holding]]:
        """Distribute memory among drafters; returns what must be released, and what may be held again."""
        if self.limit is None or not (new or self._changed):
            return [], []
        self._changed = False
        holdings = self._requested(running)
        held = [each for each in holdings if each.request not in new and each.is_held]
        before, taken = set(held), []
        while held and not self._has_room(running, held):
            taken.append(held.pop())  # the most expensive, of the latest request
        for each in holdings:
            if each not in before and each.drafter not in each.request.drafting.excluded:
                share = 1.0 if each.request in new else RESUMES_AT
                if self._has_room(running, [*held, each], share):
                    held.append(each)
                else:
                    each.request.drafting.no_room.add(each.drafter)
        self._reserved = self._bytes(running, held)
        return taken, [each for each in held if each not in before and each.request not in new]

    def _requested(self, requests: Iterable[Request]) -> list[Holding]:
        found = [
            (self._bytes((), [holding]), place, holding)
            for place, request in enumerate(requests)
            for name in self._members
            if self._bytes((), [holding := Holding(request, name)])
        ]
        return [holding for *_, holding in sorted(found, key=lambda each: each[:2])]

    def _bytes(self, requests: Sequence[Request], held: Iterable[Holding]) -> int:
        return sum(self._bytes_by_pool(requests, held).values())

    def _has_room(self, requests: Sequence[Request], held: Iterable[Holding], share: float = 1.0) -> bool:
        assert self.limit is not None
        found = self._bytes_by_pool(requests, held)
        most = [(found[id(pool)], pool.most_bytes) for pool in self._distinct_pools]
        return sum(found.values()) <= share * self.limit and all(
            limit is None or n_bytes <= share * limit for n_bytes, limit in most
        )

    def _bytes_by_pool(self, requests: Sequence[Request], held: Iterable[Holding]) -> dict[int, int]:
        caches: dict[int, list[tuple[int, RequestCache | None]]] = {id(pool): [] for pool in self._distinct_pools}
        caches[id(self._pools[id(self._target)])] += [(request.granted, request.cache) for request in requests]
        other_bytes = 0
        for each in held:
            drafter, request = self._members[each.drafter], each.request
            other_bytes += drafter.held.request_bytes + drafter.held.token_bytes * request.granted
            for pool, own in self._caches_of(drafter):
                caches[id(pool)].append((own.most(request.granted), own.caches.get(request.id)))
        return {0: other_bytes} | {id(pool): pool.bytes_for(caches[id(pool)]) for pool in self._distinct_pools}

    def _caches_of(self, drafter: Drafter) -> list[tuple[CachePool, ModelCaches | HeadCaches]]:
        held = drafter.held
        return [(self._pools[id(own.model)], own) for own in held.models] + [(own.pool, own) for own in held.heads]

    def bound(self, request: Request) -> None:
        if self.limit is None:
            return
        assert request.cache is not None
        request.cache.limit_to(request.granted)
        request.drafting.most_positions = request.cache.most
        for name in self._members:
            self.bound_drafter(request, name)

    def bound_drafter(self, request: Request, name: str) -> None:
        for _, own in self._caches_of(self._members[name]):
            if request.id in own.caches:
                own.caches[request.id].limit_to(own.most(request.granted))

    def settle(self, running: Sequence[Request]) -> None:
        """Release buffers and prefixes that exceed the limit, after a step."""
        if self.limit is None:
            return
        if self._changed:
            self._reserved = self._bytes(running, (each for each in self._requested(running) if each.is_held))
        self.trim()

    def trim(self) -> None:
        if self.limit is None:
            return
        for pool in self._distinct_pools:
            over = self._reserved + self.kept_bytes - self.limit
            if over <= 0:
                return
            pool.trim(over)
        for store in self._prefixes:
            over = self._reserved + self.kept_bytes - self.limit
            if over <= 0:
                return
            store.trim(max(store.n_bytes - over, 0))

    @property
    def kept_bytes(self) -> int:
        return sum(pool.kept_bytes for pool in self._distinct_pools) + sum(each.n_bytes for each in self._prefixes)

    def room(self, requests: int) -> int:
        """Tokens that the target's caches can hold: within the limit, or without one in `requests` full contexts."""
        whole = self._target.context_length
        if self.limit is None:
            return requests * whole
        pool = self._pools[id(self._target)]
        most = self.limit if pool.most_bytes is None else min(pool.most_bytes, self.limit)
        return most * whole // max(pool.bytes_for_one(whole), 1)

    def share_taken(self, running: Sequence[Request], requests: int) -> float:
        """Share of that room granted to running requests, or used by them if unlimited; reclaimable memory is free."""
        if self.limit is None:
            return sum(len(each.tokens) for each in running) / self.room(requests)
        return min(self._bytes(running, ()) / self.limit, 1.0)  # grants are extended before a request is preempted

    def used(self, running: Iterable[Request]) -> int:
        caches = [request.cache for request in running]  # a copy, because a step may run at the same time
        own = sum(cache.n_bytes for cache in caches if cache is not None)
        own = self._pools[id(self._target)].held_bytes or own
        return own + sum(drafter.held.n_bytes for drafter in self._members.values()) + self.kept_bytes

    @property
    def lost_pages(self) -> int:
        """Pages held by no request and no prefix while none runs; more than 0 is a bug."""
        return sum(pool.lost for pool in self._distinct_pools)


def _grant(request: Request) -> int:
    return min(request.most_tokens, len(request.tokens) + _AHEAD)


def _pool_of(model: LanguageModel) -> CachePool:
    pool = model.pool
    return pool if pool is not None else CachePool(model.context_length, keep=0)


def bytes_of_cache(model: LanguageModel, tokens: int) -> int:
    """Bytes of keys, values and states of one request with so many tokens."""
    pool = _pool_of(model)
    if not pool.position_bytes:
        _use_a_cache(model, pool)
    return pool.bytes_for_one(tokens)


def _use_a_cache(model: LanguageModel, pool: CachePool) -> None:
    with model.trying() as cache:
        with torch.inference_mode():
            model.forward([Segment(cache, torch.zeros(1, dtype=torch.int64), chain_shape(1), (0,))])
        cache.commit((0,))
        pool.measure(cache)
