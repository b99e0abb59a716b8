"""Drafts: guesses of the costly function's output; most need no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

Function = Callable[[Tensor, Tensor], Tensor]
"""A faster function in place of `Process.evaluate`, from points and steps."""


@dataclass(slots=True, eq=False)
class Known:
    """Outputs of the costly function at the last two kept states of each chain, the last one first. Those of discarded
    drafts are left out, because they were drawn with noise that a guess must not depend on.

    Attributes:
        points: `[chains, 2, ...]`, as are outputs.
        steps: `[chains, 2]`.
        count: how many of the two are valid `[chains]`.
    """

    points: Tensor
    outputs: Tensor
    steps: Tensor
    count: Tensor

    @classmethod
    def nothing(cls, points: Tensor, outputs: Tensor, chains: int) -> Known:
        like = [each.new_zeros(chains, 2, *each.shape[1:]) for each in (points, outputs)]
        steps = torch.zeros(chains, 2, dtype=torch.int64, device=points.device)
        return cls(like[0], like[1], steps, steps[:, 0].clone())

    def add(self, chains: Tensor, points: Tensor, outputs: Tensor, steps: Tensor, made: Tensor) -> None:
        """Add the first `made` `[chains]` steps of a round, `[depth, chains, ...]` each, in place."""
        place = torch.arange(len(chains), device=made.device)[:, None]
        # Rows: the last, the one before it, then the round's: 0 and 1 if none was made, 2 and 0 if one was.
        newest = torch.stack([made + 1, torch.where(made > 1, made, 1 - made)], 1)
        newest[:, 0].masked_fill_(made == 0, 0)
        for kept, new in ((self.points, points), (self.outputs, outputs), (self.steps, steps)):
            kept[chains] = torch.cat([kept[chains].transpose(0, 1), new])[newest, place]
        self.count[chains] = (self.count[chains] + made).clamp_max(2)

    def of(self, chains: Tensor) -> Known:
        return Known(self.points[chains], self.outputs[chains], self.steps[chains], self.count[chains])


class Draft(ABC):
    """Guesses the output of `Process.evaluate`.

    A guess may depend on everything that was kept, and on the drafted states at which it is made, but not on the noise
    of its own step, unless that is shared.

    Attributes:
        needs: number of outputs that must be known before it guesses, 0 to 2.
    """

    needs: ClassVar[int] = 0

    @abstractmethod
    def guess(self, states: Tensor, points: Tensor, steps: Tensor, known: Known) -> Tensor:
        """Outputs `[chains, ...]` at points of a step from drafted states; a row with NaN ends its chain's draft."""


class LastOutput(Draft):
    """The last output again: the frozen drift of De Bortoli et al. 2501.05370, section 3.1."""

    needs: ClassVar[int] = 1

    def guess(self, states: Tensor, points: Tensor, steps: Tensor, known: Known) -> Tensor:
        return known.outputs[:, 0]


class Extrapolation(Draft):
    """Linear extrapolation of the last two outputs over the steps, with a share of their difference.

    Worked example: outputs 3.0 at step 4 and 3.2 at step 5 make 3.6 at step 7 with share 1, and 3.4 with share 0.5.

    Args:
        share: less than 1 is better for noisy outputs.
    """

    needs: ClassVar[int] = 2

    def __init__(self, share: float = 1.0) -> None:
        self._share = share

    def guess(self, states: Tensor, points: Tensor, steps: Tensor, known: Known) -> Tensor:
        last, before = known.outputs.unbind(1)
        ahead = (steps - known.steps[:, 0]) / (known.steps[:, 0] - known.steps[:, 1]).clamp_min(1)
        ahead = self._share * ahead.to(last.dtype)
        return last + ahead.view(-1, *[1] * (last.dim() - 1)) * (last - before)


class Cheaper(Draft):
    """Another function: a coarser solver, a smaller network, a part of the data."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def guess(self, states: Tensor, points: Tensor, steps: Tensor, known: Known) -> Tensor:
        return self._function(points, steps)


class Corrected(Cheaper):
    """Another function plus its error at the last output, because that error changes slowly."""

    needs: ClassVar[int] = 1

    def guess(self, states: Tensor, points: Tensor, steps: Tensor, known: Known) -> Tensor:
        error = known.outputs[:, 0] - self._function(known.points[:, 0], known.steps[:, 0])
        return self._function(points, steps) + error
