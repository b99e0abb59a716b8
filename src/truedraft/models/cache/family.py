"""What families of models hold of a text beside keys and values, and what follows for requests that begin alike.

Most hold nothing: a row depends on the tokens before it alone, and any part of a text can be gone on from. Where layers
carry states only those behind the edges of prompts are there to go on from. Of an encoder's text every entry depends on
all of it. Prompts with images may number their tokens otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from truedraft.models.cache.carried import PIECE, CarriedStates

BLOCK = 64
"""Tokens of a block that is kept for requests to come."""


class Beside(Protocol):
    """What a model holds of one text in a form of its own."""

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes."""
        ...


@dataclass(slots=True, eq=False)
class FamilyState:
    """Of one request's cache.

    Attributes:
        carries: whether layers of the model carry states beside.
        encodes: whether the first tokens are an encoder's text, whose entries are what cross-attention reads.
        carried: states of layers that are no attention.
        source: ids of the encoder's text, as far as they came in.
        memory: how many of the first tokens are that text; 0 until it was encoded.
        shift: what is added to the position of every token behind the prompt, whose images take fewer positions than
            tokens where positions have more than one axis.
        apart: whether the last token of its prompt was read otherwise than it would be behind those before, as one of a
            text; then nobody can begin with these.
        beside: what a model holds of the text that cannot lie in a cache of ours.
    """

    carries: bool = False
    encodes: bool = False
    carried: CarriedStates = field(default_factory=CarriedStates)
    source: list[int] = field(default_factory=list)
    memory: int = 0
    shift: int = 0
    apart: bool = False
    beside: Beside | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes that all of this takes."""
        return self.carried.n_bytes + (self.beside.n_bytes if self.beside is not None else 0)

    def back_to(self, length: int, before: int) -> int:
        """Forget what is behind the first `length` of `before` committed tokens, and behind uncommitted ones.

        Returns:
            How many tokens stay: fewer where layers carry states, whose last edge before `length` is gone back to.
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
        """Of the first tokens, of which so many were read, how many another text can begin with and go on from."""
        if self.apart:
            return 0
        if self.encodes:
            return tokens if tokens >= self.memory > 0 else 0
        return max((edge for edge in self.carried.edges if edge <= tokens), default=0) if self.carries else tokens

    def comes_by(self, tokens: int, last: int) -> int:
        """How many of the first tokens, at most so many, another may begin with once this one has read up to `last`."""
        if tokens >= last:
            return last
        if self.encodes:
            return 0
        return tokens // PIECE * PIECE if self.carries else tokens

    def last(self, tokens: int, prompt: int | None) -> int:
        """Where the last of so many tokens lies that is computed in any case.

        Where layers carry states that is the prompt's: behind it the same tokens have other bits, read one by one.
        """
        return (prompt if self.carries and prompt is not None else tokens) - 1

    def kept(self, length: int) -> int:
        """How many of so many committed tokens can be kept for requests to come."""
        if self.encodes:
            return 0
        return max((edge for edge in self.carried.edges if edge % BLOCK == 0), default=0) if self.carries else length

    def begin_as(self, other: FamilyState) -> None:
        """Take over what another text's first tokens brought, but for states."""
        self.memory, self.source, self.shift = other.memory, list(other.source), other.shift
