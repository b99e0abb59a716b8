"""A drafter that stands before another one, to look at what it does."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.proposals import DrawKind, Proposal
from truedraft.core.sampling import SamplingParams
from truedraft.drafters.base import Drafter, DraftRequest, SizePlan, StepOutcome
from truedraft.models.base import LanguageModel


class DelegatingDrafter(Drafter):
    """Does all as the inner drafter does; subclasses add what they are for.

    Args:
        inner: drafts.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.name = inner.name  # type: ignore[misc]
        self.limits = inner.limits
        self.features = inner.features  # type: ignore[misc]

    @property
    def holding(self) -> Collection[int]:
        return self.inner.holding

    @property
    def kinds(self) -> frozenset[DrawKind]:
        """Those of the inner drafter."""
        return self.inner.kinds

    def check(self, target: LanguageModel) -> None:
        """As the inner drafter."""
        self.inner.check(target)

    def begin(self, request: DraftRequest) -> None:
        """As the inner drafter."""
        self.inner.begin(request)

    def size_plans(self, params: SamplingParams) -> Sequence[SizePlan]:
        """Those of the inner drafter."""
        return self.inner.size_plans(params)

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        """As the inner drafter."""
        return self.inner.propose(batch, budgets, noise)

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        """As the inner drafter."""
        self.inner.observe(batch, outcomes)

    def end(self, request: DraftRequest) -> None:
        """As the inner drafter."""
        self.inner.end(request)
