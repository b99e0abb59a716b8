"""What a model family stores for a text in addition to keys and values, and how much of it another request can share.

Most families store nothing: a row depends on the tokens before it only, so a request can continue from any prefix.
Layers that carry states can be continued only from the edges of prompts. Every entry of an encoder's text depends on
all of it. Prompts with images may have other position numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from truedraft.models.cache.carried import PIECE, CarriedStates

BLOCK = 64
"""Tokens in a block that is kept for later requests."""


class AuxiliaryState(Protocol):
    """What a model stores of one text in a format of its own."""

    @property
    def n_bytes(self) -> int:
        """Its size in bytes."""
        ...


@dataclass(slots=True, eq=False)
class FamilyState:
    """What a model family stores in one request's cache.

    Attributes:
        carries: whether layers of the model carry states.
        encodes: whether the first tokens are an encoder's text; cross-attention reads its entries.
        source: ids of the encoder's text received so far.
        memory: number of first tokens that are that text; 0 until it is encoded.
        shift: added to the position of every token after the prompt, where images take fewer positions than tokens.
        apart: whether the last prompt token was computed otherwise than after the previous ones, as part of a text;
            then no request can share this prefix.
        beside: what a model stores of the text outside our cache.
    """

    carries: bool = False
    encodes: bool = False
    carried: CarriedStates = field(default_factory=CarriedStates)
    source: list[int] = field(default_factory=list)
    memory: int = 0
    shift: int = 0
    apart: bool = False
    beside: AuxiliaryState | None = None

    @property
    def n_bytes(self) -> int:
        return self.carried.n_bytes + (self.beside.n_bytes if self.beside is not None else 0)

    def back_to(self, length: int, before: int) -> int:
        """Drop everything after the first `length` of `before` committed tokens, and after uncommitted ones.

        Returns how many tokens stay: where layers carry states, those up to the last edge not after `length`.
        """
        self.carried.drop_uncommitted()
        if self.carries and length < before:
            length = self.carried.back_to(length)
        if length < self.memory:
            self.memory = 0
        if not length:
            self.shift, self.apart, self.beside = 0, False, None
        return length

    def shared(self, tokens: int) -> int:
        """How many of the first `tokens` tokens, all read, another request can take over and continue from."""
        if self.apart:
            return 0
        if self.encodes:
            return tokens if tokens >= self.memory > 0 else 0
        return max((edge for edge in self.carried.edges if edge <= tokens), default=0) if self.carries else tokens

    def comes_by(self, tokens: int, last: int) -> int:
        """How many of the first `tokens` tokens another request can share once this one has read up to `last`."""
        if tokens >= last:
            return last
        if self.encodes:
            return 0
        return tokens // PIECE * PIECE if self.carries else tokens

    def last(self, tokens: int, prompt: int | None) -> int:
        """Index of the last of `tokens` tokens that is always computed. Where layers carry states, it is that of the
        prompt: after it the same tokens have other bits, because they are read one by one."""
        return (prompt if self.carries and prompt is not None else tokens) - 1

    def kept(self, length: int) -> int:
        """How many of `length` committed tokens can be kept for later requests."""
        if self.encodes:
            return 0
        return max((edge for edge in self.carried.edges if edge % BLOCK == 0), default=0) if self.carries else length

    def begin_as(self, other: FamilyState) -> None:
        """Take over what another text's first tokens set, except states."""
        self.memory, self.source, self.shift = other.memory, list(other.source), other.shift
