"""Windows of a target's own answers: what one step of training heads reads."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.errors import DataError

if TYPE_CHECKING:
    from truedraft.training.self_text import SelfText


@dataclass(frozen=True)
class Pack:
    """Windows one behind another.

    Attributes:
        hidden: `[rows, width]`: the vectors of all positions of the windows, and of those that heads reach from them.
        tokens: `[rows]`, int64: the token that was drawn from each.
        places: `[positions]`, int64, rising: the rows at which heads guess; behind each there are as many rows of the
            same answer as heads reach.
        rows: `[rows]`: which rows of the text these are.
    """

    hidden: Tensor
    tokens: Tensor
    places: Tensor
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class WindowSampler:
    """Windows of up to `length` positions, in a new random order in each epoch: a pure function of an index.

    Neighbouring positions share the laws of their targets, so a window costs far less than its positions one by one.

    Attributes:
        text: what the target wrote.
        reach: how many tokens after the next are guessed.
        length: positions of a window; the last of an answer has fewer.
        seed: of the order.

    Raises:
        DataError: no answer is longer than what the heads reach.
    """

    text: SelfText
    reach: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        """Refuse answers that teach nothing."""
        if not len(self.windows):
            longest = max((len(record.answer) for record in self.text.records), default=0)
            raise DataError(
                f"the longest answer of the target has {longest} tokens, and heads that reach {self.reach} tokens "
                f"ahead learn from answers of at least {self.reach + 1}: let it write longer answers, or let them "
                "reach less far"
            )

    @cached_property
    def windows(self) -> NDArray[np.int64]:
        """For each window its first row and its number of positions: `[windows, 2]`."""
        found = [
            (row, min(self.length, end - self.reach - row))
            for first, end in itertools.pairwise(self.text.starts)
            for row in range(first, end - self.reach, self.length)
        ]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    @property
    def positions(self) -> int:
        """Positions of all windows."""
        return int(self.windows[:, 1].sum())

    @property
    def sequence_length(self) -> int:
        """Positions of a window."""
        return self.length

    def batch(self, first: int, count: int) -> Tensor:
        """Windows number `first` to `first + count - 1` of the run: int64 `[count, 2]`."""
        epochs = sorted({index // len(self.windows) for index in (first, first + count - 1)})
        order = np.concatenate([self._order(epoch) for epoch in range(epochs[0], epochs[-1] + 1)])
        start = first - epochs[0] * len(self.windows)
        return torch.from_numpy(self.windows[order[start : start + count]])

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.windows))


def pack(text: SelfText, windows: Tensor, reach: int) -> Pack:
    """The rows of some windows `[count, 2]`, on the device of `windows`."""
    rows, places, end = [], [], 0
    for first, count in windows.tolist():
        rows.append(np.arange(first, first + count + reach))
        places.append(np.arange(end, end + count))
        end += count + reach
    chosen = np.concatenate(rows)
    return Pack(
        text.hidden(chosen).to(windows.device),
        torch.from_numpy(text.tokens[chosen]).to(windows.device),
        torch.from_numpy(np.concatenate(places)).to(windows.device),
        chosen,
    )
