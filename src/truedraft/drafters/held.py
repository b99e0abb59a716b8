"""What a drafter holds for requests: the caches of its models, and whatever else it notes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from truedraft.models.base import LanguageModel
from truedraft.models.cache import CachePool, PrefixCache, RequestCache


@dataclass(frozen=True, slots=True, eq=False)
class ModelCaches:
    """The caches of a model that drafts.

    Attributes:
        model: whose caches they are.
        caches: by id of request; after `propose` and `observe` they hold what a fresh computation would.
        prefixes: what requests begin with, and the texts that the model reads.
        drafted: most tokens in a cache beyond those of a request.
        per_token: most tokens of the model's own for one of the target's.
    """

    model: LanguageModel
    caches: Mapping[int, RequestCache]
    prefixes: PrefixCache
    drafted: int
    per_token: int = 1

    def most(self, tokens: int) -> int:
        """Most tokens in the cache of a request of so many, drafted ones included."""
        return min(self.per_token * tokens, self.model.context_length) + self.drafted

    def ahead(self, tokens: int) -> ModelCaches:
        """The same where requests may be so many tokens longer before these are judged."""
        return replace(self, drafted=self.drafted + self.per_token * tokens)


@dataclass(frozen=True, slots=True, eq=False)
class HeadCaches:
    """The caches of a head that drafts, where all lie in one block.

    Attributes:
        pool: where they come from.
        caches: by id of request.
        drafted: most tokens in a cache beyond those of a request.
    """

    pool: CachePool
    caches: Mapping[int, RequestCache]
    drafted: int

    def most(self, tokens: int) -> int:
        """Most tokens in the cache of a request of so many, drafted ones included."""
        return tokens + self.drafted


class SharedTexts(Protocol):
    """What a head, which reads the target's vectors at all tokens of a text, shares of texts that begin alike.

    Attributes:
        prefixes: of the head's keys and values.
        layers: that have such.
    """

    prefixes: PrefixCache
    layers: int

    @property
    def pool(self) -> CachePool:
        """Where its caches come from."""

    def available(self, number: int) -> int | None:
        """How many of a request's first tokens it need not see; None where the request is no matter of it."""

    def take(self, number: int, tokens: int) -> None:
        """The target's cache was filled up to so many tokens, which are available."""


@dataclass(slots=True, eq=False)
class Held:
    """All that a drafter holds for requests; what it keeps of earlier ones is counted apart (`PrefixCache`).

    Attributes:
        models: caches of its models.
        noted: what else it notes, by id of request.
        request_bytes: that this takes for each request.
        token_bytes: that it takes at the most for each token of a request, beside.
        tokens: how many tokens there are such bytes of now, of all requests.
        beside: bytes that it holds in another process.
        in_target: whether it drafts in the target's own cache of a request (`DraftRequest.cache`).
        heads: caches of its heads, beside `token_bytes`.
        shared: what its heads share of texts that begin alike, and keep for requests to come.
    """

    models: Sequence[ModelCaches] = ()
    noted: Sequence[Mapping[int, object]] = ()
    request_bytes: int = 0
    token_bytes: int = 0
    tokens: Callable[[], int] = lambda: 0
    beside: int = 0
    in_target: bool = False
    heads: Sequence[HeadCaches] = ()
    shared: Sequence[SharedTexts] = ()

    @property
    def requests(self) -> set[int]:
        """Ids of requests that something is held for."""
        return {
            *(number for each in self.models for number in each.caches),
            *(key for own in self.noted for key in own),
        }

    @property
    def n_bytes(self) -> int:
        """Bytes that are held now."""
        owners: list[ModelCaches | HeadCaches] = [*self.models, *self.heads]
        caches = [cache for each in owners for cache in list(each.caches.values())]  # a step may run
        noted = self.request_bytes * len(self.requests) + self.token_bytes * self.tokens()
        return self.beside + noted + sum(cache.n_bytes for cache in caches)
