"""The texts that a head with a cache of its own reads, and what requests share of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import Tensor

from truedraft.drafters.base import DraftRequest
from truedraft.errors import first_line
from truedraft.models.cache import CachePool, PrefixCache, RequestCache

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LayerText:
    """What the head knows of a request: keys and values of pairs that it read, and vectors that it did not read yet.

    Vectors count as unread until the step is over: a step that fails is done again, with the same draws.
    """

    cache: RequestCache
    unread: list[Tensor] = field(default_factory=list)  # of each layer side by side, [rows, layers * width]
    length: int = 0  # of the cache before these

    @property
    def behind(self) -> int:
        """Rows that were not read."""
        return sum(map(len, self.unread))

    def vectors(self) -> Tensor:
        """Of these rows, `[rows, layers * width]`."""
        return torch.cat(self.unread)

    def start(self) -> None:
        """Drop what a proposal wrote, whose step was not over."""
        self.cache.rollback(min(self.length, self.cache.length))

    def settle(self) -> None:
        """The step is over: what was drafted is dropped, and rows count as read if all of them were."""
        if self.cache.length == self.length + self.behind:
            self.length = self.cache.length
            self.unread.clear()
        self.start()


class PairTokens(Sequence[int]):
    """The token behind each of a text, which a pair's keys and values depend on; -1 behind the last.

    Parts of it are of neighbours.

    >>> PairTokens([5, 6, 7])[:], PairTokens([5, 6, 7])[1:2]
    ([6, 7, -1], [7])

    Args:
        tokens: the text, which somebody else owns and grows.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        places, end = range(len(self._tokens))[index], len(self._tokens) - 1
        if isinstance(places, int):
            return self._tokens[places + 1] if places < end else -1
        return [*self._tokens[places.start + 1 : places.stop + 1], *[-1] * (len(places) > 0 and places.stop > end)]


class HeadTexts:
    """The texts of a head's requests by id, and what these begin with alike.

    A row of a head's cache depends on the target's vectors up to its token, and of pairs on the token behind. So what
    one request's rows are serves another that begins alike, where the target need not compute these vectors either.

    Args:
        read: reads so many tokens behind a cache's, given the tokens behind these and the target's vectors
            `[rows, layers * width]` at them, and commits them.
        pairs: whether rows are of pairs of a vector and the token behind it.
        pool: where caches come from.

    Attributes:
        texts: of requests, by id.
        caches: theirs.
        prefixes: what is kept of earlier requests.
        layers: that have keys and values.
    """

    def __init__(
        self,
        read: Callable[[RequestCache, Sequence[int], Tensor], None],
        pairs: bool,
        pool: Callable[[], CachePool],
        layers: int = 1,
    ) -> None:
        self._read, self._pairs, self._pool, self.layers = read, pairs, pool, layers
        self.texts: dict[int, LayerText] = {}
        self.caches: dict[int, RequestCache] = {}
        self.prefixes = PrefixCache()
        self._shared: dict[int, DraftRequest] = {}  # whose rows are all there, from their text's first token on

    @property
    def pool(self) -> CachePool:
        """Where caches come from now."""
        return self._pool()

    def begin(self, request: DraftRequest) -> None:
        """A request starts. Nobody shares a rehearsal, or a text of which the target read some before: these rows are
        missing."""
        cache = self.caches[request.id] = self.pool.acquire()
        self.texts[request.id] = LayerText(cache)
        if request.kept and request.cache is not None and not request.cache.length and request.tokens:
            tokens = PairTokens(request.tokens) if self._pairs else request.tokens
            scope = request.scope, request.params.adapter, request.tokens[0]
            self.prefixes.join(request.id, cache, tokens, scope)
            self._shared[request.id] = request

    def available(self, number: int) -> int | None:
        """How many of a request's first tokens need not be read, once those that began alike read theirs; None where it
        is not shared."""
        if number not in self._shared:
            return None
        try:
            for other in self.prefixes.alike(number) if self.prefixes.shares else ():
                self._read_unread(other)
        except Exception as error:  # which costs no answer: the target reads the prompt again
            _log.warning("a head failed to read what requests begin with alike (%s)", first_line(error))
            return 0
        return self.prefixes.available(number)

    def take(self, number: int, tokens: int) -> None:
        """The target's cache was filled up to so many tokens, and so is the head's."""
        text = self.texts[number]
        try:
            self.prefixes.fill(number, most=tokens)
        except Exception as error:
            _log.warning("a head failed to copy what requests begin with alike (%s)", first_line(error))
        text.length = text.cache.length
        if text.length != tokens:  # what was kept went, to make room: rows are missing
            self._leave(number)

    def end(self, request: DraftRequest) -> None:
        """A request is over: what it began with is kept, and its cache given back."""
        cache = self.caches.get(request.id)
        try:
            if request.id in self._shared and self.prefixes.most_bytes and request.inputs is None:
                self._read_unread(request.id)
                self.prefixes.keep(request.id)
        finally:
            self._leave(request.id)
            self.texts.pop(request.id, None)
            self.caches.pop(request.id, None)
            if cache is not None:
                self.pool.release(cache)

    def _leave(self, number: int) -> None:
        self._shared.pop(number, None)
        self.prefixes.leave(number)

    def _read_unread(self, number: int) -> None:
        """Read what is unread of a text, but for the last row, which the next draft stands behind."""
        text, request = self.texts[number], self._shared[number]
        text.start()
        if text.behind > 1:
            vectors = text.vectors()
            first, rows = text.length + 1, text.behind - 1
            self._read(text.cache, request.tokens[first : first + rows], vectors[:rows])
            text.length = text.cache.length
            text.unread = [vectors[rows:]]
