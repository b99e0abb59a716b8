"""Warmup: run what steps will run, so that no request waits while forwards are recorded. A backend that records replays
a shape of forward from its third run on; each runs on dummy requests until `warmups` no longer changes.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias

import torch

from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import Proposal
from truedraft.core.token_view import TokenView
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.drafters.base import Drafter, DraftRequest, Features, StepOutcome
from truedraft.engine.policy.measuring import depths, doublings
from truedraft.errors import CacheError
from truedraft.models.backends.graphs.batch import WORD_BITS, Bucket
from truedraft.models.base import ForwardOutput, LanguageModel, Segment
from truedraft.models.cache import RequestCache
from truedraft.progress import Progress

_log = logging.getLogger("truedraft.engine")

MOST_KEPT = 256
"""Most recordings of a model's or a drafter's runner."""
_LEAST_CONTEXT = 256  # shorter contexts share its recordings
_MOST_TOGETHER = 128  # rows of several requests; with more, drafts rarely pay off
_MOST_ROWS = 64  # rows of one request; more are not recorded
_TILES = (4, 16, 64)  # upper bounds of tokens per request with separate attention kernels
_PART = 512  # prompt tokens per forward
_TRIES = 6  # most runs of one shape: two warm up, and memory that grows during them invalidates recordings
_SLACK = 96  # tokens that the text of a dummy request may grow by
_LONGEST = 16  # depth of drafts
_SHORT = 16  # tokens of the other dummy texts in a batch

_GREEDY, _SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)


Step: TypeAlias = tuple[TreeShape, ...]
"""Shape of a target's forward, without its context: the tree of new tokens of each request."""


def step_shapes(limits: Iterable[Budget], max_batch: int) -> list[Step]:
    """The shapes of forwards in steps, rounded up to powers of two, the largest first.

    These are 1, 2, 4, ... requests with one token each; the same with drafts of 1, 3, 7, ... tokens up to the limits;
    and parts of prompts of each kind, also combined with a tree, because these use different kernels.

    >>> [[len(each) for each in step] for step in step_shapes([Budget(3)], 2) if len(step[0]) <= 4]
    [[4, 4], [2, 2], [4], [1, 1], [2], [1]]
    """
    drafting = [each for each in limits if not each.is_zero]
    chains = max((min(each.depth, each.nodes) for each in drafting if each.width == 1), default=0)
    trees = max((each.nodes for each in drafting if each.width > 1), default=0)
    own = [chain_shape(rows) for rows in doublings(min(1 + chains, _MOST_ROWS))]
    own += [_star(rows) for rows in doublings(min(1 + trees, _MOST_ROWS)) if rows > 2]
    found: set[Step] = {(chain_shape(rows),) for rows in doublings(_MOST_ROWS)}
    for count, each in itertools.product(doublings(max_batch), own):
        if 1 in (count, len(each)) or count * len(each) <= _MOST_TOGETHER:
            found.add((each,) * count)
    if trees and max_batch > 1:
        pairs = [(part - 1, part) for part in _TILES]
        pairs += [(nodes, _MOST_ROWS + 1) for nodes in range(WORD_BITS, WORD_BITS + trees, WORD_BITS)]
        found |= {(_star(min(nodes, 1 + trees)), chain_shape(part)) for nodes, part in pairs}
    return sorted(found, key=lambda step: (_total(step), len(step), step[0].is_chain), reverse=True)


def recorded_steps(steps: Sequence[Step], contexts: Iterable[int]) -> list[tuple[int, Step]]:
    """Pairs of context length and shape, one per bucket; at most as many as can be kept, those with few new tokens."""
    found = {_bucket(step, context): (context, step) for context in contexts for step in steps}
    return sorted(found.values(), key=lambda each: each[0] * _total(each[1]))[:MOST_KEPT]


def _bucket(step: Step, context: int) -> Bucket:
    nodes = max((len(each) for each in step if not each.is_chain), default=0)
    return Bucket.recorded(len(step), max(map(len, step)), _total(step), context, nodes)


def _total(step: Step) -> int:
    return sum(map(len, step))


def _star(rows: int) -> TreeShape:
    return TreeShape((-1, *(0,) * (rows - 1)))


