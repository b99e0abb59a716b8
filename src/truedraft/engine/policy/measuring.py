"""Measure this machine: the costs of target forwards and of a drafter's proposals without the engine, and reads.

Many sizes are measured in turn until the time is up, so that a slow moment of the machine affects all of them alike.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import Proposal
from truedraft.core.stats import Settling
from truedraft.core.theory import SETTLED, BatchPoint, DraftCost, DraftPoint, TargetCost
from truedraft.core.token_view import TokenView
from truedraft.core.tree import chain_shape
from truedraft.drafters.base import Drafter, DraftRequest, Features, StepOutcome
from truedraft.errors import DrafterError, OptionError, TruedraftError
from truedraft.machine import wait_for
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.cache import RequestCache
from truedraft.progress import Progress, unwatched

Key = TypeVar("Key", bound=Hashable)
Cost = TypeVar("Cost", DraftCost, TargetCost)

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_CONTEXTS = (128, 512, 1024)
_REQUESTS = (2, 4, 8)
_PROMPT_TOKENS = 128
_GROWTH = 256  # tokens after which a new request starts
_PERIOD = 16
_ALL_DEPTHS = 8  # beyond these, only every doubling
_ACCEPTED_SHARES = (0.0, 1.0, 0.5)
_TRIES = 6  # tries of one measurement until it is settled; a shape is final from its third forward on
_SETTLED_OF = 12  # settled forwards in the quartile
_SETTLING_S = 0.6  # time in which a model must settle: the weights of a slower one fit no processor's caches
_GIBIBYTE = 1 << 30
_CALLS_ON_CUDA = 20  # one call is over before the host has seen it start


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: no further round starts after `budget_s` seconds, except the `least_rounds`.

    Raises:
        OptionError: a negative budget, or rounds below 1 or out of order.
    """

    budget_s: float = 6.0
    least_rounds: int = 3
    most_rounds: int = 25

    def __post_init__(self) -> None:
        if not self.budget_s >= 0.0 or not 1 <= self.least_rounds <= self.most_rounds:
            raise OptionError(f"0 <= budget_s and 1 <= least_rounds <= most_rounds must hold, got {self}")


