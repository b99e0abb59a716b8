"""Memory that a drafter holds for requests: the caches of its models, and other state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from truedraft.models.base import LanguageModel
from truedraft.models.cache import CachePool, PrefixCache, RequestCache

if TYPE_CHECKING:
    from truedraft.drafters.heads.texts import HeadTexts


@dataclass(frozen=True, slots=True, eq=False)
class ModelCaches:
    """The caches of a draft model.

    Attributes:
        caches: by id of request; after `propose` and `observe` their content equals a fresh computation's.
        drafted: maximum number of tokens in a cache beyond those of a request.
        per_token: maximum number of the model's own tokens per token of the target.
        context: most tokens of a text that stay in a cache; None: all.
    """

    model: LanguageModel
    caches: Mapping[int, RequestCache]
    prefixes: PrefixCache
    drafted: int
    per_token: int = 1
    context: int | None = None

    def most(self, tokens: int) -> int:
        """Most tokens in the cache of a request with `tokens` tokens, drafted ones included."""
        most = self.model.context_length if self.context is None else self.context
        return min(self.per_token * tokens, most) + self.drafted

    def ahead(self, tokens: int) -> ModelCaches:
        """The same if requests may be `tokens` tokens longer before these are verified."""
        return replace(self, drafted=self.drafted + self.per_token * tokens)


@dataclass(frozen=True, slots=True, eq=False)
class HeadCaches:
    """The caches of a head, or of a drafter that copies the target's keys; see `ModelCaches`."""

    pool: CachePool
    caches: Mapping[int, RequestCache]
    drafted: int
    context: int | None = None

    def most(self, tokens: int) -> int:
        return (tokens if self.context is None else min(tokens, self.context)) + self.drafted


@dataclass(slots=True, eq=False)
class Held:
    """All memory that a drafter holds for requests, without that kept of earlier ones (`PrefixCache`).

    Attributes:
        noted: other state, by id of request, with `request_bytes` each, and at most `token_bytes` more per token.
        tokens: returns the current number of such tokens, of all requests.
        beside: bytes held in another process.
        in_target: whether it drafts in the target's own cache of a request (`DraftRequest.cache`).
        heads: their caches, not in `token_bytes`.
        shared: prefixes that its heads share between requests and keep for later ones.
    """

    models: Sequence[ModelCaches] = ()
    noted: Sequence[Mapping[int, object]] = ()
    request_bytes: int = 0
    token_bytes: int = 0
    tokens: Callable[[], int] = lambda: 0
    beside: int = 0
    in_target: bool = False
    heads: Sequence[HeadCaches] = ()
    shared: Sequence[HeadTexts] = ()

    @property
    def requests(self) -> set[int]:
        return {
            *(number for each in self.models for number in each.caches),
            *(key for own in self.noted for key in own),
        }

    @property
    def n_bytes(self) -> int:
        owners: list[ModelCaches | HeadCaches] = [*self.models, *self.heads]
        caches = [cache for each in owners for cache in list(each.caches.values())]  # a step may run
        noted = self.request_bytes * len(self.requests) + self.token_bytes * self.tokens()
        return self.beside + noted + sum(cache.n_bytes for cache in caches)
