"""What a walk by blocks looks at: weights need p and q of drafted tokens, prefixes that may pass need whole rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from truedraft.core.proposals import DrawKind, Proposal
from truedraft.verification.eager import KnownLooks
from truedraft.verification.looks import HostLooks, Look, Looks, Parts


class BlockParts(Parts, Protocol):
    """What a rule does to blocks, beside what it does at one node; see `BlockVerification`."""

    def weights(self, above: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor: ...
    def scaled(self, p: Tensor, weight: Tensor) -> Tensor: ...
    def beyond(self, p: Tensor, q: Tensor) -> Tensor: ...


class BlockLooks(Looks, Protocol):
    """Looks at one request's proposal, some of whose slots form blocks."""

    def drawn(self, slot: int) -> Look:
        """p and q of the one token drawn at a slot of a block, from the untouched laws."""
        ...

    def mass(self, slot: int, weight: float) -> float:
        """How much the target's law at a slot of a block, scaled by the weight there, has beyond the draft's."""
        ...

    def end(self, slot: int, weight: float) -> None:
        """Take note that the walk ends at a slot of a block, with the weight there."""
        ...


class Drawn(Protocol):
    """A draw, made or planned."""

    @property
    def kind(self) -> DrawKind: ...


def is_joint(draws: Sequence[Drawn]) -> bool:
    """Whether the draws of a slot are one independent draw, which is judged together with those around it."""
    return len(draws) == 1 and draws[0].kind is DrawKind.INDEPENDENT


def block_at(proposal: Proposal, slot: int) -> list[int]:
    """The slots of the block that begins at a slot, from the top down; none if it does not begin one."""
    slots: list[int] = []
    while is_joint(proposal.draws[slot]):
        slots.append(slot)
        slot = proposal.draws[slot][0].child + 1
    return slots


@dataclass(slots=True)
class HostBlockLooks:
    """Looks as they are needed, at laws that the host can read.

    Attributes:
        parts: of the rule.
        host: looks at single nodes, and all that they hold.
    """

    parts: BlockParts
    host: HostLooks

    @property
    def left(self) -> Tensor:
        """The law `[vocab]` of the token that ends the walk, once that is known."""
        return self.host.left

    def node(self, slot: int) -> Iterator[Look]:
        """See `Looks.node`."""
        return self.host.node(slot)

    def drawn(self, slot: int) -> Look:
        """See `BlockLooks.drawn`."""
        draw = self.host.proposal.draws[slot][0]
        return self.host.p_x[draw.child], self.host.q_x[draw.child, draw.law]

    def mass(self, slot: int, weight: float) -> float:
        """See `BlockLooks.mass`."""
        return float(self.parts.beyond(*self._laws(slot, weight)))

    def end(self, slot: int, weight: float) -> None:
        """See `BlockLooks.end`."""
        self.host.left = self.parts.rejected(*self._laws(slot, weight))

    def _laws(self, slot: int, weight: float) -> tuple[Tensor, Tensor]:
        """The target's scaled law and the draft's at a slot of a block."""
        laws = self.host.proposal.laws
        assert laws is not None
        row = self.host.laws[slot]
        q = laws[self.host.proposal.draws[slot][0].law].to(row.device)  # the draft may live on another device
        return self.parts.scaled(row, torch.tensor(weight, dtype=torch.float64, device=row.device)), q


@dataclass(frozen=True, slots=True)
class KnownBlockLooks:
    """What was worked out for one request, on the host.

    Attributes:
        known: looks at single nodes, and the token that ends a walk at each slot.
        at: for each slot of a block p and q of the token drawn there, and the mass beyond the draft's law.
    """

    known: KnownLooks
    at: dict[int, tuple[Look, float]]

    @property
    def finals(self) -> list[int]:
        """For each slot the token that ends a walk there."""
        return self.known.finals

    def node(self, slot: int) -> Iterator[Look]:
        """See `Looks.node`."""
        return self.known.node(slot)

    def drawn(self, slot: int) -> Look:
        """See `BlockLooks.drawn`."""
        return self.at[slot][0]

    def mass(self, slot: int, weight: float) -> float:
        """See `BlockLooks.mass`; it was worked out with the same weight."""
        return self.at[slot][1]

    def end(self, slot: int, weight: float) -> None:
        """See `BlockLooks.end`: the token that ends the walk is known for every slot."""