def piecewise(
    keys: Sequence[Key],
    measure: Callable[[Key, int], bool],
    effort: Effort,
    progress: Progress = unwatched,
    label: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[int]:
    """Call `measure(key, round)` for all keys, round after round, each starting at another key; yields the number of
    finished rounds after each. Round -1 is a warm-up. A key is tried again until `measure` says that it was settled,
    within limits: shapes may have to be captured again because caches grew.
    """
    total = len(keys) * (effort.most_rounds + 1)
    tries = dict.fromkeys(keys, _TRIES)
    started = clock()
    for number in range(-1, effort.most_rounds):
        if number >= effort.least_rounds and clock() - started > effort.budget_s:
            break
        for place in range(len(keys)):
            key = keys[(place + number) % len(keys)]
            began = clock()
            attempt = next((each for each in range(tries[key]) if measure(key, number)), None)
            if attempt is None:
                tries[key] = 1
            elif attempt and number < 0:
                started += clock() - began  # one-time preparation does not count towards the budget
            progress(((number + 1) * len(keys) + place + 1) / total, label)
            yield number + (place == len(keys) - 1) if number >= 0 else 0
    progress(1.0, label)


def quartile(values: Sequence[float]) -> float:
    """The lower quartile: the least of up to four values.

    >>> quartile([3.0, 1.0, 2.0]), quartile([5.0, 4.0, 3.0, 2.0, 1.0])
    (1.0, 2.0)
    """
    return sorted(values)[(len(values) - 1) // 4]


class Times(ABC, Generic[Key, Cost]):
    """Measures a cost in rounds, one key at a time; the result is the lower quartile of settled samples, if any: other
    load only adds time, and of three samples a median is wrong where two are.
    """

    keys: Sequence[Key]

    def __init__(self) -> None:
        self._settled: dict[Any, list[Any]] = {}
        self._others: dict[Any, list[Any]] = {}

    def _keep(self, number: int, place: object, sample: object, settling: Settling) -> bool:
        if number >= 0:
            (self._settled if settling.settled else self._others).setdefault(place, []).append(sample)
        return settling.settled

    @abstractmethod
    def measure(self, key: Key, number: int) -> bool:
        """Measure a key in a round (-1 is the warm-up); returns whether it was settled."""

    @abstractmethod
    def cost(self, *, whole: bool) -> Cost:
        """The cost by the measurements so far, at least one round; a `whole` one includes what is measured last."""

    @abstractmethod
    def release(self) -> None:
        """Free what measuring holds; it is made again for further measurements."""

    @torch.inference_mode()
    def measured(self, effort: Effort, progress: Progress, label: str, clock: Callable[[], float]) -> Cost:
        try:
            for _ in piecewise(self.keys, self.measure, effort, progress, label, clock):
                pass
            return self.cost(whole=True)
        finally:
            self.release()


@dataclass(frozen=True, slots=True)
class _Cell:
    requests: int
    rows: int
    context: int


def measure_target(
    model: LanguageModel,
    *,
    effort: Effort | None = None,
    progress: Progress = unwatched,
    clock: Callable[[], float] = time.perf_counter,
) -> TargetCost:
    """Time forwards of 1 to 64 rows with contexts of 128 to 1,024 tokens, and of several requests at once.

    Rows and contexts are cut to the model's context length. Then forwards of one row follow each other, as in plain
    decoding, until they take no less time than before.

    Args:
        effort: how long to measure; None takes 8 seconds, and three rounds at least.

    Raises:
        ModelError: the model failed.
    """
    return TargetTimes(model, clock).measured(effort or Effort(8.0), progress, f"forwards of {model.name}", clock)


class TargetTimes(Times[_Cell, TargetCost]):
    """The measurements of `measure_target`, one kind of forward at a time."""

    def __init__(self, model: LanguageModel, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.keys = _cells(_room(model))
        self._model, self._clock = model, clock
        self._caches: dict[int, list[RequestCache]] = {}

    @torch.inference_mode()
    def measure(self, cell: _Cell, number: int) -> bool:
        caches = self._filled(cell)
        settling = Settling(self._model)
        seconds = _forward_s(self._model, caches, cell.rows, self._clock)
        return self._keep(number, cell, seconds, settling)

    def _filled(self, cell: _Cell) -> list[RequestCache]:
        held = self._caches.setdefault(cell.context, [])
        most = max(each.requests for each in self.keys if each.context == cell.context)
        while len(held) < most:  # all at once, because memory that grows later invalidates captured forwards
            held.append(self._model.begun_cache())
            _fill(self._model, held[-1], cell.context)
        return held[: cell.requests]

    @torch.inference_mode()
    def cost(self, *, whole: bool) -> TargetCost:
        first = self.keys[0]
        settled_s = _settled_s(self._model, self._filled(first)[0], self._clock) if whole else None
        times = self._others | self._settled
        single = {(cell.rows, cell.context): quartile(times[cell]) for cell in self.keys if cell.requests == 1}
        batches = [
            BatchPoint(cell.requests, cell.context, quartile(times[cell])) for cell in self.keys if cell.requests > 1
        ]
        cost = TargetCost.fit(single, batches)
        saved_s = cost(1, [first.context]) - settled_s if settled_s is not None else 0.0
        return replace(cost, settles_s=max(saved_s, 0.0))

    def release(self) -> None:
        for cache in itertools.chain(*self._caches.values()):
            self._model.release_cache(cache)
        self._caches.clear()


def _settled_s(model: LanguageModel, cache: RequestCache, clock: Callable[[], float]) -> float | None:
    began = clock()
    found: list[float] = []
    while len(found) < SETTLED + _SETTLED_OF:
        if clock() - began > _SETTLING_S:
            return None
        settling = Settling(model)
        seconds = _forward_s(model, [cache], 1, clock)
        if settling.settled:
            found.append(seconds)
    return quartile(found[SETTLED:])


def _room(model: LanguageModel) -> int:
    return model.most_tokens(model.opening) - len(model.opening)


def _cells(context_length: int) -> list[_Cell]:
    rows = [count for count in _ROWS if 2 * count <= context_length] or [1]
    room = max(1, context_length - rows[-1])
    contexts = sorted({min(context, room) for context in _CONTEXTS})
    single = [_Cell(1, count, context) for context in contexts for count in rows]
    return single + [_Cell(count, 1, contexts[0]) for count in _REQUESTS]


def most_held(model: LanguageModel) -> int:
    """Most tokens in a model's caches while it is measured, including those that forwards write."""
    held: dict[int, tuple[int, int]] = {}  # by context: most requests, and most rows of one
    for cell in _cells(_room(model)):
        requests, rows = held.get(cell.context, (0, 0))
        held[cell.context] = max(requests, cell.requests), max(rows, cell.rows)
    return sum(requests * (context + rows) for context, (requests, rows) in held.items())


def _fill(model: LanguageModel, cache: RequestCache, context: int) -> None:
    """Give a cache `context` tokens, each a copy of the first, which is faster than a prefill."""
    model.forward([Segment(cache, torch.zeros(1, dtype=torch.int64, device=model.device), chain_shape(1), (0,))])
    cache.commit((0,))
    before = cache.length
    first = [(keys[:, before - 1 : before], values[:, before - 1 : before]) for keys, values in cache.entries()]
    cache.reserve(context - 1)
    for call, (key, value) in enumerate(first):
        cache.write(call, key.expand(-1, context - 1, -1), value.expand(-1, context - 1, -1))
    cache.commit(range(context - 1))


def _forward_s(model: LanguageModel, caches: Sequence[RequestCache], rows: int, clock: Callable[[], float]) -> float:
    # Different tokens, because a mixture of experts then reads more weights.
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


def measure_drafter(
    drafter: Drafter,
    target: LanguageModel,
    *,
    params: SamplingParams | None = None,
    effort: Effort | None = None,
    progress: Progress = unwatched,
    clock: Callable[[], float] = time.perf_counter,
) -> DraftCost:
    """Time `propose` and `observe` for one request, at budgets of depth 1 up to the drafter's own, in rounds, see
    `Times`.

    The target runs before each proposal, untimed: without it a small draft model would stay in the processor's caches.
    The request's text repeats itself, so that drafters that copy find something; not so for a drafter that itself uses
    drafts (`Drafter.levels`), whose guesses would always be wrong. Proposals are accepted to none, all or half of their
    depth in turn, so that the catch-up is included.

    Args:
        effort: how long to measure; None takes 4 seconds, and three rounds at least.

    Raises:
        CompositionError: the drafter does not fit the target.
        DrafterError: the drafter failed.
    """
    drafter.check(target)
    if drafter.limits.is_zero:
        return DraftCost(())
    times = DrafterTimes(drafter, target, params or SamplingParams(), clock)
    return times.measured(effort or Effort(4.0, 3, 60), progress, f"proposals of {drafter.name}", clock)


class DrafterTimes(Times[int, DraftCost]):
    """The measurements of `measure_drafter`, one depth at a time; samples are nodes and seconds, by depth."""

    def __init__(
        self,
        drafter: Drafter,
        target: LanguageModel,
        params: SamplingParams,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._drafter, self._target = drafter, target
        self._make = partial(_Rehearsal, drafter, target, params, clock)
        self._rehearsal: _Rehearsal | None = None
        prompt, limit = _lengths(drafter, target)
        self.keys = depths(min(drafter.limits.depth, limit - prompt - 3))

    @torch.inference_mode()
    def measure(self, depth: int, number: int) -> bool:
        with _as_drafter_error(self._drafter):
            if self._rehearsal is None:
                self._rehearsal = self._make()
            settling = Settling(self._drafter, self._target)
            proposal, seconds = self._rehearsal.step(depth, _ACCEPTED_SHARES[number % len(_ACCEPTED_SHARES)])
            taken = proposal.tree.shape.depth if self._drafter.levels is None else self._drafter.levels
        return self._keep(number, taken, (len(proposal.tree), seconds), settling)

    def cost(self, *, whole: bool) -> DraftCost:
        found = self._others | self._settled
        points = []
        for depth in sorted(depth for depth in found if depth > 0) or [0]:  # empty proposals only if all are
            nodes = round(median(nodes for nodes, _ in found[depth]))
            points.append(DraftPoint(max(1, depth), max(1, nodes), quartile([seconds for _, seconds in found[depth]])))
        return DraftCost(tuple(points))

    @torch.inference_mode()
    def release(self) -> None:
        rehearsal, self._rehearsal = self._rehearsal, None
        if rehearsal is not None:
            rehearsal.close()


@torch.inference_mode()
def rehearse(drafter: Drafter, target: LanguageModel, params: SamplingParams) -> None:
    """Let a drafter draft once for a synthetic request, so that first-use work is not done in an answer.

    Raises:
        CompositionError: the drafter does not fit the target.
        DrafterError: the drafter failed.
    """
    drafter.check(target)
    if drafter.limits.is_zero:
        return
    with _as_drafter_error(drafter):
        rehearsal = _Rehearsal(drafter, target, params, time.perf_counter)
        try:
            rehearsal.step(1, 0.0)
        finally:
            rehearsal.close()


@contextmanager
def _as_drafter_error(drafter: Drafter) -> Iterator[None]:
    try:
        yield
    except TruedraftError:
        raise
    except Exception as error:
        raise DrafterError(
            f"drafter {drafter.name!r} failed while its cost was measured ({type(error).__name__}: {error})"
        ) from error


def doublings(most: int) -> list[int]:
    """1, 2, 4, ... and `most`.

    >>> doublings(6), doublings(1)
    ([1, 2, 4, 6], [1])
    """
    return sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})


def depths(limit: int) -> list[int]:
    """Depths of drafts to run: all small ones, then the doublings, and the limit.

    >>> depths(20)
    [1, 2, 3, 4, 5, 6, 7, 8, 16, 20]
    """
    return sorted({*range(1, min(limit, _ALL_DEPTHS) + 1), *doublings(limit)})


def _lengths(drafter: Drafter, target: LanguageModel) -> tuple[int, int]:
    own = getattr(drafter, "model", None)
    context = min(_room(target), _room(own) if isinstance(own, LanguageModel) else 1 << 62)
    prompt = max(1, min(_PROMPT_TOKENS, context // 2))
    # After the prompt: its first token, that of the first step, and one step with a token of its own.
    return prompt, max(min(context, prompt + _GROWTH), prompt + 4)


class _Rehearsal:
    def __init__(
        self, drafter: Drafter, target: LanguageModel, params: SamplingParams, clock: Callable[[], float]
    ) -> None:
        self._drafter, self._target, self._params, self._clock = drafter, target, params, clock
        self._prompt, limit = _lengths(drafter, target)
        self._limit = len(target.opening) + limit
        self._hidden, self._layers = _last_vectors(target, drafter.features)
        self._kept = drafter.features is not None and drafter.features.rows == "kept"
        self._between = target.begun_cache()
        self._tokens = torch.zeros(1, dtype=torch.int64, device=target.device)
        self._period = _PERIOD if drafter.levels is None else target.vocab_size
        self._begun = self._steps = 0
        self._request: DraftRequest | None = None
        self._seen: list[int] = []  # its tokens

    def step(self, depth: int, accepted_share: float) -> tuple[Proposal, float]:
        with self._target.stepping():
            return self._step(depth, accepted_share)

    def _step(self, depth: int, accepted_share: float) -> tuple[Proposal, float]:
        request = self._request
        if request is None or len(request.tokens) + depth + 1 > self._limit:
            request = self._start()
        limits = self._drafter.limits
        budget = Budget(depth, limits.width, limits.nodes, limits.min_probability)
        noise = KeyedNoise(0, len(request.tokens), self._steps)
        self._steps += 1
        # Its weights then replace the draft's in the processor's caches, as between two steps.
        self._target.forward([Segment(self._between, self._tokens, chain_shape(1), (0,))])
        self._between.commit(())
        self._read_on(request)
        started = self._now()
        proposal = self._drafter.propose([request], [budget], [noise])[0]
        proposed_s = self._now() - started
        shape = proposal.tree.shape
        longest = shape.path(shape.depths.index(shape.depth)) if len(shape) else ()
        path = longest[: round(accepted_share * len(longest))]
        tokens = (*(proposal.tree.host_ids[node] for node in path), self._text(len(request.tokens) + len(path)))
        return proposal, proposed_s + self._observe(request, self._outcome(proposal, path, tokens))

    def _read_on(self, request: DraftRequest) -> None:
        cache, end = request.cache, len(request.tokens) - 1
        while cache is not None and cache.length < end:
            ids = torch.tensor(request.tokens[cache.length : end][:_PROMPT_TOKENS], device=self._target.device)
            self._target.forward([Segment(cache, ids, chain_shape(len(ids)), ())])
            cache.commit(range(len(ids)))

    def _start(self) -> DraftRequest:
        self.end()
        self._begun += 1
        # Negative ids: the engine counts its own up from 0, and both may share a drafter.
        self._seen = [*self._target.opening, *map(self._text, range(self._prompt))]
        inputs = self._target.opening_inputs
        request = DraftRequest(-self._begun, self._params, TokenView(self._seen), inputs=inputs, kept=False)
        if self._drafter.held.in_target:
            request = replace(request, cache=self._target.new_cache())
        self._request = request
        self._drafter.begin(request)
        nothing = Proposal.empty()
        self._observe(request, self._outcome(nothing, (), (self._text(self._prompt),)))
        self.step(1, 0.0)
        return request

    def _observe(self, request: DraftRequest, outcome: StepOutcome) -> float:
        self._seen.extend(outcome.tokens)
        started = self._now()
        self._drafter.observe([request], [outcome])
        return self._now() - started

    def _outcome(self, proposal: Proposal, path: tuple[int, ...], tokens: tuple[int, ...]) -> StepOutcome:
        count = len(tokens) if self._kept else 1
        shown = [each.expand(count, -1) for each in self._layers]
        hidden = None if self._hidden is None else self._hidden.expand(count, -1)
        return StepOutcome(proposal, path, tokens, hidden, layers=tuple(shown))

    def _text(self, place: int) -> int:
        return (place % self._period * 7919 + 1) % self._target.vocab_size

    def _now(self) -> float:
        wait_for(self._target.device)
        return self._clock()

    def end(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            self._drafter.end(request)
            if request.cache is not None:
                self._target.release_cache(request.cache)

    def close(self) -> None:
        self.end()
        self._target.release_cache(self._between)


def _last_vectors(target: LanguageModel, features: Features | None) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    if features is None:
        return None, ()
    cache = target.begun_cache()
    token = torch.zeros(1, dtype=torch.int64, device=target.device)
    segment = Segment(cache, token, chain_shape(1), (0,))
    output = target.forward_showing([segment], features.layers) if features.layers else target.forward([segment])
    target.release_cache(cache)
    return output.hidden, output.layers


def read_bandwidth(device: str | torch.device = "cpu", *, size_bytes: int = _GIBIBYTE, repetitions: int = 4) -> float:
    """Bytes per second of reading memory with all of torch's threads: a sum and a maximum of float32, a sum of int64.

    Args:
        size_bytes: of the block, a multiple of 8; must be much larger than the caches.
        repetitions: of each kind, interleaved; the fastest counts, because other load can only slow one down.

    Raises:
        OptionError: an unusable size or number of repetitions, or a block that does not fit into memory.
    """
    if size_bytes < 8 or size_bytes % 8:
        raise OptionError(f"size_bytes must be a multiple of 8 above 0, got {size_bytes}")
    if repetitions < 1:
        raise OptionError(f"repetitions must be 1 or more, got {repetitions}")
    place = torch.device(device)
    try:
        # Written, not only reserved: unwritten pages are all the same page of zeros.
        block = torch.ones(size_bytes // 4, device=place)
    except RuntimeError as error:
        raise OptionError(
            f"no {size_bytes / _GIBIBYTE:.2f} GiB of memory are free on {place} to measure reads; free some"
        ) from error
    whole = block.view(torch.int64)
    calls = _CALLS_ON_CUDA if place.type == "cuda" else 1
    # The first round warms up, and is never the fastest.
    return size_bytes / min(
        _seconds(read, calls, place) for _ in range(repetitions + 1) for read in (block.sum, block.amax, whole.sum)
    )


def _seconds(read: Callable[[], Tensor], calls: int, device: torch.device) -> float:
    wait_for(device)
    started = time.perf_counter()
    for _ in range(calls):
        read()
    wait_for(device)
    return (time.perf_counter() - started) / calls
