"""States that recurrent layers carry from token to token: after the committed tokens and each uncommitted one.

A recurrence or a short convolution has no entries that a commit could move: its state summarises all tokens before. So
a forward keeps the state after every token it wrote, and a commit keeps the state after the last accepted token.
Requests with a common prefix share the states that are marked at the *edges* of a prompt: after each of its pieces,
which end at fixed positions, and before its last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from truedraft.core.inference import in_inference_mode
from truedraft.errors import CacheError

PIECE = 256
"""Pieces of a prompt end at multiples of this many tokens, and at the end of the prompt."""
MOST_EDGES = 8
"""Largest number of states marked for one request: the last, and others at about equal distances."""


@dataclass(frozen=True, slots=True)
class StateRow:
    """The state of one layer after one token: row `row` of `states`, `[tokens, ...]` by name."""

    states: Mapping[str, Tensor]
    row: int

    def alone(self) -> StateRow:
        """A copy that does not keep the other rows in memory."""
        own = slice(self.row, self.row + 1)
        return StateRow({name: state[own].clone() for name, state in self.states.items()}, 0)


class CarriedStates:
    """The states of one request by layer, in the order of the forward; empty for a model with attention layers only."""

    def __init__(self) -> None:
        self._committed: dict[int, StateRow] = {}
        self._nodes: dict[int, list[StateRow | None]] = {}
        self._edges: dict[int, dict[int, StateRow]] = {}  # by the number of tokens before it, then by layer
        self._passed: dict[int, dict[int, StateRow]] = {}  # the same for edges after uncommitted tokens

    @property
    def n_bytes(self) -> int:
        """Bytes of the states after committed tokens."""
        return sum(map(bytes_of, (self._committed, *self._edges.values())))

    @property
    def edges(self) -> list[int]:
        """Numbers of tokens after which states are marked, ascending."""
        return sorted(self._edges)

    def at(self, tokens: int) -> Mapping[int, StateRow]:
        return self._edges[tokens]

    def behind(self, layer: int, node: int) -> StateRow | None:
        """The state after an uncommitted token, or after the last committed one (-1); None before the first token.

        Raises:
            CacheError: no forward left a state there.
        """
        if node < 0:
            return self._committed.get(layer)
        known = self._nodes.get(layer, [])
        found = known[node] if node < len(known) else None
        if found is None:
            raise CacheError(f"layer {layer} left no state behind uncommitted token {node}")
        return found

    def note(self, layer: int, rows: Sequence[StateRow | None], written: int) -> None:
        """Store the states after new tokens, None where a forward left none; those of `written` earlier tokens stay."""
        self._nodes[layer] = [*self._nodes.get(layer, [])[:written], *rows]

    def mark(self, layer: int, tokens: int, row: StateRow) -> None:
        """Mark an edge after so many tokens; it is valid once these are committed."""
        self._passed.setdefault(tokens, {})[layer] = row.alone()

    def take(self, tokens: int, states: Mapping[int, StateRow]) -> None:
        """Continue from the states that another request marked after the same tokens."""
        self.clear()
        self._committed = dict(states)
        self._edges[tokens] = dict(states)

    @in_inference_mode
    def keep(self, path: Sequence[int]) -> None:
        """Commit the uncommitted tokens of a path and drop all others."""
        if path:
            for layer in self._nodes:
                kept = self.behind(layer, path[-1])
                assert kept is not None
                self._committed[layer] = kept.alone()
            self._edges |= self._passed
            if len(self._edges) > MOST_EDGES:
                for tokens in self.edges[-2::-2]:  # every second one, but never the last
                    del self._edges[tokens]
        self.drop_uncommitted()

    def clear(self) -> None:
        self._committed = {}
        self._edges = {}
        self.drop_uncommitted()

    def drop_uncommitted(self) -> None:
        """Drop the states after uncommitted tokens."""
        self._nodes.clear()
        self._passed.clear()

    def back_to(self, tokens: int) -> int:
        """Go back to the last edge after at most so many tokens; returns its number of tokens, or 0."""
        found = max((edge for edge in self._edges if edge <= tokens), default=0)
        if not found:
            self.clear()
            return 0
        self._edges = {edge: states for edge, states in self._edges.items() if edge <= found}
        self._committed = dict(self._edges[found])
        self.drop_uncommitted()
        return found

    def entries(self) -> list[dict[str, Tensor]]:
        """The states after the last committed token, by layer; for tests and checks."""
        return [dict(self._committed[layer].alone().states) for layer in sorted(self._committed)]


def bytes_of(states: Mapping[int, StateRow]) -> int:
    """Bytes of the states of some layers."""
    return sum(state.nbytes for each in states.values() for state in each.states.values())
