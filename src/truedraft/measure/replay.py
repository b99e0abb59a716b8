"""Trace replay: step along a target's own text as decoding would, each step starting after the tokens accepted before.

The candidates of heads are deterministic: sampling from the target and following the child with the sampled token is
the verification rule itself. So along a trace of the target's own samples nothing is random, and the replayed mean
acceptance length is exactly that of an engine, at temperature 0 and at the temperature at which the trace was sampled.
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
"""A number of nodes larger than any tree's."""


@dataclass(frozen=True)
class Trace:
    """One answer of the target, as heads see it.

    At a step with last token `tokens[i]`, head k (from 0) reads `hidden[i]` and guesses `tokens[i + 1 + k]`.

    Attributes:
        tokens: `[n]`, int64: the answer; its first token is the one that the prompt's forward gives.
        hidden: `[n, width]`: inputs of the target's LM head, each the one that gave its token.
        stopped: whether the last token ended the answer and is not a part of it; otherwise it ended at its length.

    Raises:
        DataError: there are not as many vectors as tokens.
    """

    tokens: Tensor
    hidden: Tensor
    stopped: bool = False

    def __post_init__(self) -> None:
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
    """The first position of each trace in their concatenation; then the number of positions."""
    return tuple(itertools.accumulate((trace.steps for trace in traces), initial=0))


def tree_depths(traces: Sequence[Trace], most: int) -> NDArray[Any]:
    """Largest depth of a tree at each position.

    Where an answer ends at its length, the engine drafts only what is left.

    Args:
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
    """At each position of some traces, the fewest nodes with which a drafter's tree contains the target's tokens.

    Worked example, one trace of 5 tokens and trees of one level: the fewest nodes (1), (never), (2), (never) say that
    the first node was right at position 0, none at 1, and the second at 2. A tree of one node accepts 1 token at 0, so
    the next step starts at 2; it accepts none, and neither does the one at 3. Three steps emit 4 tokens: 1.33 each.

    Attributes:
        fewest: `[positions, depth]`, int64: the fewest nodes with which the tree there contains the true continuation
            down to each depth; `NEVER` where no number does, or no token is drafted.
    """

    fewest: Tensor
    starts: tuple[int, ...]
    most: int

    def accepted(self, nodes: int) -> Tensor:
        """Tokens `[positions]` that a step at each position accepts from a tree of `nodes` nodes."""
        return (self.fewest <= nodes).cumprod(dim=1).sum(dim=1)

    def visited(self, nodes: int) -> Tensor:
        """Positions `[steps]` at which decoding with `nodes` nodes starts its steps."""
        lengths = (self.accepted(nodes) + 1).tolist()  # a step emits one more than it accepts
        found: list[int] = []
        for first, end in itertools.pairwise(self.starts):
            place = first
            while place < end:
                found.append(place)
                place += lengths[place]
        return torch.tensor(found, dtype=torch.int64)

    def mean_acceptance_length(self, nodes: int) -> float:
        """Tokens per target call of decoding the traces with trees of `nodes` nodes, including tokens that end answers.

        NaN where no trace has two tokens.
        """
        return len(self.fewest) / len(self.visited(nodes)) if len(self.fewest) else math.nan

    def points(self, nodes: Iterable[int] = CURVE_NODES) -> tuple[tuple[int, float], ...]:
        """(nodes, mean acceptance length) for some numbers of nodes, without those above `most`."""
        return tuple((each, self.mean_acceptance_length(each)) for each in nodes if each <= self.most)
