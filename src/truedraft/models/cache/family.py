"""What a model family stores for a text in addition to keys and values, and how much of it another request can share.

Most families store nothing: a request can continue from any prefix. Every entry of an encoder's text depends on all of
it. Recurrences and short convolutions carry a state with no entries that a commit could move. So a forward keeps the
state after every token it wrote, and a commit keeps that after the last accepted token. Requests with a common prefix
share the states at the *edges* of a prompt: after each of its pieces, which end at fixed positions, and before its last
token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from truedraft.core.inference import in_inference_mode
from truedraft.errors import CacheError

BLOCK = 64
"""Tokens in a block that is kept for later requests."""
PIECE = 256
"""Pieces of a prompt end at multiples of this many tokens, and at the end of the prompt."""
MOST_EDGES = 8
"""Largest number of states marked for one request: the last, and others at about equal distances."""


@dataclass(frozen=True, slots=True)
class StateRow:
    """The state of one layer after one token: row `row` of `states`, `[tokens, ...]` by name."""

    states: Mapping[str, Tensor]
    row: int

    def copied(self) -> StateRow:
        own = slice(self.row, self.row + 1)
        return StateRow({name: state[own].clone() for name, state in self.states.items()}, 0)


def bytes_of(states: Mapping[int, StateRow]) -> int:
    """Bytes of the states of some layers."""
    return sum(state.nbytes for each in states.values() for state in each.states.values())


class CarriedStates:
    """The states of one request by layer, in the order of the forward; empty for a model with attention layers only."""

    def __init__(self) -> None:
        self._committed: dict[int, StateRow] = {}
        self._nodes: dict[int, list[StateRow | None]] = {}
        self._edges: dict[int, dict[int, StateRow]] = {}  # by the number of tokens before it, then by layer
        self._passed: dict[int, dict[int, StateRow]] = {}  # the same for edges after uncommitted tokens

    @property
    def n_bytes(self) -> int:
        return sum(map(bytes_of, (self._committed, *self._edges.values())))

    @property
    def edges(self) -> list[int]:
        return sorted(self._edges)

    def last_edge(self, tokens: int) -> int:
        return max((edge for edge in self._edges if edge <= tokens), default=0)

    def at(self, tokens: int) -> Mapping[int, StateRow]:
        return self._edges[tokens]

    def after(self, layer: int, node: int) -> StateRow | None:
        """The state after an uncommitted token, or the last committed one (-1); None at the start. Or CacheError."""
        if node < 0:
            return self._committed.get(layer)
        known = self._nodes.get(layer, [])
        found = known[node] if node < len(known) else None
        if found is None:
            raise CacheError(f"layer {layer} left no state after uncommitted token {node}")
        return found

    def note(self, layer: int, rows: Sequence[StateRow | None], written: int) -> None:
        """Store the states after new tokens, None where a forward left none; those of `written` earlier tokens stay."""
        self._nodes[layer] = [*self._nodes.get(layer, [])[:written], *rows]

    def mark(self, layer: int, tokens: int, row: StateRow) -> None:
        """Mark an edge after so many tokens; it is valid once these are committed."""
        self._passed.setdefault(tokens, {})[layer] = row.copied()

    def take(self, tokens: int, states: Mapping[int, StateRow]) -> None:
        self.drop_uncommitted()
        self._committed, self._edges = dict(states), {tokens: dict(states)}

    @in_inference_mode
    def keep(self, path: Sequence[int]) -> None:
        if path:
            for layer in self._nodes:
                kept = self.after(layer, path[-1])
                assert kept is not None
                self._committed[layer] = kept.copied()
            self._edges |= self._passed
            if len(self._edges) > MOST_EDGES:
                for tokens in self.edges[-2::-2]:  # every second one, but never the last
                    del self._edges[tokens]
        self.drop_uncommitted()

    def drop_uncommitted(self) -> None:
        self._nodes.clear()
        self._passed.clear()

    def back_to(self, tokens: int) -> int:
        found = self.last_edge(tokens)
        self._edges = {edge: states for edge, states in self._edges.items() if edge <= found}
        self._committed = dict(self._edges.get(found, {}))
        self.drop_uncommitted()
        return found

    def entries(self) -> list[dict[str, Tensor]]:
        return [dict(self._committed[layer].copied().states) for layer in sorted(self._committed)]


@dataclass(slots=True, eq=False)
class FamilyState:
    """What a model family stores in one request's cache."""

    carries: bool = False  # layers carry states
    encodes: bool = False  # the first tokens are an encoder's text; cross-attention reads its entries
    carried: CarriedStates = field(default_factory=CarriedStates)
    source: list[int] = field(default_factory=list)  # ids of the encoder's text received so far
    memory: int = 0  # tokens of that text; 0 until it is encoded
    shift: int = 0  # added to positions after the prompt, where images take fewer positions than tokens
    unshareable: bool = False  # the last prompt token was computed as part of a text, so nobody can share it
    auxiliary: Any = None  # what a model stores in a format of its own, with its `n_bytes`

    @property
    def n_bytes(self) -> int:
        return self.carried.n_bytes + (self.auxiliary.n_bytes if self.auxiliary is not None else 0)

    def back_to(self, length: int, before: int) -> int:
        """Keep the first `length` of `before` committed tokens, with states up to an edge; returns how many stay."""
        self.carried.drop_uncommitted()
        if self.carries and length < before:
            length = self.carried.back_to(length)
        if length < self.memory:
            self.memory = 0
        if not length:
            self.shift, self.unshareable, self.auxiliary = 0, False, None
        return length

    def shared(self, tokens: int) -> int:
        """How many of the first `tokens` tokens, all read, another request can take over and continue from."""
        if self.unshareable:
            return 0
        if self.encodes:
            return tokens if tokens >= self.memory > 0 else 0
        return self.carried.last_edge(tokens) if self.carries else tokens

    def comes_by(self, tokens: int, last: int) -> int:
        """How many of the first `tokens` tokens another request can share once this one has read up to `last`."""
        if tokens >= last:
            return last
        if self.encodes:
            return 0
        return tokens // PIECE * PIECE if self.carries else tokens

    def last(self, tokens: int, prompt: int | None) -> int:
        """Index of the last token always computed; with states the prompt's, because later ones get other bits."""
        return (prompt if self.carries and prompt is not None else tokens) - 1

    def kept(self, length: int) -> int:
        if self.encodes:
            return 0
        return max((edge for edge in self.carried.edges if edge % BLOCK == 0), default=0) if self.carries else length

    def begin_as(self, other: FamilyState) -> None:
        self.memory, self.source, self.shift = other.memory, list(other.source), other.shift
