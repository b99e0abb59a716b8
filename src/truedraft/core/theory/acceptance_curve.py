"""The best number of nodes: the gain of each further node of a drafter's trees against its cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from truedraft.core.theory.chains import predicted_speedup
from truedraft.errors import OptionError
from truedraft.options import check_share, check_whole


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """Tokens per target call by the number of drafted nodes, as measured on text of the target.

    Attributes:
        marginal_gains: for each node, in the order in which a budget takes them, the tokens per target call that it
            adds, a fraction: the probability that it is accepted.
        depths: of the trees of 0, 1, ... nodes; drafting costs depend on these.
        text: a description of the measured text; empty where unknown. Gains differ on other text.

    Raises:
        OptionError: a gain outside [0, 1], or depths that are not one more than gains.
    """

    marginal_gains: tuple[float, ...]
    depths: tuple[int, ...]
    text: str = ""

    def __post_init__(self) -> None:
        for gain in self.marginal_gains:
            check_share("each marginal gain", gain)
        if len(self.depths) != len(self.marginal_gains) + 1:
            raise OptionError(
                f"trees of 0 to {len(self.marginal_gains)} nodes need one more depths than nodes, got {self.depths}"
            )

    @classmethod
    def fit(
        cls, points: Iterable[tuple[int, float]], depth_of: Callable[[int], int], text: str = ""
    ) -> AcceptanceCurve:
        """The lowest concave curve that is not below any measured (nodes, tokens), nor below (0, 1).

        Measured points scatter, and may have less than 1 token, because a step that only finds the end of an answer
        emits none. The curve is linear between points and ends at the last that rises.

        Worked example: 1.5, 1.6 and 1.9 tokens with 1, 2 and 3 nodes make gains of 0.5, 0.2 and 0.2.

        Args:
            points: measured, in any order.
            depth_of: the depth of a tree with this many nodes, 1 or more.

        Raises:
            OptionError: no whole number of nodes, fewer than 0 tokens, or more than one for each node and one beyond.
        """
        kept = [(0, 1.0)]
        for nodes, tokens in sorted(points):
            check_whole("nodes of a point", nodes, least=0)
            if not 0.0 <= tokens <= 1.0 + nodes + 1e-9:
                raise OptionError(f"{nodes} nodes bring 0 to {nodes + 1} tokens per target call, got {tokens!r}")
            if nodes == 0 or tokens <= kept[-1][1]:
                continue  # the curve does not fall
            while len(kept) > 1 and _is_below(kept[-1], kept[-2], (nodes, tokens)):
                kept.pop()
            kept.append((nodes, min(tokens, 1.0 + nodes)))
        gains: list[float] = []
        for (left, fewer), (right, more) in itertools.pairwise(kept):
            gains += [(more - fewer) / (right - left)] * (right - left)
        return cls(tuple(gains), (0, *(depth_of(nodes) for nodes in range(1, len(gains) + 1))), text)

    @property
    def measured_on(self) -> str:
        return self.text or "text like that of its training"

    def tokens(self, nodes: int) -> float:
        check_whole("nodes", nodes, least=0)
        return 1.0 + math.fsum(self.marginal_gains[:nodes])


def _is_below(middle: tuple[int, float], left: tuple[int, float], right: tuple[int, float]) -> bool:
    return (middle[1] - left[1]) * (right[0] - left[0]) <= (right[1] - left[1]) * (middle[0] - left[0])


@dataclass(frozen=True, slots=True)
class SizeOption:
    """A number of nodes (0 is plain decoding), tokens per target call, and the predicted factor over plain decoding."""

    nodes: int
    expected_tokens: float
    speedup: float


def size_options(
    curve: AcceptanceCurve, verify_s: Callable[[int], float], draft_s: Callable[[int], float]
) -> list[SizeOption]:
    """For 0, 1, ... nodes tau(n) V(1) / (V(n + 1) + draft cost), tau(n) = 1 + the first n gains.

    Worked example: gains (0.6, 0.3), V = 10, 11 and 20 ms for 1, 2 and 3 rows and 1 ms of drafting predict 1.6 * 10 /
    12 = 1.33 with one node and 1.9 * 10 / 21 = 0.90 with two: one node is best.

    Args:
        verify_s: V: seconds of the target's forward by the rows of each request; a tree of n nodes has n + 1.
        draft_s: seconds of one proposal by the depth of its tree; not called for 0 nodes, which cost nothing.

    Raises:
        OptionError: a cost is out of range.
    """
    plain_s = verify_s(1)
    by_depth = {depth: draft_s(depth) for depth in set(curve.depths[1:])}
    found = [SizeOption(0, 1.0, 1.0)]
    tau = 1.0
    for nodes, (gain, depth) in enumerate(zip(curve.marginal_gains, curve.depths[1:], strict=True), 1):
        tau += gain
        found.append(SizeOption(nodes, tau, predicted_speedup(tau, plain_s, verify_s(nodes + 1), by_depth[depth])))
    return found


def best_option(options: Iterable[SizeOption]) -> SizeOption:
    """The one with the largest predicted speed-up, the first of several."""
    return max(options, key=lambda option: option.speedup)
