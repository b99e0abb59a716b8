"""Prefix sharing: requests with a common prefix copy the keys and values of target and drafters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from truedraft.drafters.base import Drafter
from truedraft.engine.request import Request
from truedraft.models.base import LanguageModel
from truedraft.models.cache import PrefixCache
from truedraft.options import check_whole

_AMPLE = 1.25
"""Factor on the heads' share by layers, because a prefix that heads evict first is read again by the target too."""
_LEAST_SHARE = 1 / 16
"""Smallest share of a drafter's model relative to the target's, however small the model."""


class PrefixSharing:
    """Shares prefixes; `most_bytes` are kept for later requests. None keeps nothing, 0 disables sharing."""

    def __init__(self, target: LanguageModel, members: Mapping[str, Drafter], most_bytes: int | None) -> None:
        most = None if most_bytes is None else check_whole("prefix_cache_bytes", most_bytes, least=0)
        self._own = PrefixCache()
        self._placeholders = target.placeholders
        weights = [(self._own, target.pool, 1.0)]
        for each in members.values():
            for own in each.held.models:
                share = own.model.weight_bytes / max(target.weight_bytes, 1)
                weights.append((own.prefixes, own.model.pool, max(share, _LEAST_SHARE)))
            for texts in each.held.shared:
                share = _AMPLE * texts.layers / max(target.shown_layers, 1)
                weights.append((texts.prefixes, texts.pool, max(share, _LEAST_SHARE)))
        for store, pool, share in weights:
            store.most_bytes = int((most or 0) * share / sum(weight for *_, weight in weights))
            store.shares = most != 0
            if pool is not None:
                pool.reclaim_from(store)
        self.stores, self.pools = [store for store, *_ in weights], [pool for _, pool, _ in weights]
        self._heads = [texts for each in members.values() for texts in each.held.shared]
        # A drafter that reads the rows of all prompt tokens, and shares none, needs all of them computed.
        watching = [each for each in members.values() if each.features is not None and each.features.of_prompts]
        if not all(each.held.shared for each in watching):
            self._own.shares = False

    @property
    def copied_tokens(self) -> int:
        return self._own.copied

    def begin(self, request: Request, running: Sequence[Request]) -> None:
        """Fill the cache of a new request with a known prefix, or let it wait for one that reads the same prefix."""
        assert request.cache is not None
        if request.inputs is not None and request.tokens[request.prompt_tokens - 1] in self._placeholders:
            return  # the last token would be computed again, as text
        scope = request.draft.scope, request.params.adapter
        self._own.join(request.id, request.cache, request.tokens, scope, request.prompt_tokens)
        if request.params.prompt_logprobs is not None and not request.emitted:
            return
        self._fill(request)
        reading = (each.id for each in running if each is not request and each.cache and not each.decodes)
        found = self._own.leader(request.id, reading)
        if found is not None:
            number, length = found
            request.awaits = next(each for each in running if each.id == number), length

    def go_on(self, request: Request) -> None:
        """Copy the common prefix once the request it waits for has read it or is finished."""
        if request.awaits is not None:
            leader, length = request.awaits
            if leader.cache is None or leader.cache.length >= length:
                request.awaits = None
                self._fill(request)

    def _fill(self, request: Request) -> None:
        # After a part of a prompt with images it could not continue: the rest would be read as text.
        least, most = 0 if request.inputs is None else request.prompt_tokens - 1, None
        assert request.cache is not None
        if self._heads and self._own.available(request.id, least) == request.cache.length:
            return  # no prefix, so heads need no lookup
        found = {texts: count for texts in self._heads if (count := texts.available(request.id)) is not None}
        if found:
            most = min(found.values())
        copied = self._own.fill(request.id, least, most)
        for texts in found if copied else ():
            texts.take(request.id, request.cache.length)
        if not request.preemptions:  # after a preemption it copies more than its prompt
            request.copied_tokens += copied

    def end(self, request: Request) -> None:
        try:
            if request.error is None and request.inputs is None:
                self._own.keep(request.id)
        finally:
            self._own.leave(request.id)
