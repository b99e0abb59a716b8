"""Requests that begin alike: what one has read the others copy, of the target's keys and values and of drafters'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from truedraft.drafters.base import Drafter
from truedraft.engine.request import Request
from truedraft.models.base import LanguageModel
from truedraft.models.cache import PrefixCache
from truedraft.options import check_whole

_AMPLE = 1.25
"""Of what heads would be given by their layers: what they forget before the target is read again by both."""
_LEAST_SHARE = 1 / 16
"""Of the bytes, for a drafter's model however small it is beside the target."""


class PrefixSharing:
    """Lets the requests of one engine share what they begin with.

    Args:
        target: the model that answers.
        members: the drafters, by name; those with models or heads of their own share what these read.
        most_bytes: kept for requests to come, over all models, shared out by their weights; None keeps nothing, and 0
            lets nobody share.

    Attributes:
        stores: what is kept, of the target and of drafters.
        pools: where the memory of each of these comes from; None where nobody counts it.

    Raises:
        OptionError: `most_bytes` is no whole number of 0 or more.
    """

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
        # Who wants to see the rows of all tokens of a prompt, and shares none, has to see them computed.
        watching = [each for each in members.values() if each.features is not None and each.features.of_prompts]
        if not all(each.held.shared for each in watching):
            self._own.shares = False

    @property
    def copied_tokens(self) -> int:
        """Tokens of prompts that the target need not compute, of all requests so far."""
        return self._own.copied

    def begin(self, request: Request, running: Sequence[Request]) -> None:
        """A request got its cache: fill it with what is known, or let it wait for one that reads the same.

        Args:
            request: it is among those that run.
            running: in the order in which they came.
        """
        assert request.cache is not None
        if request.inputs is not None and request.tokens[request.prompt_tokens - 1] in self._placeholders:
            return  # the last token is computed again, as text
        scope = request.draft.scope, request.params.adapter
        self._own.join(request.id, request.cache, request.tokens, scope, request.prompt_tokens)
        if request.params.prompt_logprobs is not None and not request.emitted:
            return
        self._fill(request)
        reading = (each.id for each in running if each is not request and each.cache and not each.decodes)
        found = self._own.leader(request.id, reading)
        if found is not None:
            number, request.awaits = found
            request.leader = next(each for each in running if each.id == number)

    def go_on(self, request: Request) -> None:
        """Who waited for another copies what that has read, once it is all that they have in common, or it is over."""
        leader = request.leader
        if leader is not None and (leader.cache is None or leader.cache.length >= request.awaits):
            request.leader = None
            self._fill(request)

    def _fill(self, request: Request) -> None:
        # Behind a part of a prompt with images nobody could go on: the rest would be read as text.
        least, most = 0 if request.inputs is None else request.prompt_tokens - 1, None
        assert request.cache is not None
        if self._heads and self._own.available(request.id, least) == request.cache.length:
            return  # heads need not look for what they could go on with
        found = {texts: count for texts in self._heads if (count := texts.available(request.id)) is not None}
        if found:
            most = min(found.values())
        copied = self._own.fill(request.id, least, most)
        for texts in found if copied else ():
            texts.take(request.id, request.cache.length)
        if not request.preemptions:  # what it copies when it goes on is no longer its prompt alone
            request.copied_tokens += copied

    def end(self, request: Request) -> None:
        """A request is over, and its cache still there: keep what it began with, unless it failed by what is there."""
        try:
            if request.error is None and request.inputs is None:
                self._own.keep(request.id)
        finally:
            self._own.leave(request.id)
