"""Run beforehand what steps will run, so that no request waits while forwards are recorded.

A backend that records replays a shape of forward from its third time on; `LanguageModel.warmups` counts what came
before. So each shape that steps will have is run on made-up requests until that number stands still. What a drafter
runs is its own affair: it drafts for made-up requests, as many at once as steps will have, until its number stands
still.
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
from truedraft.errors import CacheError
from truedraft.models.backends.graphs.batch import WORD_BITS, Bucket
from truedraft.models.base import ForwardOutput, LanguageModel, Segment
from truedraft.models.cache import RequestCache
from truedraft.progress import Progress

_log = logging.getLogger("truedraft.engine")

MOST_KEPT = 256
"""Recordings that a model's or a drafter's runner keeps."""
_LEAST_CONTEXT = 256  # shorter ones run as this one does
_MOST_TOGETHER = 128  # rows of several requests, beyond which drafts rarely pay
_MOST_ROWS = 64  # of one request, beyond which nothing is recorded
_TILES = (4, 16, 64)  # tokens of a request up to which attention has kernels of their own
_PART = 512  # tokens of a prompt that are read at once
_TRIES = 6  # of one shape: two are recorded, and memory that grows meanwhile voids what was
_ALL_DEPTHS = 8  # of drafts; beyond, only every doubling
_SLACK = 96  # tokens that the text of a made-up request grows by
_LONGEST = 16  # draft
_SHORT = 16  # tokens of such a text beside a long one

_GREEDY, _SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)


Step: TypeAlias = tuple[TreeShape, ...]
"""A target's forward in a step, whatever it is behind: how the new tokens of each request hang together."""


def step_shapes(limits: Iterable[Budget], max_batch: int) -> list[Step]:
    """The forwards of steps up to rounding to powers of two, the largest first.

    That are 1, 2, 4, ... requests with a token each; the same with drafts of 1, 3, 7, ... tokens up to what limits
    allow, as long as few rows come together; and the ends of prompts, one at a time. Kernels are others for trees, and
    for few tokens of a request or many: so parts of prompts of each kind stand beside a tree, too.

    >>> [[len(each) for each in step] for step in step_shapes([Budget(3)], 2) if len(step[0]) <= 4]
    [[4, 4], [2, 2], [4], [1, 1], [2], [1]]

    Args:
        limits: of drafters.
        max_batch: most requests in one step.
    """
    drafting = [each for each in limits if not each.is_zero]
    chains = max((min(each.depth, each.nodes) for each in drafting if each.width == 1), default=0)
    trees = max((each.nodes for each in drafting if each.width > 1), default=0)
    own = [chain_shape(rows) for rows in _doublings(min(1 + chains, _MOST_ROWS))]
    own += [_star(rows) for rows in _doublings(min(1 + trees, _MOST_ROWS)) if rows > 2]
    found: set[Step] = {(chain_shape(rows),) for rows in _doublings(_MOST_ROWS)}
    for count, each in itertools.product(_doublings(max_batch), own):
        if 1 in (count, len(each)) or count * len(each) <= _MOST_TOGETHER:
            found.add((each,) * count)
    if trees and max_batch > 1:
        beside = [(part - 1, part) for part in _TILES]
        beside += [(nodes, _MOST_ROWS + 1) for nodes in range(WORD_BITS, WORD_BITS + trees, WORD_BITS)]
        found |= {(_star(min(nodes, 1 + trees)), chain_shape(part)) for nodes, part in beside}
    return sorted(found, key=lambda step: (_total(step), len(step), step[0].is_chain), reverse=True)


def recorded_steps(steps: Sequence[Step], contexts: Iterable[int]) -> list[tuple[int, Step]]:
    """Which steps are run, and behind texts of how many tokens: those of one bucket once, and of more than are kept
    those of few new tokens behind short texts."""
    found = {_bucket(step, context): (context, step) for context in contexts for step in steps}
    return sorted(found.values(), key=lambda each: each[0] * _total(each[1]))[:MOST_KEPT]


