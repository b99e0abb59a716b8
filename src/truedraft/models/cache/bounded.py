"""Bounded contexts: of a long text a cache keeps the first tokens and the last ones, as in StreamingLLM (2309.17453).

Tokens keep their positions, and keys their rotation. What a token sees depends on its position only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from truedraft.errors import OptionError
from truedraft.models.cache.family import BLOCK
from truedraft.options import check_whole

FIRST = 16
"""Tokens of a text that are always kept: a page of `truedraft.models.cache.pages`."""
LEAST_CONTEXT = 128


@dataclass(frozen=True, slots=True)
class BoundedContext:
    """At most `size` tokens of a text, drafted ones aside; the last ones are dropped `step` at a time.

    Raises `OptionError` for a size below 128.

    Worked example: of a size of 128 the token at position 127 sees all 128 tokens up to itself. Those at 128 to 191 do
    not see 16 to 79, and see 65 to 128 tokens.
    """

    size: int

    def __post_init__(self) -> None:
        check_whole("context", self.size, LEAST_CONTEXT)

    @property
    def step(self) -> int:
        return max(BLOCK, self.size // 4 // BLOCK * BLOCK)

    def dropped(self, position: int) -> int:
        """How many tokens, from `FIRST` on, the token at a position does not see."""
        return max(0, -(-(position + 1 - self.size) // self.step)) * self.step

    def alike(self, position: int) -> int:
        """How many tokens, from the one at a position on, see the same first one after those that are dropped."""
        return self.size + self.dropped(position) - position


def bounded(context: int | None, *, drops: bool, name: str) -> BoundedContext | None:
    """The bound that an option `context` sets; raises `OptionError` if it is too small or the caches cannot drop."""
    if context is None:
        return None
    if not drops:
        raise OptionError(
            f"is for caches of attention layers that run packed, and those of {name} cannot drop tokens; leave it out",
            field="context",
        )
    return BoundedContext(context)


def stored_place(place: int, dropped: int) -> int:
    """The place among stored keys of the first one at or after a position.

    >>> [stored_place(position, 64) for position in (5, 16, 79, 80, 90)]
    [5, 16, 16, 16, 26]
    """
    return max(min(place, FIRST), place - dropped)


Parts = Sequence[tuple[Any, int, int]]


def without(parts: Parts, first: int, count: int) -> Iterator[tuple[Any, int, int]]:
    """Parts with their first and end token, without `count` tokens after the first `first` of them.

    >>> list(without([("a", 0, 10), ("b", 3, 9)], 8, 4))
    [('a', 0, 8), ('b', 5, 9)]
    """
    for part, start, end in parts:
        before = min(first, end - start)
        skipped = min(count, end - start - before)
        if before:
            yield part, start, start + before
        if start + before + skipped < end:
            yield part, start + before + skipped, end
        first, count = first - before, count - skipped
