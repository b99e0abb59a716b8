"""Expected tokens by the number of drafted nodes, from a few measured numbers of them."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from truedraft.errors import OptionError
from truedraft.theory.arguments import check_whole


@dataclass(frozen=True, slots=True)
class NodeCurve:
    """Tokens per target call by nodes: rising, by less and less; linear between points, level behind the last.

    Attributes:
        nodes: of the points, from 0 up.
        tokens: tokens emitted per target call, 1 at 0 nodes.

    Raises:
        OptionError: points that are no such curve.
    """

    nodes: tuple[int, ...]
    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse what is no such curve."""
        slopes = self._slopes() if len(self.nodes) == len(self.tokens) and self.nodes else (-1.0,)
        if self.nodes[:1] != (0,) or self.tokens[:1] != (1.0,) or any(not 0.0 <= slope <= 1.0 for slope in slopes):
            raise OptionError(f"a curve of tokens by nodes starts at (0, 1) and rises, got {self.nodes}, {self.tokens}")
        if any(late > early + 1e-12 for early, late in itertools.pairwise(slopes)):
            raise OptionError(f"no node brings more than those before it, got {self.tokens} tokens by {self.nodes}")

    def _slopes(self) -> tuple[float, ...]:
        points = zip(self.nodes, self.tokens, strict=True)
        return tuple((b[1] - a[1]) / (b[0] - a[0]) if b[0] > a[0] else -1.0 for a, b in itertools.pairwise(points))

    @classmethod
    def fit(cls, points: Iterable[tuple[int, float]]) -> NodeCurve:
        """The lowest such curve that is nowhere below the measured (nodes, tokens) and (0, 1).

        Trees of the best nodes bring less with each node; measured ones scatter about that. They may bring less than 1
        token, for a step that only finds that an answer is over emits none; the curve does not see that.

        Worked example: 1.5, 1.6 and 1.9 tokens with 1, 2 and 3 nodes make a curve through 1.5, 1.7 and 1.9.

        Raises:
            OptionError: no whole number of nodes, fewer than 0 tokens, or more than one for each node and one beyond.
        """
        kept = [(0, 1.0)]
        for nodes, tokens in sorted(points):
            check_whole("nodes of a point", nodes, lowest=0)
            if not 0.0 <= tokens <= 1.0 + nodes + 1e-9:
                raise OptionError(f"{nodes} nodes bring 0 to {nodes + 1} tokens per target call, got {tokens!r}")
            if nodes == 0 or tokens <= kept[-1][1]:
                continue  # the curve does not fall
            while len(kept) > 1 and _is_below(kept[-1], kept[-2], (nodes, tokens)):
                kept.pop()
            kept.append((nodes, min(tokens, 1.0 + nodes)))
        return cls(tuple(nodes for nodes, _ in kept), tuple(tokens for _, tokens in kept))

    def __call__(self, nodes: int) -> float:
        """Tokens per target call with so many nodes."""
        check_whole("nodes", nodes, lowest=0)
        right = bisect_left(self.nodes, nodes)
        if right == len(self.nodes):
            return self.tokens[-1]
        if self.nodes[right] == nodes:
            return self.tokens[right]
        share = (nodes - self.nodes[right - 1]) / (self.nodes[right] - self.nodes[right - 1])
        return self.tokens[right - 1] + share * (self.tokens[right] - self.tokens[right - 1])

    @property
    def gains(self) -> tuple[float, ...]:
        """What each node brings, the first one first, up to the last point: fractions of a token, not rising."""
        found = []
        for (left, right), slope in zip(itertools.pairwise(self.nodes), self._slopes(), strict=True):
            found += [slope] * (right - left)
        return tuple(found)


def _is_below(middle: tuple[int, float], left: tuple[int, float], right: tuple[int, float]) -> bool:
    """Whether a point lies on or below the line between two others."""
    return (middle[1] - left[1]) * (right[0] - left[0]) <= (right[1] - left[1]) * (middle[0] - left[0])
