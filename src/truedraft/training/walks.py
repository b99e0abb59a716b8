"""Walking along traces as decoding does: each step starts behind what the last one accepted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.training.traces import Trace


@dataclass(frozen=True, slots=True)
class Walk:
    """Where traces lie among rows that stand one behind another.

    Attributes:
        starts: for each trace the row of its first position, then the number of rows; a trace of n tokens has n - 1.
    """

    starts: tuple[int, ...]

    @classmethod
    def along(cls, traces: Sequence[Trace]) -> Walk:
        """Of all positions of some traces, one for each token but a trace's last."""
        return cls(tuple(itertools.accumulate((trace.steps for trace in traces), initial=0)))

    @classmethod
    def joined(cls, walks: Sequence[Walk]) -> Walk:
        """Along the traces of several walks, whose rows stand one behind another."""
        starts = [0]
        for walk in walks:
            starts += [starts[-1] + start for start in walk.starts[1:]]
        return cls(tuple(starts))

    def visited(self, accepted: Tensor) -> Tensor:
        """Rows `[steps]` at which decoding starts its steps.

        Args:
            accepted: `[rows]`, int64: drafted tokens that a step at each row would accept; it emits one more.
        """
        lengths = (accepted + 1).tolist()
        rows: list[int] = []
        for first, end in itertools.pairwise(self.starts):
            place = first
            while place < end:
                rows.append(place)
                place += lengths[place]
        return torch.tensor(rows, dtype=torch.int64)

    def mean_length(self, accepted: Tensor) -> float:
        """Mean acceptance length of decoding the traces, tokens that end answers included; arguments as in `visited`.

        Exact at temperature 0, and for traces drawn at the temperature of use. NaN where no trace has two tokens.
        """
        return len(accepted) / len(self.visited(accepted)) if len(accepted) else math.nan
