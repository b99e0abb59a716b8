"""Rotary positions, tabulated once instead of at every forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_FIRST_POSITIONS = 512


class RotaryTable:
    """Cosines and sines of a model's own rotary module, by position; grows by doubling.

    Args:
        rotary: the module; called as `rotary(like, position_ids)`, it gives cosines and sines `[1, n, head]`.
        like: a tensor of the dtype and device that they are wanted in.
    """

    def __init__(self, rotary: nn.Module, like: Tensor) -> None:
        self._rotary = rotary
        self._like = like
        self._table = self._tabulate(_FIRST_POSITIONS)

    @property
    def table(self) -> Tensor:
        """`[positions, 1, 3/2 head]`: cosines, then the first half of the sines (the second half is the same)."""
        return self._table

    @property
    def width(self) -> int:
        """Entries of a head that are rotated."""
        return self._table.shape[-1] * 2 // 3

    def _tabulate(self, positions: int) -> Tensor:
        cosines, sines = self._rotary(self._like, torch.arange(positions, device=self._like.device)[None])
        half = sines.shape[-1] // 2
        return torch.cat([cosines[0], sines[0, :, :half]], dim=-1)[:, None]

    def reach(self, furthest: int) -> None:
        """Make the table hold the position `furthest`."""
        if furthest >= self._table.shape[0]:
            self._table = self._tabulate(2 ** (furthest + 1).bit_length())

    def at(self, positions: Tensor, furthest: int) -> Rotation:
        """What turns the rows of a forward.

        Args:
            positions: `[rows]`, int64.
            furthest: the largest of them, known to the host.
        """
        self.reach(furthest)
        return Rotation(self._table.index_select(0, positions), self.width)


class Rotation:
    """Turns heads by their rows' positions.

    Args:
        table: `[rows, 1, 3/2 head]`: cosines, then half of the sines.
        width: of a head.
    """

    def __init__(self, table: Tensor, width: int) -> None:
        self._cosines = table[..., :width]
        self._sines = table[..., width:]
        self._half = width // 2

    def __call__(self, heads: Tensor) -> Tensor:
        """Heads `[rows, heads, head]`, turned: (a, b) becomes (a cos - b sin, b cos + a sin), a and b the halves."""
        half = self._half
        turned = heads * self._cosines
        turned[..., :half].addcmul_(heads[..., half:], self._sines, value=-1)
        turned[..., half:].addcmul_(heads[..., :half], self._sines)
        return turned