def _bucket(step: Step, context: int) -> Bucket:
    """That the longest of its texts ends in with so many tokens."""
    nodes = max((len(each) for each in step if not each.is_chain), default=0)
    return Bucket.recorded(len(step), max(map(len, step)), _total(step), context, nodes)


def _total(step: Step) -> int:
    return sum(map(len, step))


def _star(rows: int) -> TreeShape:
    """The first token with all others below it."""
    return TreeShape((-1, *(0,) * (rows - 1)))


def contexts_of(tokens: int) -> list[int]:
    """Lengths of texts that forwards are run behind, the longest first.

    >>> contexts_of(1500), contexts_of(100)
    ([1500, 1024, 512, 256], [100])
    """
    return sorted({min(_LEAST_CONTEXT, tokens), *(each for each in _doublings(tokens) if each > _LEAST_CONTEXT)})[::-1]


def _doublings(most: int) -> list[int]:
    """1, 2, 4, ... and `most`.

    >>> _doublings(6), _doublings(1)
    ([1, 2, 4, 6], [1])
    """
    return sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})


def settle(run: Callable[[], object], warmups: Callable[[], int]) -> None:
    """Run something until that makes no forward any more which takes longer than later ones."""
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
    """Run the forwards of steps, and drafts of all sizes, until none of them would be recorded any more.

    Where a model records nothing, nothing is run but one forward of the target. What has no room is left out, and a
    drafter that fails drafts unrecorded.

    Args:
        target: the model that answers.
        drafters: that draft for it.
        features: that these want to see of the target's forward; None is nothing.
        max_batch: most requests in one step.
        tokens: of the longest text that forwards are run behind.
        progress: is told of each shape.

    Raises:
        ModelError: the target failed.
    """
    layers = () if features is None else features.layers
    with target.trying() as cache:
        seen = _forward(target, layers, [_segment(cache, chain_shape(1))])
    contexts = contexts_of(max(1, min(tokens, target.context_length)))
    steps = step_shapes([each.limits for each in drafters], max_batch) if target.warmups else []
    forwards = recorded_steps(steps, contexts)
    # One that drafts in the target's own caches runs what the target runs.
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
                _rehearse(drafter, target.vocab_size, seen, params, context, count)
        except Exception as error:
            _log.warning("the drafter %r was not made ready: %s", drafter.name, error)
        progress(next(done) / total, drafter.name)


