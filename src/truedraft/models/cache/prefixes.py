"""Requests with a common prefix share its keys and values, so that nothing is computed twice.

The entries of one request serve another bit for bit. They are copied from a running request, or from blocks that were
kept of earlier requests. Requests of different scopes, such as the API keys of a server's clients, share nothing,
because the time to the first token would reveal what others sent. Prompts with images or audio share only while they
run, and only with equal ones: their scope holds a digest of all inputs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from truedraft.models.cache.buffers import Entries
from truedraft.models.cache.family import BLOCK, StateRow, bytes_of
from truedraft.models.cache.request import RequestCache

FEW = 16
"""A common prefix of at most this many tokens is computed again, which is as fast as copying it."""


@dataclass(slots=True, eq=False)
class _Member:
    cache: RequestCache
    tokens: Sequence[int]
    scope: Hashable
    prompt: int | None

    @property
    def last(self) -> int:
        return self.cache.family.last(len(self.tokens), self.prompt)


@dataclass(slots=True, eq=False)
class _Block:
    """Keys and values of 64 tokens, and the kept blocks after it; `before` is None for the root of a `scope`."""

    before: _Block | None
    tokens: tuple[int, ...]
    entries: Entries
    states: Mapping[int, StateRow] | None = None
    following: dict[tuple[int, ...], _Block] = field(default_factory=dict)
    scope: Hashable = None

    @property
    def n_bytes(self) -> int:
        return self.entries.n_bytes + bytes_of(self.states or {})


class PrefixCache:
    """The prefixes of one model's requests.

    Up to `most_bytes` of blocks of finished requests are kept, the least recently used dropped first; 0 keeps none.
    Nothing is shared at all unless `shares`. Both may be changed. `n_bytes` are kept now; `copied` tokens were copied
    instead of computed, over all requests.
    """

    def __init__(self, most_bytes: int = 0) -> None:
        self.most_bytes = most_bytes
        self.shares = True
        self.n_bytes = 0
        self.copied = 0
        self._members: dict[int, _Member] = {}
        self._roots: dict[Hashable, _Block] = {}
        # From least to most recently used. A use of a block also counts for all blocks before it, which become more
        # recent than it, so the least recent block is a leaf.
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._lock = threading.RLock()  # another engine of this model may request pages that are kept here

    def join(
        self, number: int, cache: RequestCache, tokens: Sequence[int], scope: Hashable = None, prompt: int | None = None
    ) -> None:
        """Add a request that starts, or continues with a new cache, by a `number` until `leave`.

        The caller owns and extends `tokens`, its text, of which the first `prompt` (None: all) are read as a prompt.
        Requests share only within a `scope`.
        """
        self._members[number] = _Member(cache, tokens, scope, prompt)

    def text(self, number: int) -> Sequence[int]:
        return self._members[number].tokens

    def leave(self, number: int) -> None:
        self._members.pop(number, None)

    def leader(self, number: int, among: Iterable[int]) -> tuple[int, int] | None:
        """The request of `among` to wait for, of those computed before it, and the length of their common prefix."""
        own = self._members[number]
        best, most = None, own.cache.length + FEW
        for other in among if self.shares and own.last > most else ():  # waiting never pays for short texts
            member = self._members.get(other)
            if member is None or member.scope != own.scope or member is own:
                continue
            alike = member.cache.family.comes_by(min(_alike(own.tokens, member.tokens), own.last), member.last)
            if alike > most and member.cache.length < alike:
                best, most = (other, alike), alike
        return best

    def alike(self, number: int) -> list[int]:
        """Other requests that may hold more of this request's prefix than its own cache."""
        own = self._members[number]
        most = own.cache.length + FEW
        return [
            other
            for other, each in self._members.items()
            if each is not own and each.scope == own.scope and _alike(own.tokens, each.tokens) >= most
        ]

    def available(self, number: int, least: int = 0) -> int:
        with self._lock:
            return self._found(self._members[number], least)[0]

    @torch.inference_mode()
    def fill(self, number: int, least: int = 0, most: int | None = None) -> int:
        """Copy what others hold of a request's text into its cache, except the last token; returns how many.

        Nothing is copied if fewer than `least` are available, nor beyond `most` tokens in the cache.
        """
        with self._lock:
            own = self._members[number]
            before, family = own.cache.length, own.cache.family
            length, donor, blocks = self._found(own, least, most)
            if blocks:
                own.cache.extend(_parts(blocks, before, length))
                states = blocks[-1].states
            elif donor is not None:
                own.cache.extend([(donor.cache.part(before, length, lasting=False), 0, length - before)])
                states = donor.cache.family.carried.at(length) if family.carries else None
                family.begin_as(donor.cache.family)
            else:
                return 0
            if states is not None:
                family.carried.take(own.cache.length, states)
            self.copied += own.cache.length - before
            return own.cache.length - before

    def _found(self, own: _Member, least: int, most: int | None = None) -> tuple[int, _Member | None, list[_Block]]:
        """How many tokens a cache can hold, and the request or the blocks to copy the missing ones from."""
        before, last = own.cache.length, own.last if most is None else min(own.last, most)
        least = max(before + FEW, least)
        if not self.shares or last < least or (own.cache.family.encodes and before):
            return before, None, []
        donor, alike = None, least - 1
        for each in self._members.values():
            if each is not own and each.scope == own.scope:
                shared = each.cache.shared(min(_alike(own.tokens, each.tokens), last))
                if shared > alike:
                    donor, alike = each, shared
        blocks = self._known(own, last) if self._blocks else []
        kept = min(len(blocks) * BLOCK, last)
        if kept > alike:
            return kept, None, blocks
        return (before, None, []) if donor is None else (alike, donor, [])

    def _known(self, own: _Member, last: int) -> list[_Block]:
        found: list[_Block] = []
        block = self._roots.get(own.scope)
        while block is not None and (block := block.following.get(_tokens(own, len(found) * BLOCK))) is not None:
            found.append(block)
        if own.cache.family.carries:
            while found and (found[-1].states is None or len(found) * BLOCK > last):
                found.pop()
        self._use(found)
        return found

    def _use(self, blocks: Sequence[_Block]) -> None:
        for block in reversed(blocks):
            self._blocks.move_to_end(id(block))

    @torch.inference_mode()
    def keep(self, number: int) -> None:
        with self._lock:
            own = self._members.get(number)
            if own is not None and self.most_bytes > 0:
                self._keep(own)
        self.trim(self.most_bytes)

    def _keep(self, own: _Member) -> None:
        carried, length = own.cache.family.carried, own.cache.family.kept(own.cache.length)
        if length < BLOCK:
            return
        block = self._roots.setdefault(own.scope, _Block(None, (), Entries([]), scope=own.scope))
        path: list[_Block] = []
        for first in range(0, length - BLOCK + 1, BLOCK):
            tokens = _tokens(own, first)
            following = block.following.get(tokens)
            if following is None and not own.cache.holds(first, first + BLOCK):
                break
            if following is None:
                copies = own.cache.part(first, first + BLOCK, lasting=True)
                following = block.following[tokens] = _Block(block, tokens, copies)
                self._blocks[id(following)] = following
                self.n_bytes += following.n_bytes
            if following.states is None and first + BLOCK in carried.edges:
                following.states = carried.at(first + BLOCK)
                self.n_bytes += bytes_of(following.states)
            block = following
            path.append(block)
        self._use(path)

    def trim(self, most_bytes: int) -> None:
        while self.n_bytes > most_bytes and self.forget_oldest():
            pass

    def forget_oldest(self) -> bool:
        """Drop the least recently used block, unless another thread holds the lock; returns whether one was dropped."""
        if not self._blocks or not self._lock.acquire(blocking=False):
            return False
        try:
            _, block = self._blocks.popitem(last=False)
            self.n_bytes -= block.n_bytes
            if block.before is not None:
                del block.before.following[block.tokens]
                if block.before.before is None and not block.before.following:
                    del self._roots[block.before.scope]
            return True
        finally:
            self._lock.release()


def _tokens(own: _Member, first: int) -> tuple[int, ...]:
    return tuple(own.tokens[first : first + BLOCK])


def _parts(blocks: Sequence[_Block], first: int, end: int) -> list[tuple[Entries, int, int]]:
    """Positions `first` to `end` as parts of the blocks of a text's prefix.

    Worked example: of blocks at 0 and 64, positions 10 to 100 are 10 to 63 of the first and 0 to 35 of the second.
    """
    parts = []
    for number in range(first // BLOCK, -(-end // BLOCK)):
        start = number * BLOCK
        parts.append((blocks[number].entries, max(first - start, 0), min(end - start, BLOCK)))
    return parts


def _alike(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the common prefix of two texts."""
    if left[:1] != right[:1]:
        return 0
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
