"""Isolates requests from a drafter's failures: proposals are checked, and exceptions fail no answer."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from truedraft.core import transfers
from truedraft.core.budget import NOTHING_FOUND, Hint
from truedraft.core.proposal import Proposal, check_ids, check_proposal
from truedraft.core.stats import DraftTime
from truedraft.core.tree import TokenTree
from truedraft.drafters.base import CutShortError, Drafter, LostDrawsError, StepOutcome
from truedraft.engine.batch import StepItem
from truedraft.engine.failures import Failures, told
from truedraft.engine.request import Request
from truedraft.errors import DrafterError
from truedraft.models.base import LanguageModel


class GuardedDrafter:
    """Calls one drafter for all requests.

    A request for which it fails continues without it, with a warning; others are not affected.

    Args:
        number: its index among all drafters, a key of its noise.

    Attributes:
        spent: time of the last `propose`; None if it was not measured.
    """

    def __init__(self, name: str, number: int, drafter: Drafter, target: LanguageModel, failures: Failures) -> None:
        self.name = name
        self.drafter = drafter
        self.spent: DraftTime | None = None
        self._number = number
        self._vocab_size = target.vocab_size
        self._on_device = transfers.waits(target.device)  # whether drafted ids may stay there until verification
        self._failures = failures

    def begin(self, request: Request) -> None:
        try:
            self.drafter.begin(request.draft)
        except Exception as error:
            self.give_up(request, error)

    def hint(self, request: Request) -> Hint:
        """Its hint before drafting for a request; an empty one if it cannot draft for it now."""
        if self.name in request.undrafted_by:
            return NOTHING_FOUND
        try:
            return self.drafter.hint(request.draft)
        except Exception as error:
            self.give_up(request, error)
            return NOTHING_FOUND

    def propose(self, items: Sequence[StepItem]) -> dict[int, Proposal]:
        """Checked proposals by request id, each within its budget; none for requests for which it fails."""
        self.spent = None
        made = self._failures.together(self._who, items, self._ask, self.give_up)
        return {item.request.id: each for item, each in zip(items, made, strict=True) if each is not None}

    def _ask(self, items: Sequence[StepItem]) -> list[Proposal]:
        requests, budgets = [item.request for item in items], [item.budget(self.name) for item in items]
        noise = [item.noise.of_member(self._number) for item in items]
        lag = 0 if self._on_device else sum(self.hint(request).behind for request in requests)
        began = time.perf_counter()
        try:
            proposals = self.drafter.propose([request.draft for request in requests], budgets, noise)
        except CutShortError as cut:
            if len(items) > 1:
                raise
            self.give_up(requests[0], cut.__cause__ if isinstance(cut.__cause__, Exception) else cut)
            proposals = [cut.proposal]
        except Exception as error:
            if len(items) == 1:
                LostDrawsError.raise_if_lost(self.name, error, requests[0].params, noise[0])
            raise
        if len(proposals) != len(items):
            raise DrafterError(f"drafter {self.name!r} made {len(proposals)} proposals for {len(items)} requests")
        for proposal, budget, request in zip(proposals, budgets, requests, strict=True):
            check_proposal(self.name, proposal, budget, request.rule.judges, self._vocab_size)
            if not (proposal.tree.on_device and self._on_device):
                self.check_ids(proposal.tree)
        seconds, trees = time.perf_counter() - began, [proposal.tree for proposal in proposals]
        depth, nodes = max(tree.shape.depth for tree in trees), sum(map(len, trees))
        if not self._on_device:
            self.spent = DraftTime(self.name, len(items), depth, nodes, lag, seconds, self.drafter.levels)
        return proposals

    def check_ids(self, tree: TokenTree) -> None:
        check_ids(self.name, tree, self._vocab_size)

    def observe(self, seen: Sequence[tuple[Request, StepOutcome]]) -> None:
        try:
            self.drafter.observe([request.draft for request, _ in seen], [outcome for _, outcome in seen])
        except Exception as error:
            if len(seen) == 1:
                self.give_up(seen[0][0], error)
                return
            self._failures.count_retry([request for request, _ in seen], self._who, error)
            for request, outcome in seen:
                # It is unknown which outcomes it processed, so its state of all of them is rebuilt.
                self.end(request)
                self.begin(request)
                if self.name not in request.excluded:
                    self.observe([(request, outcome)])

    def end(self, request: Request) -> None:
        try:
            self.drafter.end(request.draft)
            if request.id in self.drafter.held.requests:
                raise DrafterError("it still keeps something for the request")
        except Exception as error:
            self._failures.log(self._who, error)
            request.warnings.append(f"{self._who} failed at the end of the request ({told(error)})")

    def give_up(self, request: Request, error: Exception) -> None:
        """Let the request continue without it.

        Raises:
            LostDrawsError: the request cannot continue, because its draws are unknown.
        """
        if isinstance(error, LostDrawsError):
            raise error
        self._failures.log(self._who, error)
        request.excluded.add(self.name)
        request.warnings.append(f"{self._who} failed ({told(error)}); the answer went on undrafted")

    @property
    def _who(self) -> str:
        return f"drafter {self.name!r}"


def disowned(rows: Collection[int], proposal: Proposal) -> DrafterError:
    """The error that explains why draws below some tree rows are not verified."""
    depth = min((0, *proposal.tree.shape.depths)[row] for row in rows) + 1
    return DrafterError(
        f"the probabilities that draws at depth {depth} were made from are no distributions (finite, not negative, "
        "sum 1), or give nothing to the token drawn"
    )
