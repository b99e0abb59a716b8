"""The base of drafters that choose tokens without drawing, for each request separately."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.proposal import Proposal
from truedraft.core.tree import TokenTree
from truedraft.drafters.base import Drafter, DraftRequest


class CandidateDrafter(Drafter):
    """Proposes trees of deterministic candidates, which every rule verifies exactly at every temperature."""

    observes_lazily = True

    @abstractmethod
    def candidates(self, request: DraftRequest, budget: Budget) -> TokenTree:
        """The tree of a request; may be empty.

        Args:
            budget: of this step, within the drafter's limits; not zero.
        """

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        proposals = []
        for request, budget in zip(batch, budgets, strict=True):
            tree = TokenTree.empty() if budget.is_zero else self.candidates(request, budget.within(self.limits))
            proposals.append(Proposal.deterministic(tree) if len(tree) else Proposal.empty())
        return proposals