def contexts_of(tokens: int) -> list[int]:
    """Context lengths for which forwards are run, the longest first.

    >>> contexts_of(1500), contexts_of(100)
    ([1500, 1024, 512, 256], [100])
    """
    return sorted({min(_LEAST_CONTEXT, tokens), *(each for each in doublings(tokens) if each > _LEAST_CONTEXT)})[::-1]


def settle(run: Callable[[], object], warmups: Callable[[], int]) -> None:
    """Run something until it makes no further warmup forwards."""
    for _ in range(_TRIES):
        before = warmups()
        run()
        if warmups() == before:
            return


def make_ready(
    target: LanguageModel,
    drafters: Sequence[Drafter],
    features: Features | None,
    max_batch: int,
    tokens: int,
    progress: Progress,
) -> None:
    """Run the forwards of steps, and drafts of all sizes, until all are recorded.

    If the model records nothing, only one forward of the target is run. What does not fit into memory is skipped, and a
    failing drafter drafts unrecorded.
    """
    layers = () if features is None else features.layers
    with target.trying() as cache:
        seen = _forward(target, layers, [_segment(cache, chain_shape(1))])
    contexts = contexts_of(max(1, min(tokens, target.context_length)))
    steps = step_shapes([each.limits for each in drafters], max_batch) if target.warmups else []
    forwards = recorded_steps(steps, contexts)
    # A drafter in the target's own caches uses the target's forwards.
    recorded = [each for each in drafters if not (each.limits.is_zero or each.held.in_target)]
    groups = [
        (drafter, *group)
        for drafter in recorded
        if target.warmups or drafter.warmups
        for group in _groups(drafter, contexts, max_batch)
    ]
    total, done = len(forwards) + len(groups), itertools.count(1)
    if forwards:
        _run_forwards(target, layers, forwards, lambda: progress(next(done) / total, target.name))
    for drafter, context, count in groups:
        try:
            for params in (_GREEDY, _SAMPLED):
                _warm_up_drafts(drafter, target.vocab_size, seen, params, context, count)
        except Exception as error:
            _log.warning("the drafter %r was not made ready: %s", drafter.name, error)
        progress(next(done) / total, drafter.name)


