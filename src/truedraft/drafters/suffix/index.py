"""Earlier occurrences of a text's ending in many stored texts: a ring buffer of tokens, with hash chains of n-grams.

Every stored token ends an n-gram of each of two lengths. Positions with n-grams of one hash form a chain, the latest
first. A lookup compares the tokens before the latest few with the ending: the longest match counts. Old tokens are
overwritten; a chain ends there. An entry takes its token (4 bytes), two links (16) and tables (8).

Hash chains as in LZ77 coders replace the suffix tree of SuffixDecoding (2411.04975), with the same matches as long as
no ending occurred more often than a chain is followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int32]
Places: TypeAlias = NDArray[np.int64]

END = -1
"""Separator between two texts; no ending matches across it."""
LENGTHS = (8, 2)
"""Lengths of the chained n-grams: if the longer one occurred, only its positions are compared."""
WINDOW = 32
"""Maximum length of a match."""
WALKED = 32
"""Maximum number of compared positions per chain, the latest ones."""
_LEAST = 256
_PRIME = 0x9E3779B97F4A7C15
_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """Positions where an ending occurred before, the longest matches first, then the latest.

    Attributes:
        lengths: `[matches]`: number of tokens before each position that equal the end of the text, at most `WINDOW`.
        following: `[matches, depth]`: the tokens that followed; `END` after the end of a text.
    """

    lengths: list[int]
    following: list[list[int]]


NO_MATCHES = Matches([], [])


class SuffixIndex:
    """Stored tokens, of which the latest `most`, rounded down to a power of two, are kept.

    Worked example: in 5 6 7 5 6 8 the ending 5 6 occurred before the positions 2 and 5; the latest is 5, followed by 8.
    """

    def __init__(self, most: int) -> None:
        self.most = 1 << max(most, _LEAST).bit_length() - 1
        self.written = 0  # tokens so far; positions count from the first that was ever stored
        self._open = 0  # tokens of the unfinished text, up to the longest n-gram
        self._allocate(_LEAST)

    def _allocate(self, size: int) -> None:
        self.size = size
        self._tokens: Ids = np.full(size, END, dtype=np.int32)
        self._before: list[Places] = [np.full(size, -1, dtype=np.int64) for _ in LENGTHS]
        self._heads: list[Places] = [np.full(size // 2, -1, dtype=np.int64) for _ in LENGTHS]

    @property
    def n_bytes(self) -> int:
        return self._tokens.nbytes + sum(each.nbytes for each in (*self._before, *self._heads))

    @property
    def first(self) -> int:
        return max(self.written - self.size, 0)

    def __len__(self) -> int:
        return self.written - self.first

    def add(self, tokens: Sequence[int] | Ids, *, ends: bool = False) -> None:
        """Store tokens after the last ones, as the same text unless that has ended; `ends`: the text ends here."""
        new = np.asarray(tokens, dtype=np.int32)
        if ends:
            new = np.append(new, np.int32(END))
        while len(new):
            if self.written + len(new) > self.size < self.most:
                self._grow(self.written + len(new))
            part, new = new[: self.size // 2], new[self.size // 2 :]
            self._add(part)

    def _grow(self, required: int) -> None:
        kept = self._tokens[np.arange(self.first, self.written) & (self.size - 1)]
        size = self.size
        while size < min(required, self.most):
            size *= 2
        self.written = self._open = 0
        self._allocate(size)
        for start in range(0, len(kept), size // 2):
            self._add(kept[start : start + size // 2])

    def _add(self, new: Ids) -> None:
        begin, mask = self.written, self.size - 1
        places = np.arange(begin, begin + len(new))
        self._tokens[places & mask] = new
        self.written += len(new)
        longest = LENGTHS[0]
        known = min(self._open, longest - 1)
        text = np.concatenate([self._tokens[np.arange(begin - known, begin) & mask], new])
        # Number of tokens of its text up to each position of `text`, inclusive.
        numbers = np.arange(1, len(text) + 1)
        since = numbers - np.maximum.accumulate(np.where(text == END, numbers, 0))
        self._open = min(int(since[-1]), longest)
        for which, length in enumerate(LENGTHS):
            self._chain(which, places, _hashes(text, length)[known:], since[known:] >= length)

    def _chain(self, which: int, places: Places, hashes: NDArray[np.uint64], whole: NDArray[np.bool_]) -> None:
        """Put positions at the heads of their hashes' chains, except those that end no n-gram (not `whole`).

        Worked example: positions 4, 5, 6 with the hashes a b a: 6 links to 4, which links to the previous head of a.
        """
        mask, heads, before = self.size - 1, self._heads[which], self._before[which]
        before[places & mask] = -1
        places, slots = places[whole], self._slots(hashes[whole])
        order = np.argsort(slots, kind="stable")
        places, slots = places[order], slots[order]
        again = np.zeros(len(slots), dtype=bool)  # another one of its slot comes before it
        again[1:] = slots[1:] == slots[:-1]
        leads = heads[slots]
        leads[1:][again[1:]] = places[:-1][again[1:]]
        before[places & mask] = leads
        last = np.append(~again[1:], True) if len(slots) else again
        heads[slots[last]] = places[last]

    def find(self, tokens: Sequence[int], depth: int) -> Matches:
        """Where the ending of a text occurred, and what followed; the text's last `WINDOW` tokens are enough."""
        ending = tokens[-WINDOW:]
        for which, length in enumerate(LENGTHS):
            if len(ending) < length:
                continue
            places = self._walk(which, hash_of(ending[-length:]) >> self._shift)
            found = self._compared(places, np.array(ending, np.int32), length, depth) if places else NO_MATCHES
            if found.lengths:
                return found
        return NO_MATCHES

    def _slots(self, hashes: NDArray[np.uint64]) -> Places:
        slots: Places = (hashes >> np.uint64(self._shift)).astype(np.int64)
        return slots

    @property
    def _shift(self) -> int:
        return 64 - (self.size // 2 - 1).bit_length()

    def _walk(self, which: int, slot: int) -> list[int]:
        before, mask, first = self._before[which], self.size - 1, self.first
        places: list[int] = []
        place = int(self._heads[which][slot])
        while place >= first and len(places) < WALKED:
            places.append(place)
            place = int(before[place & mask])
        return places

    def _compared(self, places: list[int], ending: Ids, least: int, depth: int) -> Matches:
        last, mask = np.array(places)[:, None], self.size - 1
        back = last - _STEPS[: len(ending)]
        alike = (self._tokens[back & mask] == ending[::-1]) & (back >= self.first)
        lengths = np.where(alike.all(axis=1), len(ending), alike.argmin(axis=1))
        ahead = last + 1 + _STEPS[:depth]
        following = np.where(ahead < self.written, self._tokens[ahead & mask], END)
        fits = (lengths >= least) & (following[:, 0] != END)
        order = np.argsort(-lengths, kind="stable")
        order = order[fits[order]]
        return Matches(lengths[order].tolist(), following[order].tolist())


_STEPS = np.arange(1024)


def hash_of(ngram: Sequence[int]) -> int:
    """The last value of `_hashes`, ten times as fast."""
    found = 0
    for token in reversed(ngram):
        found = (found + token + 1) * _PRIME & _BITS ^ found >> 29
    return found * _PRIME & _BITS


def _hashes(tokens: Ids, length: int) -> NDArray[np.uint64]:
    """Hash of the n-gram that ends at each position; the first ones are of incomplete n-grams."""
    found = np.zeros(len(tokens), dtype=np.uint64)
    ids = tokens.astype(np.uint64)
    for back in range(min(length, len(ids))):
        found[back:] = (found[back:] + ids[: len(ids) - back] + np.uint64(1)) * np.uint64(_PRIME) ^ (
            found[back:] >> np.uint64(29)
        )
    return found * np.uint64(_PRIME)
