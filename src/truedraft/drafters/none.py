"""No drafter: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.noise import Noise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.drafters.base import Drafter, DraftRequest


class NoDrafter(Drafter):
    """Never guesses. The step is then plain decoding, by the same code."""

    name: ClassVar[str] = "none"
    limits: Budget = NO_DRAFT

    @property
    def kinds(self) -> frozenset[DrawKind]:
        return frozenset()

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        return [Proposal.empty() for _ in batch]
