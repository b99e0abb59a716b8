"""Ask a drafter for proposals, and keep its failures from the requests."""

from __future__ import annotations

from collections.abc import Sequence

from truedraft.control import Controller, Observation
from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.proposals import Proposal
from truedraft.drafters.base import Drafter, StepOutcome
from truedraft.engine.request import Request
from truedraft.errors import DrafterError


class Drafting:
    """The engine's dealings with a drafter: budgets, checks, and what happens when it raises.

    A request whose drafter fails goes on undrafted, with a warning; the others do not notice.

    Args:
        drafter: any drafter.
        controller: decides the budgets.
        vocab_size: token ids that exist.
    """

    def __init__(self, drafter: Drafter, controller: Controller, vocab_size: int) -> None:
        self._drafter = drafter
        self._controller = controller
        self._vocab_size = vocab_size

    def begin(self, request: Request) -> None:
        """Tell the drafter that a request starts."""
        try:
            self._drafter.begin(request.draft)
        except Exception as error:
            self._give_up(request, error)

    def propose(self, batch: Sequence[Request], noise: Sequence[KeyedNoise]) -> list[Proposal]:
        """A proposal for each request; empty where nothing may be drafted or the drafter failed."""
        budgets = [self._budget(request, len(batch)) for request in batch]
        chosen = [i for i, budget in enumerate(budgets) if not budget.is_zero]
        proposals = [Proposal.empty() for _ in batch]
        if not chosen:
            return proposals
        try:
            made = self._ask([batch[i] for i in chosen], [budgets[i] for i in chosen], [noise[i] for i in chosen])
            for i, proposal in zip(chosen, made, strict=True):
                proposals[i] = proposal
        except Exception:
            # Whose fault it was shows when each request is asked for alone.
            for i in chosen:
                try:
                    proposals[i] = self._ask([batch[i]], [budgets[i]], [noise[i]])[0]
                except Exception as error:
                    self._give_up(batch[i], error)
        return proposals

    def _budget(self, request: Request, requests: int) -> Budget:
        if request.undrafted or request.uncached > 1 or request.emitted == 0:
            return NO_DRAFT
        budget = self._controller.decide(Observation(self._drafter.limits, requests, request.counters))
        # A step emits one token more than it accepts, so the last block is cut to fit.
        return budget.cut(request.remaining - 1)

    def _ask(self, batch: Sequence[Request], budgets: Sequence[Budget], noise: Sequence[KeyedNoise]) -> list[Proposal]:
        proposals = self._drafter.propose([request.draft for request in batch], budgets, noise)
        if len(proposals) != len(batch):
            raise DrafterError(
                f"drafter {self._drafter.name!r} made {len(proposals)} proposals for {len(batch)} requests"
            )
        for proposal, budget in zip(proposals, budgets, strict=True):
            self._check(proposal, budget)
        return proposals

    def _check(self, proposal: Proposal, budget: Budget) -> None:
        tree, name = proposal.tree, self._drafter.name
        if tree.shape.depth > budget.depth or len(tree) > budget.nodes:
            raise DrafterError(
                f"drafter {name!r} proposed {len(tree)} nodes, {tree.shape.depth} deep; its budget was {budget}"
            )
        if len(tree) and not 0 <= min(tree.token_list) <= max(tree.token_list) < self._vocab_size:
            raise DrafterError(f"drafter {name!r} proposed ids outside 0 to {self._vocab_size - 1}: {tree.token_list}")

    def observe(self, batch: Sequence[Request], outcomes: Sequence[StepOutcome]) -> None:
        """Tell the drafter what became of a step."""
        drafted = [i for i, request in enumerate(batch) if not request.undrafted]
        if not drafted:
            return
        try:
            self._drafter.observe([batch[i].draft for i in drafted], [outcomes[i] for i in drafted])
        except Exception as error:
            for i in drafted:
                self._give_up(batch[i], error)

    def end(self, request: Request) -> None:
        """Tell the drafter that a request is over."""
        try:
            self._drafter.end(request.draft)
        except Exception as error:
            self._warn(request, error)

    def _give_up(self, request: Request, error: Exception) -> None:
        request.undrafted = True
        self._warn(request, error)

    def _warn(self, request: Request, error: Exception) -> None:
        request.warnings.append(
            f"drafter {self._drafter.name!r} failed ({type(error).__name__}: {error}); the answer went on undrafted"
        )
