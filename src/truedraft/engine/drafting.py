"""Ask a drafter for proposals, and keep its failures from the requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from truedraft.control import Controller
from truedraft.core import transfers
from truedraft.core.budget import NO_DRAFT, Budget, RequestView
from truedraft.core.noise import KeyedNoise
from truedraft.core.proposal import Proposal, check_draws
from truedraft.core.stats import StepRecord
from truedraft.core.tree import TokenTree
from truedraft.drafters.base import Drafter, StepOutcome
from truedraft.engine.batch import Batch, StepItem
from truedraft.engine.failures import Failures, told
from truedraft.engine.request import Request
from truedraft.errors import DrafterError
from truedraft.models.base import LanguageModel


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that a proposal is asked for."""

    request: Request
    budget: Budget
    noise: KeyedNoise


_NOTHING = Proposal.empty()


def _view(item: StepItem, limits: Mapping[str, Budget]) -> RequestView:
    request = item.request
    return RequestView(
        request.id, request.params, request.seed, item.context, request.remaining, limits, request.counters
    )


class Drafting:
    """The engine's dealings with a drafter: budgets, checks, and what happens when it raises.

    A request whose drafter fails goes on undrafted, with a warning; the others do not notice.

    Args:
        drafter: any drafter.
        controller: decides the budgets.
        target: what is drafted for.
        failures: is told what failed.
    """

    def __init__(self, drafter: Drafter, controller: Controller, target: LanguageModel, failures: Failures) -> None:
        self._drafter = drafter
        self._controller = controller
        self._vocab_size = target.vocab_size
        self._on_device = transfers.waits(target.device)  # whether drafted ids may stay there until they were judged
        self._failures = failures

    def begin(self, request: Request) -> None:
        """Tell the drafter that a request starts."""
        try:
            self._drafter.begin(request.draft)
        except Exception as error:
            self._give_up(request, error)

    def decide(self, batch: Batch) -> list[Budget]:
        """How much may be drafted for each item: nothing during its prompt, or where its drafter failed."""
        budgets = [NO_DRAFT] * len(batch)
        if self._drafter.limits.is_zero:
            return budgets
        asked = [number for number, item in enumerate(batch) if not item.prefill and not item.request.undrafted]
        if not asked:
            return budgets
        limits = {self._drafter.name: self._drafter.limits}
        views = [_view(batch.items[number], limits) for number in asked]
        try:
            decided: list[Budget | None] = list(self._budgets(views))
        except Exception as error:
            decided = self._decide_alone([batch.items[number].request for number in asked], views, error)
        for number, budget, view in zip(asked, decided, views, strict=True):
            if budget is not None:
                # A step emits one token more than it accepts, so the last block is cut to fit.
                budgets[number] = budget.cut(view.remaining - 1)
        return budgets

    def _budgets(self, views: Sequence[RequestView]) -> list[Budget]:
        decisions = self._controller.decide(views)
        if len(decisions) != len(views):
            raise ValueError(f"{len(decisions)} decisions for {len(views)} requests")
        for decision in decisions:
            if decision.drafter != self._drafter.name:
                raise ValueError(f"it chose a drafter {decision.drafter!r}; there is {self._drafter.name!r}")
        return [decision.budget for decision in decisions]

    def _decide_alone(
        self, requests: Sequence[Request], views: Sequence[RequestView], error: Exception
    ) -> list[Budget | None]:
        """The same after a failure: for whom it fails shows when it is asked for each alone; None where it does."""
        if len(requests) == 1:
            self._give_up(requests[0], error, "the controller")
            return [None]
        self._failures.asked_again(requests, "the controller", error)
        budgets: list[Budget | None] = []
        for request, view in zip(requests, views, strict=True):
            try:
                budgets += self._budgets([view])
            except Exception as own:
                self._give_up(request, own, "the controller")
                budgets.append(None)
        return budgets

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> list[Proposal]:
        """A proposal for each item, within its budget; empty where that is zero or the drafter failed."""
        asked = [
            _Asked(item.request, budget, item.noise)
            for item, budget in zip(batch, budgets, strict=True)
            if not budget.is_zero
        ]
        made: dict[int, Proposal] = {}
        if asked:
            try:
                made = self._ask(asked)
            except Exception as error:
                made = self._ask_alone(asked, error)
        return [made.get(item.request.id, _NOTHING) for item in batch]

    def _ask_alone(self, asked: Sequence[_Asked], error: Exception) -> dict[int, Proposal]:
        """What can still be had after a failure: whose fault it was shows when each request is asked for alone."""
        if len(asked) == 1:
            self._give_up(asked[0].request, error)
            return {}
        self._failures.asked_again([each.request for each in asked], self._who, error)
        made: dict[int, Proposal] = {}
        for each in asked:
            try:
                made |= self._ask([each])
            except Exception as own:
                self._give_up(each.request, own)
        return made

    def _ask(self, asked: Sequence[_Asked]) -> dict[int, Proposal]:
        """Checked proposals by request."""
        proposals = self._drafter.propose(
            [each.request.draft for each in asked], [each.budget for each in asked], [each.noise for each in asked]
        )
        if len(proposals) != len(asked):
            raise DrafterError(
                f"drafter {self._drafter.name!r} made {len(proposals)} proposals for {len(asked)} requests"
            )
        for proposal, each in zip(proposals, asked, strict=True):
            self._check(proposal, each)
            if not (proposal.tree.on_device and self._on_device):
                self._check_ids(proposal.tree)
        return {each.request.id: proposal for each, proposal in zip(asked, proposals, strict=True)}

    def _check(self, proposal: Proposal, asked: _Asked) -> None:
        """Refuse what the rule would judge wrongly, or the budget forbids."""
        tree, name, vocab = proposal.tree, self._drafter.name, self._vocab_size
        if not len(tree):
            return
        if tree.shape.depth > asked.budget.depth or len(tree) > asked.budget.nodes:
            raise DrafterError(
                f"drafter {name!r} proposed {len(tree)} nodes, {tree.shape.depth} deep; its budget was {asked.budget}"
            )
        kinds = check_draws(tree.shape, proposal.draws, 0 if proposal.probs is None else proposal.probs.shape[0])
        judges = asked.request.rule.judges
        if not kinds <= judges:
            names = ", ".join(sorted(kind.value for kind in kinds - judges))
            raise DrafterError(f"drafter {name!r} made {names} draws, which the rule cannot judge")
        probs = proposal.probs
        if probs is not None and (probs.shape[1:] != (vocab,) or not probs.is_floating_point()):
            raise DrafterError(
                f"drafter {name!r} drew from distributions of {probs.dtype} and shape {tuple(probs.shape)}; they are "
                f"floats of [distributions, {vocab}]"
            )
        if tree.tokens.shape != (len(tree),) or tree.tokens.dtype != torch.int64:
            shape = tuple(tree.tokens.shape)
            raise DrafterError(f"drafter {name!r} gave {tree.tokens.dtype} of shape {shape} for {len(tree)} nodes' ids")

    def _check_ids(self, tree: TokenTree) -> None:
        ids, last = tree.host_ids, self._vocab_size - 1
        if ids and not 0 <= min(ids) <= max(ids) <= last:
            raise DrafterError(f"drafter {self._drafter.name!r} proposed ids outside 0 to {last}: {ids}")

    def admits(self, request: Request, proposal: Proposal) -> bool:
        """Check the tokens of a proposal that came to the host after it was made; if some do not exist, give it up."""
        try:
            self._check_ids(proposal.tree)
        except DrafterError as error:
            self._give_up(request, error)
            return False
        return True

    def disown(self, request: Request, proposal: Proposal, rows: Collection[int]) -> Proposal:
        """Take out draws that were not made as the proposal says, and give the request up.

        What lies above them stays: to drop it because of what was drawn there would bend the distribution of the
            answer.

        Args:
            request: is not drafted for again.
            proposal: of the request.
            rows: whose draws are taken out.
        """
        depth = min((0, *proposal.tree.shape.depths)[row] for row in rows) + 1
        error = DrafterError(
            f"the probabilities that draws at depth {depth} were made from are no distributions (finite, not negative, "
            "sum 1), or give nothing to the token drawn"
        )
        self._give_up(request, error)
        return proposal.without_draws(rows)

    def observe(self, batch: Batch, outcomes: Sequence[StepOutcome], record: StepRecord) -> None:
        """Tell drafter and controller what became of a step."""
        drafted = [(item.request, own) for item, own in zip(batch, outcomes, strict=True) if not item.request.undrafted]
        if not drafted:
            return
        self._observe(drafted)
        try:
            self._controller.observe(record)
        except Exception as error:
            for request, _ in drafted:
                self._give_up(request, error, "the controller")

    def _observe(self, seen: Sequence[tuple[Request, StepOutcome]]) -> None:
        try:
            self._drafter.observe([request.draft for request, _ in seen], [outcome for _, outcome in seen])
        except Exception as error:
            if len(seen) == 1:
                self._give_up(seen[0][0], error)
                return
            self._failures.asked_again([request for request, _ in seen], self._who, error)
            for request, outcome in seen:
                # What was noted of whom is unknown, so the drafter forgets them all.
                self.end(request)
                self.begin(request)
                if not request.undrafted:
                    self._observe([(request, outcome)])

    def end(self, request: Request) -> None:
        """Tell the drafter that a request is over."""
        try:
            self._drafter.end(request.draft)
            if request.id in self._drafter.holding:
                raise DrafterError("it still keeps something for the request")
        except Exception as error:
            self._failures.log(self._who, error)
            request.warnings.append(f"{self._who} failed at the end of the request ({told(error)})")

    def _give_up(self, request: Request, error: Exception, who: str | None = None) -> None:
        who = who or self._who
        self._failures.log(who, error)
        request.undrafted = True
        request.warnings.append(f"{who} failed ({told(error)}); the answer went on undrafted")

    @property
    def _who(self) -> str:
        return f"drafter {self._drafter.name!r}"
