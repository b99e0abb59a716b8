"""Measure V(rows, contexts): what a forward of a target costs, by itself, without the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from truedraft.cache import RequestCache
from truedraft.core.trees import chain_shape
from truedraft.models.base import LanguageModel, Segment
from truedraft.planning.machine import wait_for
from truedraft.planning.rounds import Effort, Progress, in_rounds
from truedraft.theory import BatchPoint, TargetCost

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_CONTEXTS = (128, 512, 1024)
_REQUESTS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class _Cell:
    """One kind of forward: so many requests with so many rows and cached tokens each."""

    requests: int
    rows: int
    context: int


@torch.inference_mode()
def measure_target(
    model: LanguageModel,
    *,
    effort: Effort | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> TargetCost:
    """Time forwards of 1 to 64 rows behind contexts of 128 to 1,024 tokens, and of several requests at once.

    Rows and contexts are cut to the model's context length. Each kind of forward is run once to warm up, then in
    interleaved rounds; its median counts.

    Args:
        model: any; it must not run elsewhere at the same time.
        effort: how long to measure; None takes 8 seconds, and three rounds at least.
        progress: told after each forward.
        clock: seconds.

    Raises:
        ModelError: the model failed.
    """
    cells = _cells(model.context_length)
    times: dict[_Cell, list[float]] = {cell: [] for cell in cells}
    caches: dict[int, list[RequestCache]] = {}
    try:
        for cell in cells:
            held = caches.setdefault(cell.context, [])
            while len(held) < cell.requests:
                held.append(model.new_cache())
                _fill(model, held[-1], cell.context)

        def measure(cell: _Cell, number: int) -> None:
            seconds = _forward_s(model, caches[cell.context][: cell.requests], cell.rows, clock)
            if number >= 0:
                times[cell].append(seconds)

        in_rounds(cells, measure, effort or Effort(8.0), progress, f"forwards of {model.name}", clock)
    finally:
        for cache in (cache for held in caches.values() for cache in held):
            model.release_cache(cache)
    alone = {(cell.rows, cell.context): median(times[cell]) for cell in cells if cell.requests == 1}
    batches = [BatchPoint(cell.requests, cell.context, median(times[cell])) for cell in cells if cell.requests > 1]
    return TargetCost.fit(alone, batches)


def _cells(context_length: int) -> list[_Cell]:
    """What to measure of a model with so many positions."""
    rows = [count for count in _ROWS if 2 * count <= context_length] or [1]
    room = max(1, context_length - rows[-1])
    contexts = sorted({min(context, room) for context in _CONTEXTS})
    alone = [_Cell(1, count, context) for context in contexts for count in rows]
    return alone + [_Cell(count, 1, contexts[0]) for count in _REQUESTS]


def _fill(model: LanguageModel, cache: RequestCache, context: int) -> None:
    """Give a cache `context` tokens, each a copy of the first: what attention reads does not change its cost.

    A true prefill would cost more than all that is measured.
    """
    model.forward([Segment(cache, torch.zeros(1, dtype=torch.int64, device=model.device), chain_shape(1), (0,))])
    cache.commit((0,))
    cache.reserve(context - 1)
    cache.commit(range(context - 1))
    for keys, values in cache.entries():
        keys[:, 1:] = keys[:, :1]
        values[:, 1:] = values[:, :1]


def _forward_s(model: LanguageModel, caches: Sequence[RequestCache], rows: int, clock: Callable[[], float]) -> float:
    """Seconds of one forward, with logits for every row, as a verification asks for them; nothing is kept."""
    # Different tokens, for a mixture of experts reads more weights then.
    segments = [
        Segment(
            cache,
            (torch.arange(rows, device=model.device) + place * rows) * 7919 % model.vocab_size,
            chain_shape(rows),
            range(rows),
        )
        for place, cache in enumerate(caches)
    ]
    wait_for(model.device)
    started = clock()
    model.forward(segments)
    wait_for(model.device)
    seconds = clock() - started
    for cache in caches:
        cache.rollback(cache.length)
    return seconds