def _run_forwards(
    target: LanguageModel, layers: Sequence[int], forwards: Sequence[tuple[int, Step]], notify: Callable[[], None]
) -> None:
    """Run steps, the largest first; one request has the context, the others are empty."""
    with ExitStack() as held:
        caches = []
        for _ in range(max(len(step) for _, step in forwards)):
            caches.append(target.new_cache())
            held.callback(target.release_cache, caches[-1])
        for context, step in sorted(forwards, key=lambda each: (each[0], _total(each[1])), reverse=True):
            # The rows of any step end between half the context and all of it, if it is long enough.
            _read_up_to(target, caches[0], max(context - _MOST_ROWS, context // 2))
            if len(step[0]) <= context - caches[0].length:
                _settle_forward(target, layers, list(map(_segment, caches, step)))
            notify()


def _settle_forward(target: LanguageModel, layers: Sequence[int], segments: Sequence[Segment]) -> None:
    try:
        settle(lambda: _forward(target, layers, segments), lambda: target.warmups)
    except (CacheError, torch.OutOfMemoryError) as error:
        _log.warning("%d requests of %d rows have no room: %s", len(segments), len(segments[0].tokens), error)
    finally:
        for segment in segments:
            segment.cache.commit(())


def _read_up_to(target: LanguageModel, cache: RequestCache, length: int) -> None:
    cache.rollback(min(cache.length, length))
    while (count := min(length - cache.length, _PART)) > 0:
        target.forward([Segment(cache, torch.zeros(count, dtype=torch.int64), chain_shape(count), (), prompt=count)])
        cache.commit(range(count))


def _segment(cache: RequestCache, shape: TreeShape) -> Segment:
    return Segment(cache, torch.zeros(len(shape), dtype=torch.int64), shape, range(len(shape)))


def _forward(target: LanguageModel, layers: Sequence[int], segments: Sequence[Segment]) -> ForwardOutput:
    return target.forward_showing(segments, layers) if layers else target.forward(segments)


def _warm_up_drafts(
    drafter: Drafter, vocab_size: int, seen: ForwardOutput, params: SamplingParams, context: int, count: int
) -> None:
    length = max(1, context - min(_SLACK, context // 2))
    group = _Group(drafter, vocab_size, seen, params, [length, *[min(_SHORT, length)] * (count - 1)])
    try:
        group.begin()
        limit = min(drafter.limits.depth, _LONGEST)
        for depth in depths(limit):
            settle(partial(group.step, depth, 0, context), lambda: drafter.warmups)
        for kept in doublings(limit):  # more accepted tokens are more to read before the next draft
            group.step(limit, kept, context)
            settle(partial(group.step, limit, kept, context), lambda: drafter.warmups)
    finally:
        group.end()


def _groups(drafter: Drafter, contexts: Iterable[int], max_batch: int) -> list[tuple[int, int]]:
    """Pairs of context length and number of requests to draft for, the largest first, as many as can be kept."""
    limit = min(drafter.limits.depth, _LONGEST)
    each = 2 * (len(depths(limit)) + len(doublings(limit)))
    fit = [context for context in contexts if drafter.model is None or context <= drafter.model.context_length]
    found = sorted(itertools.product(fit, doublings(max_batch)), key=math.prod)[: max(MOST_KEPT // each, 1)]
    return sorted(found, reverse=True)


class _Group:
    """Dummy requests that a drafter drafts for together; one row of a forward serves as all features."""

    def __init__(
        self, drafter: Drafter, vocab_size: int, seen: ForwardOutput, params: SamplingParams, lengths: Sequence[int]
    ) -> None:
        self._drafter, self._vocab_size, self._seen = drafter, vocab_size, seen
        self._texts = [[place * 7919 % vocab_size for place in range(length)] for length in lengths]
        # The engine numbers its requests from 0 upwards; a scope of its own prevents sharing.
        self._requests = [
            DraftRequest(-1 - number, params, TokenView(text), scope=object(), kept=False)
            for number, text in enumerate(self._texts)
        ]
        self._begun: list[DraftRequest] = []
        self._steps = itertools.count()

    def begin(self) -> None:
        outcomes = []
        for request, text in zip(self._requests, self._texts, strict=True):
            self._begun.append(request)
            self._drafter.begin(request)
            features, read = self._drafter.features, len(text)
            text.append(read % self._vocab_size)
            rows = read if features is not None and features.of_prompts else 1
            outcomes.append(self._outcome(Proposal.empty(), (), (text[-1],), rows))
        self._drafter.observe(self._requests, outcomes)

    def step(self, depth: int, kept: int, most: int) -> None:
        if max(map(len, self._texts)) + depth + 1 > most:
            return
        limits, step = self._drafter.limits, next(self._steps)
        budget = Budget(depth, limits.width, limits.nodes, limits.min_probability)
        noise = [KeyedNoise(number, len(text), step) for number, text in enumerate(self._texts)]
        proposals = self._drafter.propose(self._requests, [budget] * len(noise), noise)
        outcomes = []
        for text, proposal in zip(self._texts, proposals, strict=True):
            shape = proposal.tree.shape
            path = shape.path(shape.depths.index(shape.depth))[:kept] if len(shape) else ()
            tokens = (*(proposal.tree.host_ids[node] for node in path), len(text) % self._vocab_size)
            text.extend(tokens)
            features = self._drafter.features
            whole = features is not None and features.rows in ("tree", "all")
            outcomes.append(self._outcome(proposal, path, tokens, 1 + (len(shape) if whole else len(path))))
        self._drafter.observe(self._requests, outcomes)

    def _outcome(self, proposal: Proposal, path: tuple[int, ...], tokens: tuple[int, ...], rows: int) -> StepOutcome:
        features = self._drafter.features
        if features is None:
            return StepOutcome(proposal, path, tokens)
        rows = 1 if features.rows == "last" else rows
        hidden, logits, *layers = (
            each.expand(rows, -1) for each in (self._seen.hidden, self._seen.logits, *self._seen.layers)
        )
        return StepOutcome(proposal, path, tokens, hidden, logits if features.logits else None, tuple(layers))

    def end(self) -> None:
        for request in self._begun:
            for own in self._drafter.held.models:
                if request.id in own.caches:
                    own.caches[request.id].rollback(0)
            self._drafter.end(request)
