"""Ask a drafter for proposals, and keep its failures from the requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from truedraft.control import Controller, Observation
from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.counters import Counters
from truedraft.core.noise import KeyedNoise
from truedraft.core.proposals import DrawKind, Proposal, check_draws
from truedraft.core.trees import TokenTree
from truedraft.drafters.base import Drafter, StepOutcome
from truedraft.engine.failures import Failures, told
from truedraft.engine.request import Request
from truedraft.errors import DrafterError


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that a proposal is asked for."""

    request: Request
    budget: Budget
    noise: KeyedNoise
    judges: frozenset[DrawKind]


class Drafting:
    """The engine's dealings with a drafter: budgets, checks, and what happens when it raises.

    A request whose drafter fails goes on undrafted, with a warning; the others do not notice.

    Args:
        drafter: any drafter.
        controller: decides the budgets.
        vocab_size: token ids that exist.
        failures: is told what failed.
    """

    def __init__(self, drafter: Drafter, controller: Controller, vocab_size: int, failures: Failures) -> None:
        self._drafter = drafter
        self._controller = controller
        self._vocab_size = vocab_size
        self._failures = failures

    def begin(self, request: Request) -> None:
        """Tell the drafter that a request starts."""
        try:
            self._drafter.begin(request.draft)
        except Exception as error:
            self._give_up(request, error)

    def propose(
        self,
        batch: Sequence[Request],
        noise: Sequence[KeyedNoise],
        judges: Sequence[frozenset[DrawKind]],
        *,
        unseen: bool = False,
    ) -> list[Proposal]:
        """A proposal for each request; empty where nothing may be drafted or the drafter failed.

        Args:
            batch: the step's requests.
            noise: of each.
            judges: for each, the kinds of draws that its rule can judge.
            unseen: whether drafted tokens may be unknown to the host; `admits` checks them once they are read.
        """
        budgets = [self._budget(request, len(batch)) for request in batch]
        asked = [_Asked(*each) for each in zip(batch, budgets, noise, judges, strict=True) if not each[1].is_zero]
        made: dict[int, Proposal] = {}
        if asked:
            try:
                made = self._ask(asked, unseen)
            except Exception as error:
                made = self._ask_alone(asked, unseen, error)
        return [made.get(request.id, Proposal.empty()) for request in batch]

    def _ask_alone(self, asked: Sequence[_Asked], unseen: bool, error: Exception) -> dict[int, Proposal]:
        """What can still be had after a failure: whose fault it was shows when each request is asked for alone."""
        if len(asked) == 1:
            self._give_up(asked[0].request, error)
            return {}
        self._failures.asked_again([each.request for each in asked], self._who, error)
        made: dict[int, Proposal] = {}
        for each in asked:
            try:
                made |= self._ask([each], unseen)
            except Exception as own:
                self._give_up(each.request, own)
        return made

    def _budget(self, request: Request, requests: int) -> Budget:
        if request.undrafted or request.uncached > 1 or request.emitted == 0:
            return NO_DRAFT
        try:
            budget = self._controller.decide(Observation(self._drafter.limits, requests, request.counters))
        except Exception as error:
            self._give_up(request, error, "the controller")
            return NO_DRAFT
        # A step emits one token more than it accepts, so the last block is cut to fit.
        return budget.cut(request.remaining - 1)

    def _ask(self, asked: Sequence[_Asked], unseen: bool) -> dict[int, Proposal]:
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
            if proposal.tree.is_known or not unseen:
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
        kinds = check_draws(tree.shape, proposal.draws, 0 if proposal.laws is None else proposal.laws.shape[0])
        if not kinds <= asked.judges:
            names = ", ".join(sorted(kind.value for kind in kinds - asked.judges))
            raise DrafterError(f"drafter {name!r} made {names} draws, which the rule cannot judge")
        laws = proposal.laws
        if laws is not None and (laws.shape[1:] != (vocab,) or not laws.is_floating_point()):
            raise DrafterError(
                f"drafter {name!r} drew from laws of {laws.dtype} and shape {tuple(laws.shape)}; they are floats of "
                f"[laws, {vocab}]"
            )
        if tree.tokens.shape != (len(tree),) or tree.tokens.dtype != torch.int64:
            shape = tuple(tree.tokens.shape)
            raise DrafterError(f"drafter {name!r} gave {tree.tokens.dtype} of shape {shape} for {len(tree)} nodes' ids")

    def _check_ids(self, tree: TokenTree) -> None:
        ids, last = tree.token_list, self._vocab_size - 1
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

    def disown(self, request: Request, proposal: Proposal, slots: Collection[int]) -> Proposal:
        """Take out draws that were not made as the proposal says, and give the request up.

        What lies above them stays: to drop it because of what was drawn there would bend the law of the answer.

        Args:
            request: is not drafted for again.
            proposal: of the request.
            slots: whose draws are taken out.
        """
        depth = min((0, *proposal.tree.shape.depths)[slot] for slot in slots) + 1
        error = DrafterError(
            f"the laws of draws at depth {depth} are no distributions (finite, not negative, sum 1), or give nothing "
            "to the token drawn"
        )
        self._give_up(request, error)
        return proposal.without_draws(slots)

    def observe(
        self, batch: Sequence[Request], outcomes: Sequence[StepOutcome], draft_s: float, target_s: float
    ) -> None:
        """Tell drafter and controller what became of a step, and what it cost in seconds."""
        drafted = [i for i, request in enumerate(batch) if not request.undrafted]
        if not drafted:
            return
        self._observe([(batch[i], outcomes[i]) for i in drafted])
        step = Counters()
        for i in drafted:
            nodes, depth = len(outcomes[i].proposal.tree), outcomes[i].proposal.tree.shape.depth
            accepted = len(outcomes[i].path)
            step.count_call(nodes, depth, accepted, len(outcomes[i].tokens), rejected=accepted < depth)
        try:
            self._controller.observe(step, draft_s, target_s)
        except Exception as error:
            for i in drafted:
                self._give_up(batch[i], error, "the controller")

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
