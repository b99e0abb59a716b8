"""Trace replay: walking along what a target wrote as decoding would, each step behind what the one before accepted.

The candidates of heads are deterministic: drawing from the target and following the child that carries the drawn token
is the rule itself. So along a trace of the target's own draws no chance is left, and the replayed mean acceptance
length is exactly what an engine would have had, at temperature 0 and at the temperature at which the trace was drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.errors import DataError

CURVE_NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of nodes at which trees are replayed."""
NEVER = 1 << 40
"""More nodes than any tree has."""


@dataclass(frozen=True)
class Trace:
    """One answer of the target, as heads see it.

    At a step whose last token is `tokens[i]`, head k (from 0) reads `hidden[i]` and guesses `tokens[i + 1 + k]`.

    Attributes:
        tokens: `[n]`, int64: the answer; its first token is the one that the prompt's forward gives.
        hidden: `[n, width]`: the vectors that entered the target's LM head, each the one that gave its token.
        stopped: whether the last token ended the answer and is not a part of it; otherwise it ended at its length.

    Raises:
        DataError: there are not as many vectors as tokens.
    """

    tokens: Tensor
    hidden: Tensor
    stopped: bool = False

    def __post_init__(self) -> None:
        """Each token has its vector."""
        if self.tokens.dim() != 1 or self.hidden.dim() != 2 or len(self.tokens) != len(self.hidden):
            raise DataError(
                "a trace needs tokens [n] and as many vectors [n, width], got shapes "
                f"{list(self.tokens.shape)} and {list(self.hidden.shape)}"
            )

    @property
    def steps(self) -> int:
        """Most steps that decoding it can take, and its positions: one for each token but the last."""
        return max(0, len(self.tokens) - 1)


def starts_of(traces: Sequence[Trace]) -> tuple[int, ...]:
    """For each of some traces, whose positions stand one behind another, the first one; then how many there are."""
    return tuple(itertools.accumulate((trace.steps for trace in traces), initial=0))


def tree_depths(traces: Sequence[Trace], most: int) -> NDArray[Any]:
    """How deep a tree may be at each position: where an answer ends at its length, the engine drafts what is left.

    Args:
        traces: one behind another.
        most: the depth elsewhere.

    Returns:
        `[positions]`, int64, 0 to `most`; 0 where no token but the last is left.
    """
    found = [np.zeros(0, dtype=np.int64)]
    for trace in traces:
        left = np.arange(trace.steps - 1, -1, -1)
        found.append(np.full_like(left, most) if trace.stopped else left.clip(max=most))
    return np.concatenate(found)


@dataclass(frozen=True)
class TraceReplay:
    """At each position of some traces, how many nodes it takes until a drafter's tree holds what the target said.

    Worked example, one trace of 5 tokens and trees of one level: the fewest nodes (1), (never), (2), (never) say that
    the first node was right at position 0, none at 1, and the second at 2. A tree of one node accepts 1 token at 0, so
    the next step starts at 2; it accepts none, and neither does the one at 3. Three steps emit 4 tokens: 1.33 each.

    Attributes:
        fewest: `[positions, depth]`, int64: the fewest nodes with which the tree there holds the true continuation down
            to each depth; `NEVER` where no number does, or no token is drafted.
        starts: of the traces, by `starts_of`.
        most: the largest number of nodes that was looked at.
    """

    fewest: Tensor
    starts: tuple[int, ...]
    most: int

    def accepted(self, nodes: int) -> Tensor:
        """Drafted tokens that a step at each position would accept from a tree of so many nodes: `[positions]`."""
        return (self.fewest <= nodes).cumprod(dim=1).sum(dim=1)

    def visited(self, nodes: int) -> Tensor:
        """Positions `[steps]` at which decoding with so many nodes starts its steps."""
        lengths = (self.accepted(nodes) + 1).tolist()  # a step emits one more than it accepts
        found: list[int] = []
        for first, end in itertools.pairwise(self.starts):
            place = first
            while place < end:
                found.append(place)
                place += lengths[place]
        return torch.tensor(found, dtype=torch.int64)

    def mean_acceptance_length(self, nodes: int) -> float:
        """Tokens per target call of decoding the traces with trees of so many nodes, tokens that end answers included.

        NaN where no trace has two tokens.
        """
        return len(self.fewest) / len(self.visited(nodes)) if len(self.fewest) else math.nan

    def points(self, nodes: Iterable[int] = CURVE_NODES) -> tuple[tuple[int, float], ...]:
        """(nodes, mean acceptance length) for some numbers of nodes, those above `most` left out."""
        return tuple((each, self.mean_acceptance_length(each)) for each in nodes if each <= self.most)
