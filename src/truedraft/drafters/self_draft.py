"""The target as its own draft, with fewer bits, on the target's KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from truedraft.core.budget import Budget, check_nodes
from truedraft.core.noise import Noise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.tree import chain_shape
from truedraft.drafters.base import Drafter, DraftRequest
from truedraft.drafters.held import HeadCaches, Held
from truedraft.drafters.tree_builder import TreeBuilder, draw_level, judged_if_it_fails
from truedraft.errors import CompositionError
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.cache import RequestCache, bounded

_READ_TOKENS = 512


class SelfDraft(Drafter):
    """Drafts chains with a faster form of the target, such as `target.quantized(4)`.

    A proposal begins with a forward of the last token in the target's own cache; each further token is one more
    forward. These entries are dropped before the target's forward, which computes the same positions in full.

    With a bounded context it reads and writes a copy of what that leaves of the target's cache.

    Args:
        model: made from the target; reads and writes the target's caches.
        context: most tokens of a text that it sees, the first and the last ones (`BoundedContext`).

    Raises:
        OptionError: an option is out of range.
        CompositionError: the model has caches of its own.
    """

    name = "self"
    observes_lazily = True
    kinds: frozenset[DrawKind] = frozenset({DrawKind.INDEPENDENT})

    def __init__(
        self, target: LanguageModel, model: LanguageModel, num_speculative_tokens: int = 4, context: int | None = None
    ) -> None:
        check_nodes("num_speculative_tokens", num_speculative_tokens)
        self.limits = Budget(num_speculative_tokens, 1, num_speculative_tokens)
        if model.pool is None or model.pool is not target.pool:
            raise CompositionError(
                f"{model.name!r} does not read the caches of {target.name!r}; give a model made of it, such as "
                "target.quantized(4)"
            )
        self.model: LanguageModel = model
        self._caches: dict[int, RequestCache] = {}  # of requests without a cache of the target
        self._copies: dict[int, RequestCache] = {}  # with a bounded context
        self._bounds = bounded(context, drops=model.pool.drops, name=target.name)
        copies = HeadCaches(model.pool, self._copies, 1 + num_speculative_tokens, context)
        self.held = Held(noted=[self._caches], in_target=True, heads=[] if context is None else [copies])
        self._target = target

    def check(self, target: LanguageModel) -> None:
        """Raise `CompositionError` for a target that it was not made from."""
        if target.pool is not self._target.pool:
            raise CompositionError(
                f"this drafter is {self._target.name!r} itself, and reads its keys and values; make one of "
                f"{target.name!r} to draft for that"
            )

    def serves(self, request: DraftRequest) -> bool:
        """False after its weights could not be made."""
        return self.model.failure is None

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        builders = []
        for request, budget, each in zip(batch, budgets, noise, strict=True):
            cut = budget.within(self.limits).cut(self.model.most_drafted(request.tokens))
            shape = (1,) * self.limits.depth
            builders.append(
                TreeBuilder(self._seen(request), request, cut, each, shape, self.model.device, uncommitted=1)
            )
        level = [builder for builder in builders if not builder.budget.is_zero]
        last = chain_shape(1)
        segments = [Segment(each.cache, torch.tensor(each.request.tokens[-1:]), last, (0,)) for each in level]
        with judged_if_it_fails(builders):
            while level:
                level = draw_level(level, self.model.forward(segments).logits)
                segments = [builder.segment() for builder in level]
        for builder in builders:
            builder.cache.rollback(builder.cache.length)
        return [builder.proposal() for builder in builders]

    def _seen(self, request: DraftRequest) -> RequestCache:
        """The cache that it drafts in: the target's, or a bounded copy."""
        cache = self._cache(request)
        if self._bounds is None:
            return cache
        if request.id not in self._copies:
            self._copies[request.id] = self._target.new_cache()
            self._copies[request.id].bound(self._bounds)
        own = self._copies[request.id]
        own.rollback(min(own.length, cache.length))
        missed = cache.length - own.length
        if missed:
            own.family.begin_as(cache.family)
            own.extend([(cache.part(own.length, cache.length, lasting=False), 0, missed)])
        return own

    def _cache(self, request: DraftRequest) -> RequestCache:
        """The target's cache without the last token; in a replay one filled here."""
        if request.cache is not None:
            return request.cache
        if request.id not in self._caches:
            self._caches[request.id] = self._target.new_cache()
        cache, end = self._caches[request.id], len(request.tokens) - 1
        cache.rollback(min(cache.length, end))
        while cache.length < end:
            ids = request.tokens[cache.length : end][:_READ_TOKENS]
            self._target.forward([Segment(cache, torch.tensor(ids), chain_shape(len(ids)), ())])
            cache.commit(range(len(ids)))
        return cache

    def caught_up(self, batch: Sequence[DraftRequest]) -> list[RequestCache]:
        return [self._seen(request) for request in batch]

    def rewind(self, request: DraftRequest) -> None:
        for cache in (caches.get(request.id) for caches in (self._caches, self._copies)):
            if cache is not None:
                cache.rollback(min(cache.length, len(request.tokens)))

    def end(self, request: DraftRequest) -> None:
        for cache in (caches.pop(request.id, None) for caches in (self._caches, self._copies)):
            if cache is not None:
                self._target.release_cache(cache)