def _run_forwards(
    target: LanguageModel,
    layers: Sequence[int],
    forwards: Sequence[tuple[int, Step]],
    told: Callable[[], None],
) -> None:
    """Run steps, the largest first, each behind one request that is as long as said, and others that are empty."""
    with ExitStack() as held:
        caches = []
        for _ in range(max(len(step) for _, step in forwards)):
            caches.append(target.new_cache())
            held.callback(target.release_cache, caches[-1])
        for context, step in sorted(forwards, key=lambda each: (each[0], _total(each[1])), reverse=True):
            # The rows of any step end between half the context and all of it, as far as there are so many.
            _read_up_to(target, caches[0], max(context - _MOST_ROWS, context // 2))
            if len(step[0]) <= context - caches[0].length:
                _settle_forward(target, layers, list(map(_segment, caches, step)))
            told()


def _settle_forward(target: LanguageModel, layers: Sequence[int], segments: Sequence[Segment]) -> None:
    try:
        settle(lambda: _forward(target, layers, segments), lambda: target.warmups)
    except (CacheError, torch.OutOfMemoryError) as error:
        _log.warning("%d requests of %d rows have no room: %s", len(segments), len(segments[0].tokens), error)
    finally:
        for segment in segments:
            segment.cache.commit(())


def _read_up_to(target: LanguageModel, cache: RequestCache, length: int) -> None:
    """Let a cache hold so many tokens of a made-up text."""
    cache.rollback(min(cache.length, length))
    while (count := min(length - cache.length, _PART)) > 0:
        target.forward([Segment(cache, torch.zeros(count, dtype=torch.int64), chain_shape(count), (), prompt=count)])
        cache.commit(range(count))


def _segment(cache: RequestCache, shape: TreeShape) -> Segment:
    """With logits at all rows, as verdicts want them."""
    return Segment(cache, torch.zeros(len(shape), dtype=torch.int64), shape, range(len(shape)))


def _forward(target: LanguageModel, layers: Sequence[int], segments: Sequence[Segment]) -> ForwardOutput:
    """As the engine's steps run it."""
    return target.forward_showing(segments, layers) if layers else target.forward(segments)


def _rehearse(
    drafter: Drafter, vocab_size: int, seen: ForwardOutput, params: SamplingParams, context: int, count: int
) -> None:
    """Let a drafter draft for so many requests, one of which is almost as long as a context, to all depths."""
    length = max(1, context - min(_SLACK, context // 2))
    group = _Group(drafter, vocab_size, seen, params, [length, *[min(_SHORT, length)] * (count - 1)])
    try:
        group.begin()
        limit = min(drafter.limits.depth, _LONGEST)
        for depth in _depths(limit):
            settle(partial(group.step, depth, 0, context), lambda: drafter.warmups)
        for kept in _doublings(limit):  # the more were accepted, the more is read before the next draft
            group.step(limit, kept, context)
            settle(partial(group.step, limit, kept, context), lambda: drafter.warmups)
    finally:
        group.end()


def _groups(drafter: Drafter, contexts: Iterable[int], max_batch: int) -> list[tuple[int, int]]:
    """Contexts, and for how many requests it drafts together behind them, the largest first; no more than are kept.

    A draft is one recording for each depth, and for each number of tokens that is read before; greedy and sampled.
    Where there are more, those of few requests behind short texts are taken.
    """
    limit = min(drafter.limits.depth, _LONGEST)
    each = 2 * (len(_depths(limit)) + len(_doublings(limit)))
    fit = [context for context in contexts if drafter.model is None or context <= drafter.model.context_length]
    found = sorted(itertools.product(fit, _doublings(max_batch)), key=math.prod)[: max(MOST_KEPT // each, 1)]
    return sorted(found, reverse=True)


def _depths(limit: int) -> list[int]:
    """All small ones, then every doubling, and the limit.

    >>> _depths(20)
    [1, 2, 3, 4, 5, 6, 7, 8, 16, 20]
    """
    return sorted({*range(1, min(limit, _ALL_DEPTHS) + 1), *_doublings(limit)})


class _Group:
    """Made-up requests that a drafter drafts for together.

    Args:
        drafter: is told of them.
        vocab_size: of the target.
        seen: one row of a forward of the target, which stands for all that drafters want to see.
        params: of all requests.
        lengths: of their prompts.
    """

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        seen: ForwardOutput,
        params: SamplingParams,
        lengths: Sequence[int],
    ) -> None:
        self._drafter, self._vocab_size, self._seen = drafter, vocab_size, seen
        self._texts = [[place * 7919 % vocab_size for place in range(length)] for length in lengths]
        # The engine counts its requests up from 0; two of a scope of their own share nothing with anybody.
        self._requests = [
            DraftRequest(-1 - number, params, TokenView(text), scope=object(), kept=False)
            for number, text in enumerate(self._texts)
        ]
        self._begun: list[DraftRequest] = []
        self._steps = itertools.count()

    def begin(self) -> None:
        """Their prompts are read, and a first token stands behind each."""
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
        """Draft for all of them, and keep a part of their longest paths; nothing is done where a text grew too long.

        Args:
            depth: of the drafts.
            kept: tokens of them that are accepted at most.
            most: tokens that a text may have.
        """
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
        """What became of a proposal; all rows that a drafter sees are alike."""
        features = self._drafter.features
        if features is None:
            return StepOutcome(proposal, path, tokens)
        rows = 1 if features.rows == "last" else rows
        hidden, logits, *layers = (
            each.expand(rows, -1) for each in (self._seen.hidden, self._seen.logits, *self._seen.layers)
        )
        return StepOutcome(proposal, path, tokens, hidden, logits if features.logits else None, tuple(layers))

    def end(self) -> None:
        """They are over, and nothing of them is kept."""
        for request in self._begun:
            for own in self._drafter.held.models:
                if request.id in own.caches:
                    own.caches[request.id].rollback(0)
            self._drafter.end(request)
