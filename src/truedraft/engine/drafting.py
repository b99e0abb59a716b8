"""From a controller's decisions to one proposal for each request, and each drafter's outcomes back to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.budget import NO_DRAFT, Budget, Decision, RequestView, Speculation
from truedraft.core.proposal import Proposal
from truedraft.core.stats import DraftTime, StepRecord
from truedraft.drafters.base import Drafter, Features, StepOutcome
from truedraft.drafters.portfolio import MergedProposal, joint_features
from truedraft.engine.batch import Batch, StepItem
from truedraft.engine.failures import Failures, GuardedDrafter, invalid_draws, summary
from truedraft.engine.policy import Controller
from truedraft.engine.request import Request
from truedraft.errors import DrafterError, UnknownOptionError
from truedraft.models.base import ForwardOutput, LanguageModel

_FEW_CALLS = 1 / 20
"""Share of a request's target calls that verified drafts; below it, the controller's reason is recorded."""


class Drafting:
    """Calls the drafters, and the controller that chooses among them.

    Args:
        watcher: observes every step as drafters do, but never drafts; None for no watcher.
    """

    def __init__(
        self,
        drafter: Drafter,
        controller: Controller,
        target: LanguageModel,
        failures: Failures,
        watcher: Drafter | None = None,
    ) -> None:
        watched = {**drafter.members, **({} if watcher is None else {watcher.name: watcher})}
        self._members = {
            name: GuardedDrafter(name, number, member, target, failures)
            for number, (name, member) in enumerate(watched.items())
        }
        self._limits = {name: member.limits for name, member in drafter.members.items()}
        has_others = list(drafter.members.values()) != [drafter]
        self._whole = drafter if has_others and not drafter.observes_lazily else None  # observes merged proposals
        self.features = shown = joint_features(drafter, watcher)
        self._shows = shown is not None
        self._layers = () if shown is None else shown.layers  # layers that the target returns
        self._on_device = transfers.waits(target.device)
        self._kept = [each.features for each in watched.values() if each.observes_lazily and each.features]
        self._drafts = any(not limits.is_zero for limits in self._limits.values())
        self._eager = [member for member in self._members.values() if not member.drafter.observes_lazily]
        self._proposing: dict[str, list[StepItem]] = {}  # items of the running step, by drafter
        # The controller's last call, and the steps for which its decisions hold without another one.
        self._rests = 0  # number of steps left, the running one included
        self._resting = False  # whether the running step is one of them
        self._resting_plain = False  # whether nothing is drafted in them
        self._seen: set[tuple[int, int]] = set()  # hints found at the last decision, or since nothing is drafted
        self._last: tuple[list[Request], list[Decision | None]] = [], []  # its requests and decisions
        self._controller = controller
        self._failures = failures

    @property
    def spent(self) -> tuple[DraftTime, ...]:
        spent = ((self._members[name].spent, len(items)) for name, items in self._proposing.items())
        # Requests that were drafted one after another do not show the time of a batch.
        return tuple(each for each, count in spent if each is not None and each.requests == count)

    @property
    def warmups(self) -> int:
        return sum(member.drafter.warmups for member in self._members.values())

    def limit(self, request: Request, speculation: Speculation | None) -> None:
        """Restrict a request to the drafters that can draft for it and that it allows, and to the depth it allows."""
        own = request.drafting
        own.excluded.update(name for name, each in self._members.items() if not each.drafter.serves(request.draft))
        if speculation is not None:
            for name in speculation.drafters or ():
                if name not in self._limits:
                    raise UnknownOptionError.nearest("drafter", name, self._limits)
            if speculation.drafters is not None:
                own.excluded.update(name for name in self._limits if name not in speculation.drafters)
            if speculation.num_speculative_tokens is not None:
                own.most_depth = speculation.num_speculative_tokens
        own.no_room |= own.excluded

    def begin(self, request: Request) -> None:
        for name, member in self._members.items():
            if name not in request.drafting.no_room:
                member.begin(request)

    def release_cache(self, request: Request, name: str) -> None:
        self._members[name].end(request)
        request.drafting.no_room.add(name)

    def restore_cache(self, request: Request, name: str) -> None:
        request.drafting.no_room.discard(name)
        self._begin_anew(request, name)

    def renew(self, name: str, change: Callable[[], None], requests: Sequence[Request]) -> None:
        """Change a drafter between two steps and rebuild its state for the running requests."""
        own = [each for each in requests if each.cache is not None and name not in each.drafting.unavailable]
        for request in own:
            self._members[name].end(request)
        try:
            change()
        except Exception as error:  # it drafts without the change
            self._failures.log(f"the change of drafter {name!r}", error)
        for request in own:
            self._begin_anew(request, name)

    def _begin_anew(self, request: Request, name: str) -> None:
        self._members[name].begin(request)
        request.drafting.reported.pop(name, None)
        if request.last_step is not None:
            self._report(self._members[name], [request.last_step])

    def explain(self, request: Request) -> None:
        counters = request.counters
        could = any(not each.is_zero for each in self._limits_for(request).values())
        if could and counters.target_calls and counters.drafted_calls < _FEW_CALLS * counters.target_calls:
            counters.undrafted = self._controller.undrafted(request.id)

    def decide(self, batch: Batch) -> None:
        for item, decision in zip(batch, self._decisions(batch), strict=True):
            item.decision = decision if decision is None or decision.is_zero else self._within_limits(item, decision)

    def _decisions(self, batch: Batch) -> Sequence[Decision | None]:
        decisions: list[Decision | None] = [None] * len(batch)
        if not self._drafts:
            return decisions
        self._rests = self._rests - 1 if self._rests and self._last[0] == [item.request for item in batch] else 0
        if self._rests and not self._still_fits(batch):
            self._rests = 0
        self._resting = self._rests > 0
        if self._resting:
            return self._last[1]
        numbers = [number for number, item in enumerate(batch) if not item.prefill and self._limits_for(item.request)]
        if not numbers:
            return decisions
        items = [batch.items[number] for number in numbers]
        decided = self._failures.run_or_split("the controller", items, self._decided, self._give_up)
        for number, decision in zip(numbers, decided, strict=True):
            decisions[number] = decision
        if self._controller.rests and len(numbers) == len(batch):
            self._rests = 1 + self._controller.rests
            before, self._last = self._last[0], ([item.request for item in batch], decisions)
            plain = all(each is None or each.is_zero for each in decisions)
            if not (plain and self._resting_plain and before == self._last[0]):
                self._seen = set()
            self._resting_plain = plain
            self._seen |= self._found(batch)
        return decisions

    def _still_fits(self, batch: Batch) -> bool:
        """Whether drafters find nothing new where nothing is drafted, else about the same for most requests."""
        if not self._resting_plain:
            return 2 * len(self._found(batch) ^ self._seen) <= len(batch)
        return self._rests % max(len(batch) // 2, 2) != 0 or self._found(batch) <= self._seen

    def _within_limits(self, item: StepItem, decision: Decision) -> Decision:
        request, limits = item.request, self._limits_for(item.request)
        # A step emits one token more than it accepts, so the last draft is cut to fit.
        depth = max(min(request.remaining - 1, request.drafting.most_depth), 0)
        most = request.drafting.most_positions
        nodes = None if most is None else max(most - item.context - 1, 0)
        parts, budgets = (decision, *decision.merged), []
        for part in parts:
            budget = part.budget.cut(depth) if part.drafter in limits else NO_DRAFT
            if nodes is not None:
                own = min(budget.nodes, limits.get(part.drafter, NO_DRAFT).nodes)
                budget = replace(budget, nodes=nodes) if own > nodes else budget
                nodes -= min(own, nodes)
            budgets.append(budget)
        if all(budget is part.budget for budget, part in zip(budgets, parts, strict=True)):
            return decision
        merged = tuple(replace(part, budget=budget) for part, budget in zip(decision.merged, budgets[1:], strict=True))
        return replace(decision, budget=budgets[0], merged=merged)

    def _found(self, batch: Batch) -> set[tuple[int, int]]:
        hints = (member.hint(item.request) for item in batch for member in self._members.values())
        return {(place, hint.kind) for place, hint in enumerate(hints) if hint.finds}

    def _limits_for(self, request: Request) -> Mapping[str, Budget]:
        out = request.drafting.unavailable
        return {name: limits for name, limits in self._limits.items() if name not in out} if out else self._limits

    def _view(self, item: StepItem) -> RequestView:
        request, view = item.request, item.request.drafting.view
        if view is None:
            hints = {name: partial(member.hint, request) for name, member in self._members.items()}
            view = request.drafting.view = RequestView(
                request.id, request.params, 0, 0, self._limits, request.counters, hints
            )
        view.context, view.remaining = item.context, request.remaining
        view.limits = self._limits_for(request)
        return view

    def _decided(self, items: Sequence[StepItem]) -> Sequence[Decision]:
        views = [self._view(item) for item in items]
        decisions = self._controller.decide(views)
        if len(decisions) != len(views):
            raise ValueError(f"{len(decisions)} decisions for {len(views)} requests")
        for decision, view in zip(decisions, views, strict=True):
            for part in decision.parts if not decision.is_zero else ():
                if part.drafter not in self._limits:
                    there = ", ".join(map(repr, view.limits))
                    raise ValueError(f"it chose a drafter {part.drafter!r}; there is {there}")
        return decisions

    def propose(self, batch: Batch) -> None:
        self._proposing = {}
        for item in batch:
            for part in () if item.decision is None else item.decision.parts:
                self._proposing.setdefault(part.drafter, []).append(item)
        for name, items in self._proposing.items():
            if self._members[name].drafter.observes_lazily:
                self._report(self._members[name], items)
        made = {name: self._members[name].propose(items) for name, items in self._proposing.items()}
        for item in batch if made else ():
            parts = () if item.decision is None else item.decision.parts
            own = {part.drafter: made[part.drafter].get(item.request.id) for part in parts}
            if found := {name: each for name, each in own.items() if each is not None}:
                item.hold(MergedProposal.of(found))

    def admits(self, item: StepItem) -> bool:
        """Check drafted ids that reached the host after drafting; False drops the proposal, which has invalid ids."""
        for name in item.drafted.parts:
            try:
                self._members[name].check_ids(item.proposal.tree)
            except DrafterError as error:
                self._members[name].give_up(item.request, error)
                return False
        return True

    def drop_invalid_draws(self, item: StepItem, rows: Collection[int]) -> Proposal:
        """Remove draws below some tree rows that do not match the proposal's probabilities; their drafters stop
        drafting for this request. Earlier levels are kept: dropping them would bias the answer's distribution.
        """
        error = invalid_draws(rows, item.proposal)
        for name in item.drafted.parts:
            self._members[name].give_up(item.request, error)
        return item.proposal.without_draws(rows)

    def observe(self, batch: Batch, output: ForwardOutput) -> None:
        """Report a finished step to drafters; to those that observe lazily only if they proposed something."""
        if self._kept and self._on_device:  # the next forward may overwrite it
            logits = output.logits.clone() if any(each.logits for each in self._kept) else output.logits
            output = ForwardOutput(logits, output.hidden.clone(), tuple(layer.clone() for layer in output.layers))
        for item in batch:
            if item.request.last_step is not None:
                item.request.last_step.shown = None  # frees a large tensor
            item.shown, item.request.last_step = output if self._shows else None, item
        for member in self._eager:
            self._report(member, batch.items)
        for name in self._proposing:
            if self._members[name].drafter.observes_lazily:
                self._report(self._members[name], [item for item in batch if name in item.drafted.parts])
        if self._whole is not None:
            outcomes = [item.outcome for item in batch if item.outcome is not None]
            self._whole.observe([item.request.draft for item in batch], outcomes)

    def _report(self, member: GuardedDrafter, items: Sequence[StepItem]) -> None:
        seen = []
        for request in (item.request for item in items):
            step, own = request.last_step, request.drafting
            if (
                step is not None
                and member.name not in own.unavailable
                and own.reported.get(member.name) != step.context
            ):
                own.reported[member.name] = step.context
                seen.append((request, _outcome_for(member.name, step, member.drafter.features, self._layers)))
        if seen:
            member.observe(seen)

    def record(self, batch: Batch, record: StepRecord) -> None:
        if (self._resting and self._resting_plain) or not self._drafts:
            return
        try:
            self._controller.observe(record)
        except Exception as error:
            for item in batch:
                if self._limits_for(item.request):
                    self._give_up(item.request, error)

    def end(self, request: Request) -> None:
        for name, member in self._members.items():
            if name not in request.drafting.no_room:
                member.end(request)

    def _give_up(self, request: Request, error: Exception) -> None:
        self._failures.log("the controller", error)
        request.drafting.excluded.update(self._members)
        request.warnings.append(f"the controller failed ({summary(error)}); the answer went on undrafted")


def _outcome_for(name: str, item: StepItem, features: Features | None, layers: Sequence[int]) -> StepOutcome:
    outcome, output = item.outcome, item.shown
    assert outcome is not None
    proposal, nodes = item.drafted.own(name)
    path = item.drafted.own_path(name, outcome.path)
    if features is None or output is None:
        if proposal is outcome.proposal:
            return outcome
        return StepOutcome(proposal, path, outcome.tokens, partial=outcome.partial)
    rows: slice | list[int] | Tensor = item.rows
    if features.rows == "last" or (features.rows in ("tree", "accepted") and not len(item.proposal.tree)):
        # In a tree the row where the next token was drawn, else the last row.
        end = (
            item.judged_rows.start + (outcome.path[-1] + 1 if outcome.path else 0)
            if item.judged
            else item.rows.stop - 1
        )
        rows = slice(end, end + 1)
    elif features.rows in ("accepted", "kept") and item.judged:
        first = item.judged_rows.start
        rows = [*range(item.rows.start, first + 1), *(first + 1 + node for node in outcome.path)]
    elif nodes is not None:
        first = item.judged_rows.start
        rows = [*range(item.rows.start, first + 1), *(first + 1 + node for node in nodes)]
    if isinstance(rows, list):
        rows = _as_index(rows, output.hidden.device)
    return StepOutcome(
        proposal,
        path,
        outcome.tokens,
        hidden=output.hidden[rows],
        logits=output.logits[rows] if features.logits else None,
        layers=tuple(output.layers[layers.index(layer)][rows] for layer in features.layers),
        partial=outcome.partial,
    )


def _as_index(rows: list[int], device: torch.device) -> slice | Tensor:
    """Ascending rows as an index; 4, 5, 6 are a slice, which copies nothing to the device."""
    if rows and rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return transfers.upload(rows, device)
