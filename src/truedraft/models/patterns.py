"""Which earlier positions a layer may look at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class AttentionPattern(ABC):
    """Which key positions a query position may see, among those that are its ancestors."""

    @abstractmethod
    def reaches(self, positions: int) -> bool:
        """Whether a query at the last of `positions` positions sees all of them."""

    @abstractmethod
    def first(self, position: int) -> int:
        """The first position that a query at `position` may see."""

    @abstractmethod
    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """Bool `[queries, keys]` from positions `[queries]` and `[keys]`."""


@dataclass(frozen=True, slots=True)
class Full(AttentionPattern):
    """Every ancestor."""

    def reaches(self, positions: int) -> bool:
        """Always."""
        return True

    def first(self, position: int) -> int:
        """0."""
        return 0

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """All True."""
        return torch.ones(len(query), len(key), dtype=torch.bool, device=query.device)


@dataclass(frozen=True, slots=True)
class Window(AttentionPattern):
    """The last `size` positions, the query's own included."""

    size: int

    def reaches(self, positions: int) -> bool:
        """Whether the window is at least that long."""
        return positions <= self.size

    def first(self, position: int) -> int:
        """`size` - 1 positions back."""
        return max(0, position - self.size + 1)

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """True where the key lies less than `size` positions back."""
        return key[None, :] > query[:, None] - self.size


@dataclass(frozen=True, slots=True)
class Chunk(AttentionPattern):
    """Positions in the same block of `size` positions."""

    size: int

    def reaches(self, positions: int) -> bool:
        """Whether everything lies in the first block."""
        return positions <= self.size

    def first(self, position: int) -> int:
        """Where the block of `position` starts."""
        return position - position % self.size

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """True where query and key fall into one block."""
        return key[None, :] // self.size == query[:, None] // self.size
