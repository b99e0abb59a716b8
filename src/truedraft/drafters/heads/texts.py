"""The texts that a head with its own KV cache reads, and the prefixes that requests share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import overload

import torch
from torch import Tensor

from truedraft.drafters.base import DraftRequest
from truedraft.errors import first_line
from truedraft.models.cache import BoundedContext, CachePool, PrefixCache, RequestCache

READ_TOKENS = 512
"""Most rows of a text that are read at once."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LayerText:
    """Keys and values of rows that a head read of a request, and hidden states that it has not read.

    These stay unread until the step is over: a failed step is repeated with the same draws.
    """

    cache: RequestCache
    unread: list[Tensor] = field(default_factory=list)  # layers concatenated, [rows, layers * width]
    length: int = 0  # of the cache before these

    @property
    def unread_rows(self) -> int:
        return sum(map(len, self.unread))

    def vectors(self) -> Tensor:
        return torch.cat(self.unread)

    def start(self) -> None:
        self.cache.rollback(min(self.length, self.cache.length))

    def settle(self) -> None:
        """Drop drafted entries; rows count as read if all of them were."""
        if self.cache.length == self.length + self.unread_rows:
            self.length = self.cache.length
            self.unread.clear()
        self.start()


class PairTokens(Sequence[int]):
    """The next token for each token of a text, which a pair's keys and values depend on; -1 after the last.

    >>> PairTokens([5, 6, 7])[:], PairTokens([5, 6, 7])[1:2]
    ([6, 7, -1], [7])
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
    """The texts of a head's requests, and their shared prefixes.

    Their rows depend on the target's hidden states, and for pairs on the next token, so shared ones are computed once.

    Args:
        read: appends up to `READ_TOKENS` rows to a cache and commits them; called with the tokens after these rows and
            the target's hidden states `[rows, layers * width]`.
        pairs: whether a row reads a hidden state and the next token.
        bounds: of the caches; None: they keep whole texts.
    """

    def __init__(
        self,
        read: Callable[[RequestCache, Sequence[int], Tensor], None],
        pairs: bool,
        pool: Callable[[], CachePool],
        layers: int = 1,
        bounds: BoundedContext | None = None,
    ) -> None:
        self._read, self._pairs, self._pool, self.layers, self._bounds = read, pairs, pool, layers, bounds
        self.texts: dict[int, LayerText] = {}
        self.caches: dict[int, RequestCache] = {}
        self.prefixes = PrefixCache()
        self._shared: dict[int, DraftRequest] = {}  # requests with all rows of their text

    @property
    def pool(self) -> CachePool:
        return self._pool()

    def begin(self, request: DraftRequest) -> None:
        """Synthetic requests, and texts that the target has partly read, are not shared."""
        cache = self.caches[request.id] = self.pool.acquire()
        if self._bounds is not None:
            cache.bound(self._bounds, partial(self.prefixes.keep, request.id))
        self.texts[request.id] = LayerText(cache)
        if request.kept and request.cache is not None and not request.cache.length and request.tokens:
            tokens = PairTokens(request.tokens) if self._pairs else request.tokens
            scope = request.scope, request.params.adapter, request.tokens[0]
            self.prefixes.join(request.id, cache, tokens, scope)
            self._shared[request.id] = request

    def available(self, number: int) -> int | None:
        """Number of leading tokens to skip, after requests with the same prefix read theirs; None if not shared."""
        if number not in self._shared:
            return None
        try:
            for other in self.prefixes.alike(number) if self.prefixes.shares else ():
                self._read_unread(other)
        except Exception as error:  # harmless: the target reads the prompt again
            _log.warning("a head failed to read what requests begin with alike (%s)", first_line(error))
            return 0
        return self.prefixes.available(number)

    def take(self, number: int, tokens: int) -> None:
        """The target's cache was filled up to `tokens`; fill the head's too."""
        text = self.texts[number]
        try:
            self.prefixes.fill(number, most=tokens)
        except Exception as error:
            _log.warning("a head failed to copy what requests begin with alike (%s)", first_line(error))
        text.length = text.cache.length
        if text.length != tokens:  # kept rows were evicted, so rows are missing
            self._leave(number)

    def end(self, request: DraftRequest) -> None:
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

    def unread(self, request: DraftRequest, most: int = READ_TOKENS) -> Tensor:
        """Hidden states `[rows, layers * width]` of at most `most` unread rows, which one forward can read.

        Those before them are read; the last row never is, which the next draft needs.
        """
        text = self.texts[request.id]
        rows = text.unread_rows
        while (count := min(text.cache.make_room(rows), READ_TOKENS)) < rows or rows > most:
            count, vectors = min(count, rows - 1), text.vectors()
            first = text.length + 1
            self._read(text.cache, request.tokens[first : first + count], vectors[:count])
            text.length, text.unread = text.cache.length, [vectors[count:]]
            rows -= count
        return text.vectors()

    def _read_unread(self, number: int) -> None:
        """Except the last row, which the next draft needs."""
        text = self.texts[number]
        text.start()
        if text.unread_rows > 1:
            self.unread(self._shared[number], 1)
