"""States that layers carry from token to token: behind a request's committed tokens, and behind each uncommitted one.

A recurrence or a short convolution has no entries that a commit could move: its state behind a token is all that it
knows of those before. So a forward leaves the state behind every token that it wrote, and a commit keeps that of the
last one that stays. Requests that begin alike share by what is marked at the *edges* of a prompt: behind each of its
pieces, which end at fixed places, and before its last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from truedraft.core.inference import in_inference_mode
from truedraft.errors import CacheError

PIECE = 256
"""Tokens at whose multiples a piece of a prompt ends, beside where the prompt does."""
MOST_EDGES = 8
"""States that are marked for one request, the last of all and others at about the same distance."""


@dataclass(frozen=True, slots=True)
class StateRow:
    """The state of one layer behind one token: a row of what a forward computed for several.

    Attributes:
        states: by name, `[tokens, ...]` each.
        row: of them.
    """

    states: Mapping[str, Tensor]
    row: int

    def alone(self) -> StateRow:
        """A copy that keeps nothing else in memory."""
        own = slice(self.row, self.row + 1)
        return StateRow({name: state[own].clone() for name, state in self.states.items()}, 0)


class CarriedStates:
    """Of one request, by layer in the order of the forward; none for a model whose layers are attention alone."""

    def __init__(self) -> None:
        self._committed: dict[int, StateRow] = {}
        self._nodes: dict[int, list[StateRow | None]] = {}
        self._edges: dict[int, dict[int, StateRow]] = {}  # by the number of tokens behind which they are, and by layer
        self._passed: dict[int, dict[int, StateRow]] = {}  # likewise, of tokens that were not committed yet

    @property
    def n_bytes(self) -> int:
        """Bytes of the states behind committed tokens."""
        return sum(map(bytes_of, (self._committed, *self._edges.values())))

    @property
    def edges(self) -> list[int]:
        """Behind how many tokens states are marked, rising."""
        return sorted(self._edges)

    def at(self, tokens: int) -> Mapping[int, StateRow]:
        """The states of all layers at an edge."""
        return self._edges[tokens]

    def behind(self, layer: int, node: int) -> StateRow | None:
        """The state behind an uncommitted token; -1 is the last committed one. None before the first token of all.

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
        """The states behind new tokens, None where a forward passed one by without leaving any.

        Args:
            layer: whose they are.
            rows: one for each new token.
            written: uncommitted tokens before these, of earlier forwards.
        """
        self._nodes[layer] = [*self._nodes.get(layer, [])[:written], *rows]

    def mark(self, layer: int, tokens: int, row: StateRow) -> None:
        """An edge, behind so many tokens; it counts once these are committed."""
        self._passed.setdefault(tokens, {})[layer] = row.alone()

    def take(self, tokens: int, states: Mapping[int, StateRow]) -> None:
        """Go on from what another request marked behind the same tokens."""
        self.clear()
        self._committed = dict(states)
        self._edges[tokens] = dict(states)

    @in_inference_mode
    def keep(self, path: Sequence[int]) -> None:
        """Commit the uncommitted tokens of a path; of all others nothing stays."""
        if path:
            for layer in self._nodes:
                kept = self.behind(layer, path[-1])
                assert kept is not None
                self._committed[layer] = kept.alone()
            self._edges |= self._passed
            if len(self._edges) > MOST_EDGES:
                for tokens in self.edges[-2::-2]:  # every other one, and never the last
                    del self._edges[tokens]
        self.drop_uncommitted()

    def clear(self) -> None:
        """Forget all."""
        self._committed = {}
        self._edges = {}
        self.drop_uncommitted()

    def drop_uncommitted(self) -> None:
        """Forget what is behind uncommitted tokens."""
        self._nodes.clear()
        self._passed.clear()

    def back_to(self, tokens: int) -> int:
        """Go back to the last edge behind no more than so many tokens; returns behind how many, or 0."""
        found = max((edge for edge in self._edges if edge <= tokens), default=0)
        if not found:
            self.clear()
            return 0
        self._edges = {edge: states for edge, states in self._edges.items() if edge <= found}
        self._committed = dict(self._edges[found])
        self.drop_uncommitted()
        return found

    def entries(self) -> list[dict[str, Tensor]]:
        """The states behind the last committed token, by layer; for tests and checks."""
        return [dict(self._committed[layer].alone().states) for layer in sorted(self._committed)]


def bytes_of(states: Mapping[int, StateRow]) -> int:
    """Bytes of the states of some layers."""
    return sum(state.nbytes for each in states.values() for state in each.states.values())
