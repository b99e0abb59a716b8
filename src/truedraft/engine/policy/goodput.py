"""The goodput controller: for every step, the drafters and budgets with the highest expected tokens per second.

Decisions use only what is known before the step drafts anything, so whether a draw exists never depends on its token
(docs/concepts.md, predictable choice). Tokens of greedy and seeded requests do not depend on any budget, and no two
other requests of an engine share noise, so the outcome of one request's drafts may decide about another.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import ClassVar, TypeAlias, TypeVar

from truedraft.core.budget import NO_DRAFT, Budget, Decision, Hint, RequestView
from truedraft.core.stats import RequestStep, StepRecord
from truedraft.engine.policy.acceptance import UNKNOWN_RATE, Acceptance, Odds
from truedraft.engine.policy.base import Controller, StepTimes
from truedraft.engine.policy.plan import SIZES, TOLD, Candidate, Plan, Planner, Share

_MOST_KINDS = 512  # estimates kept, over drafters and sampling options
_AHEAD = 96  # tokens over which catching up must pay off, where so many may still be emitted
_HYSTERESIS = 0.02  # gain below which nothing is changed, because costs are not known more exactly
_PLAN_SHARE, _MOST_KEPT = 0.005, 96  # share of time for planning, and most steps for which a plan is kept to stay below
_DECIDE_SHARE, _MOST_RESTS = 0.01, 4  # share of time for deciding in drafted steps, and most steps without deciding
_PLAIN_RESTS, _PLAIN_RESTS_S = 32, 0.03  # plain steps, and seconds, between two decisions
_OTHER_BATCH = 0.34  # relative change of the number of requests after which a plan is no longer valid
_CREDIT_STEPS = 4.0  # steps of time that probing may lose at once
_SAVED_TIMES = 5.0  # probing may lose its share of what drafts save, so many times, in addition to that of the time
_PLAIN_AGE_S = 0.25  # age after which the time of a plain step is measured again
_PLAIN_SHARE = 0.5  # share of the probing time used in drafted steps
_LOSS_SHARE = 0.01  # share of the time that drafts that do not pay may lose, in addition to probing
_FIRST_LOSS, _MOST_SAVED = 12, 48  # plain steps of time that drafts may lose before any gain, and after large gains
_LEAST_LOST = 0.1  # share of a plain step's time, because the first one finds caches cold
_READY_WITHIN = 48  # tokens
_COSTLY_TOKEN_S = 2e-4  # seconds of drafting and judging a token from which computing its probability (a tenth) pays
_SLOW = 0.1  # weight of one step in the moving averages of step times
_PLANS = 5  # the median over so many plans is the planning time, because one of them may have measured costs

Key = TypeVar("Key")
Value = TypeVar("Value")
Kind: TypeAlias = tuple[str, int]
"""Key of a request's estimates: drafter, and kind of hint combined with the outcome of the last proposal; the pool's
keys include sampling options."""


@dataclass(slots=True, eq=False)
class _Own:
    shaping: object  # the sampling options that acceptance depends on
    acceptance: dict[Kind, Acceptance] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)  # at the last decision, by drafter
    accepted: dict[str, bool] = field(default_factory=dict)  # whether anything of the last proposal was, by drafter
    share: Share = None
    decided: dict[tuple[Kind, ...], Decision] = field(default_factory=dict)  # by kinds, since that plan was made
    waited: bool = False  # whether it had plain steps because step times were not measured yet
    weighed: tuple[Planner, Sequence[Candidate]] | None = None  # the last drafts considered for it, and the planner

    def weigh(self, planner: Planner, candidates: Sequence[Candidate]) -> None:
        if candidates and (self.weighed is None or len(candidates[0].gains) >= TOLD):
            self.weighed = planner, candidates


class Goodput(Controller):
    """Chooses drafters and budgets by expected tokens per second; the default.

    Args:
        probing: share of time that probing may lose, a fraction. Probing never ends, so no drafter is given up.
        follows: whether estimates after an entirely rejected proposal are kept separately.
    """

    weighs_costs: ClassVar[bool] = True

    def __init__(
        self,
        *,
        probing: float = 0.01,
        clock: Callable[[], float] = time.perf_counter,
        plain_steps: int = 3,
        follows: bool = True,
    ) -> None:
        self._probing = probing
        self._clock = clock
        self._plain_steps = plain_steps
        self._follows = follows
        self._times: StepTimes | None = None
        self._expected: dict[str, Sequence[float]] = {}  # gains of chains, by drafter
        self._pool: dict[tuple[object, Kind], Acceptance] = {}
        self._odds: dict[tuple[object, str], Odds] = {}
        self._own: dict[int, _Own] = {}
        self._planned: tuple[Planner, Plan, tuple[int, ...]] | None = None  # the last plan, and for which requests
        self._kept, self._kept_until = 0, 0.0  # remaining steps of the plan, and its end in seconds
        self._step = 0
        self._steps_s = self._decide_s = 0.0  # seconds of a step, and of deciding
        self._plans_s: deque[float] = deque(maxlen=_PLANS)  # seconds of the last plans
        self._measured = False  # whether costs were measured in the last decision
        self._rested = 0  # steps since the one that was last observed
        self._decided_now = False  # whether the next step to be observed is the one of the last decision
        self._unread: list[StepRecord] = []  # drafted steps since that one, with its decisions
        self._observed = self._plain_at = clock()  # time of that step, and of the last plain step
        self._turn = 0  # chooses the request to probe
        self._credit_s = 0.0  # seconds that probing may lose
        self._price_s = 0.0  # price of the next probe, which waits for credit or its time; 0 without one
        self._probe: tuple[int, float, float] | None = None  # of the running step: request, rate, seconds at stake
        self._plain_left = 0  # remaining plain steps of a probe
        self._balance_s: float | None = None  # seconds that drafts may still lose; None before the first step

    def begin(self, times: StepTimes) -> None:
        self._times, self._kept = times, 0

    def expect(self, survival: Mapping[str, Sequence[float]]) -> None:
        self._expected.update(survival)

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        self._rested, self.rests = self.rests - len(self._unread), 0
        self._decided_now, self._probe = True, None
        self._learn_unread()
        if not self._timing.ready(all(view.params.greedy for view in views)):
            for view in views:
                self._own_of(view).waited = True
            return [Decision(next(iter(view.limits)), NO_DRAFT, reason="measuring") for view in views]
        ids = tuple([view.id for view in views])
        if self._plain_left and self._planned is not None and self._planned[2] == ids:
            self._plain_left -= 1
            return [self._plain(view, "probe") for view in views]
        self._plain_left = 0
        hints = [self._hints(view) for view in views]
        if self._kept > 0 and self._clock() < self._kept_until and self._still_fits(ids):
            self._kept -= 1 + self._rested
            decisions = [self._decided(view, own) for view, own in zip(views, hints, strict=True)]
        else:
            decisions = self._renewed(views, hints)
        if self._probe is None and self._steps_s:
            if any(not each.is_zero for each in decisions):
                self.rests = min(int(self._decide_s / (_DECIDE_SHARE * self._steps_s)), _MOST_RESTS)
            else:
                self.rests = min(int(_PLAIN_RESTS_S / self._steps_s), _PLAIN_RESTS)
        return decisions

    def _still_fits(self, ids: tuple[int, ...]) -> bool:
        planned = self._planned[2] if self._planned is not None else ()
        if min(len(ids), len(planned)) == 1:
            return ids == planned
        return abs(len(ids) - len(planned)) <= _OTHER_BATCH * len(planned)

    def _renewed(self, views: Sequence[RequestView], hints: Sequence[Mapping[str, Hint]]) -> list[Decision]:
        began = self._clock()
        owns = [self._own_of(view) for view in views]
        candidates = [self._candidates(*each) for each in zip(views, hints, strict=True)]
        planner = Planner(self._timing, [view.context for view in views], all(view.params.greedy for view in views))
        plan = planner.best(candidates if self._may_lose else [[] for _ in views])
        before = [_before(*each) for each in zip(owns, candidates, plan.shares, strict=True)]
        plan = planner.settled(plan, before, _HYSTERESIS)
        self._planned = planner, plan, tuple([view.id for view in views])
        decisions = []
        for view, own, share, found, looked_at in zip(views, owns, plan.shares, hints, candidates, strict=True):
            own.share = share
            own.weigh(planner, looked_at)
            decisions.append(self._decision(view, share))
            own.decided = {_kinds(own, found): decisions[-1]}
        self._make_probe(views, decisions, hints, candidates)
        self._plans_s.append(self._clock() - began)
        plan_s = median_low(self._plans_s)
        self._kept = min(int(plan_s / (_PLAN_SHARE * self._steps_s)), _MOST_KEPT) if self._steps_s else 0
        self._kept_until = self._clock() + plan_s / _PLAN_SHARE  # because the plan may make steps longer
        return decisions

    def _decided(self, view: RequestView, hints: Mapping[str, Hint]) -> Decision:
        assert self._planned is not None
        own = self._own_of(view)
        kinds = _kinds(own, hints)
        own.kinds = dict(kinds)
        if kinds not in own.decided:
            planner, plan, ids = self._planned
            others = list(plan.shares)
            others[ids.index(view.id) if view.id in ids else -1] = None  # a new one replaces any other
            candidates = self._candidates(view, hints)
            own.weigh(planner, candidates)
            choice = planner.choice(plan, others, candidates if self._may_lose else [])
            own.decided[kinds] = self._decision(view, choice.share)
        return own.decided[kinds]

    def _decision(self, view: RequestView, share: Share, reason: str = "pays") -> Decision:
        if share is None:
            return self._plain(view)
        assert self._planned is not None
        planner, plan, _ = self._planned
        candidate, nodes = share
        floor = planner.floor(plan, share) if candidate.odds is not None else 0.0
        expected = candidate.expected(nodes)
        speedup = plan.rate / planner.plain.rate * expected / candidate.tokens[nodes]
        return Decision(candidate.drafter, candidate.budget(nodes, floor), (), reason, expected, speedup)

    def _plain(self, view: RequestView, reason: str = "plain") -> Decision:
        assert self._planned is not None
        planner, plan, _ = self._planned
        return Decision(next(iter(view.limits)), NO_DRAFT, (), reason, 1.0, plan.rate / planner.plain.rate)

    def undrafted(self, request: int) -> str:
        own = self._own.get(request)
        if own is None or own.weighed is None:
            waited = own is not None and own.waited
            return "what drafts take was still being measured" if waited else "no drafter found anything to propose"
        planner, candidates = own.weighed
        return f"plain was expected to be faster ({planner.weighed(candidates)})"

    def _hints(self, view: RequestView) -> dict[str, Hint]:
        return {
            drafter: view.hints[drafter]() if drafter in view.hints else Hint()
            for drafter, limits in view.limits.items()
            if not limits.is_zero
        }

    def _candidates(self, view: RequestView, hints: Mapping[str, Hint]) -> list[Candidate]:
        own, room = self._own_of(view), view.remaining - 1
        own.kinds = dict(_kinds(own, hints))
        found = []
        for drafter, hint in hints.items() if room >= 1 else ():
            if not hint.finds:
                continue
            limits = view.limits[drafter].cut(room)
            acceptance = self._acceptance(view, own, (drafter, _kind(own, drafter, hint)))
            gains = acceptance.gains(_most(limits, room))
            late_s = self._timing.catch_up_s(drafter, hint.behind, view.params.greedy)
            odds, drafted = None, None
            if hint.confident and self._token_s(drafter, view) >= _COSTLY_TOKEN_S:
                odds, drafted = self._odds_of(own, drafter).odds, acceptance.drafted(len(gains))
            ahead = max(1, min(room, _AHEAD) // 2)
            setup_s, optimism = late_s / ahead, acceptance.optimism
            found.append(Candidate(drafter, limits, gains, setup_s, late_s, odds, hint.guessed, drafted, optimism))
        return found

    def _token_s(self, drafter: str, view: RequestView) -> float:
        """Seconds of a level of drafting and of a row."""
        times, greedy, context = self._timing, view.params.greedy, [view.context]
        level_s = times.drafting_s(drafter, 1, 2, greedy) - times.drafting_s(drafter, 1, 1, greedy)
        return level_s + max(times.step_s(3, context, greedy) - times.step_s(2, context, greedy), 0.0)

    def _own_of(self, view: RequestView) -> _Own:
        own = self._own.get(view.id)
        if own is None:
            params = view.params
            own = self._own[view.id] = _Own((params.probs_key, params.seeded, params.structured is not None))
        return own

    def _acceptance(self, view: RequestView, own: _Own, kind: Kind) -> Acceptance:
        if kind not in own.acceptance:
            key = own.shaping, kind
            if key not in self._pool:
                rates, chain = self._prior(view, kind)
                # For a kind without verdicts the rates after other outcomes count half.
                if (other := self._pool.get((own.shaping, (kind[0], kind[1] ^ 1)))) is not None:
                    rates = [(one + more) / 2.0 for one, more in zip(rates, other.rates(len(rates)), strict=True)]
                self._pool[key] = Acceptance(rates, chain)
            own.acceptance[kind] = _used(self._pool, key).of_one()
        return own.acceptance[kind]

    def _prior(self, view: RequestView, kind: Kind) -> tuple[list[float], bool]:
        (drafter, hint), limits = (kind[0], kind[1] // 2), view.limits[kind[0]]
        chain = limits.width == 1
        expected = self._expected.get(drafter) if chain and not hint else None
        known = [gain for gain in expected or self._timing.acceptance(drafter, view) if gain > 0.0]
        if chain:
            return [after / before for before, after in itertools.pairwise([1.0, *known])] or [_rate_of(hint)], True
        return known or _tree_of(limits, hint), False

    def _odds_of(self, own: _Own, drafter: str) -> Odds:
        return _used(self._odds, (own.shaping, drafter), Odds)

    def _make_probe(
        self,
        views: Sequence[RequestView],
        decisions: list[Decision],
        hints: Sequence[Mapping[str, Hint]],
        candidates: Sequence[Sequence[Candidate]],
    ) -> None:
        assert self._planned is not None
        planner, plan, _ = self._planned
        drafts = any(share is not None for share in plan.shares)
        age_s = self._clock() - self._plain_at
        if drafts and age_s >= _PLAIN_AGE_S:
            # Plain steps still emit tokens, which reduces what they lose. The first takes longer than the next ones.
            plain = planner.plain
            lost_s = self._plain_steps * max(plain.seconds - plain.tokens / plan.rate, _LEAST_LOST * plain.seconds)
            if lost_s <= _PLAIN_SHARE * self._probing * age_s:
                self._probe = views[0].id, plan.rate, 0.0
                self._plain_left = self._plain_steps - 1
                decisions[:] = [self._plain(view, "probe") for view in views]
                return
        if self._credit_s < self._price_s or not self._credit_s:
            return
        self._turn += 1
        number = self._turn % len(views)
        view, now = views[number], plan.shares[number]
        others: list[Share] = list(plan.shares)
        others[number] = None
        hoped = [self._hoped(view, each, now, hints[number]) for each in candidates[number]]
        choice = planner.choice(plan, others, [each for each in hoped if each is not None])
        mine = planner.valued(plan, others, now)
        if choice.share is None or choice.value <= mine.value:
            self._price_s = 0.0
            return
        candidate, _ = choice.share
        late_s = candidate.catch_up_s - candidate.setup_s  # only in this step
        gain = now[0].tokens[now[1]] - 1.0 if now is not None else 0.0
        stake_s = max(choice.seconds - mine.seconds + late_s + gain / plan.rate, 0.0)
        price_s = stake_s + (median_low(self._plans_s) if self._plans_s else 0.0)  # its result leads to a new plan
        # A single request after some first tokens, because these say little about later ones.
        ready = len(views) > 1 or view.counters.emitted_tokens >= view.id * 29 % _READY_WITHIN
        if price_s > self._credit_s or not ready:
            self._price_s = price_s
            return
        self._price_s = 0.0
        self._credit_s -= price_s
        self._probe = view.id, plan.rate, stake_s
        decisions[number] = self._decision(view, choice.share, "probe")

    def _hoped(self, view: RequestView, each: Candidate, now: Share, hints: Mapping[str, Hint]) -> Candidate | None:
        own, beyond = self._own_of(view), 0
        most = _most(each.limits, view.remaining - 1)
        if now is not None and now[0].drafter == each.drafter:
            beyond = now[1]
            if each.limits.width == 1 or beyond >= most:
                return None
        acceptance = own.acceptance[each.drafter, _kind(own, each.drafter, hints[each.drafter])]
        gains = acceptance.hoped(most, beyond, self._step)
        drafted = acceptance.drafted(len(gains)) if each.drafted else None
        return Candidate(each.drafter, each.limits, gains, each.setup_s, each.catch_up_s, each.odds, drafted=drafted)

    def observe(self, record: StepRecord) -> None:
        if record.nodes and not self._decided_now:  # only its verdicts are learned
            self._unread.append(record)
            return
        steps, now = 1 + self._rested, self._clock()
        self._decided_now, self._rested = False, 0
        self._step += steps
        self._timing.observe(record, steps, self._decide_s / (1 + self.rests))
        if record.settled and not record.prefill:
            rest_s = record.total_s - record.decide_s
            # It takes more only where costs are measured in it, which is not done at two decisions in a row.
            self._measured = record.decide_s > rest_s and not self._measured
            decide_s = min(self._decide_s if self._measured else record.decide_s, rest_s)
            total_s = rest_s + decide_s
            self._steps_s += _SLOW * (total_s - self._steps_s) if self._steps_s else total_s
            self._decide_s += _SLOW * (decide_s - self._decide_s)
            took = total_s if steps == 1 else min(steps * total_s, now - self._observed)
            earned_s = self._probing * took * (_PLAIN_SHARE if record.nodes else 1.0)
            if not record.nodes:
                self._plain_at = now
            earned_s += max(_SAVED_TIMES * self._probing * self._keep_balance(record, total_s, took), -earned_s)
            self._credit_s = min(self._credit_s + earned_s, max(_CREDIT_STEPS * self._steps_s, self._price_s))
        self._observed = now
        for step in record.requests:
            if step.id not in self._own:
                continue
            if self._probe is not None and self._probe[0] == step.id:
                # The value of the emitted tokens is refunded, so that a probe costs only the time that it lost.
                _, rate, stake_s = self._probe
                self._credit_s += min(max(step.emitted - 1, 0) / rate, stake_s)
                self._kept = 0  # its result may change the plan
            self._learn(self._own[step.id], step)
        if len(self._own) > 2 * len(record.requests) + 8:
            running = {step.id for step in record.requests}
            self._own = {number: own for number, own in self._own.items() if number in running}

    def _learn_unread(self) -> None:
        for record in self._unread:
            self._step += 1
            self._kept -= 1
            for step in record.requests:
                if step.id in self._own:
                    self._learn(self._own[step.id], step, decided=False)
        self._unread.clear()

    @property
    def _may_lose(self) -> bool:
        """Whether drafts that pay in expectation are made; after losses only probes are made."""
        return self._balance_s is None or self._balance_s > 0.0

    def _keep_balance(self, record: StepRecord, total_s: float, took_s: float) -> float:
        """Add and return the seconds that a step saved over plain decoding, or lost: where plain steps take 3 ms a
        token, a step of 6 ms that emitted one token lost 3 ms, one that emitted three saved 3 ms.
        """
        if self._planned is None:
            return 0.0
        plain = self._planned[0].plain
        step_s = len(record.requests) / plain.rate
        if self._balance_s is None:
            self._balance_s = _FIRST_LOSS * step_s
        could = self._may_lose
        saved_s = 0.0
        if record.nodes and self._probe is None:
            greedy = all(step.greedy for step in record.requests)
            late_s = sum(self._timing.catch_up_s(each.drafter, each.behind, greedy) for each in record.drafting)
            saved_s = sum(step.emitted for step in record.requests) / plain.rate - (total_s - late_s)
        self._balance_s = min(self._balance_s + _LOSS_SHARE * took_s + saved_s, _MOST_SAVED * step_s)
        if could != self._may_lose:
            self._kept = 0  # a new plan
        return saved_s

    def _learn(self, own: _Own, step: RequestStep, decided: bool = True) -> None:
        for share in step.shares:
            kind = share.drafter, own.kinds.get(share.drafter, 0)
            if not decided:
                # The hint may be another one by now. A drafter without kinds of hints has only its last outcome.
                if kind[1] > 1:
                    continue
                kind = share.drafter, int(own.accepted.get(share.drafter, False))
            if kind not in own.acceptance:
                continue
            budget = step.decision.budget if step.decision is not None else NO_DRAFT
            most = min(budget.depth, budget.nodes) if budget.floor > 0.0 else 0  # it may have stopped before
            own.acceptance[kind].learn(share, self._step, most)
            own.accepted[share.drafter] = bool(share.path) or not self._follows
            if (own.shaping, kind) in self._pool:
                _used(self._pool, (own.shaping, kind)).learn(share, self._step, most)
                if share.confidence:
                    self._odds_of(own, share.drafter).learn(share)

    @property
    def _timing(self) -> StepTimes:
        assert self._times is not None, "an engine says what steps take when it takes a controller on"
        return self._times


def _used(found: dict[Key, Value], key: Key, made: Callable[[], Value] | None = None) -> Value:
    """An entry of a table with least-recently-used eviction."""
    value = made() if made is not None and key not in found else found.pop(key)
    found[key] = value
    while len(found) > _MOST_KINDS:
        del found[next(iter(found))]
    return value


def _before(own: _Own, candidates: Sequence[Candidate], now: Share) -> Share:
    if not own.decided or own.share is None:
        return None if own.decided else now
    drafter, nodes = own.share[0].drafter, own.share[1]
    return next(((each, nodes) for each in candidates if each.drafter == drafter and nodes <= len(each.gains)), now)


def _kinds(own: _Own, hints: Mapping[str, Hint]) -> tuple[Kind, ...]:
    """By drafter; -1 where it has nothing to propose."""
    return tuple([(drafter, _kind(own, drafter, hint) if hint.finds else -1) for drafter, hint in hints.items()])


def _kind(own: _Own, drafter: str, hint: Hint) -> int:
    """Hints of kind 0 and 1 are 0 and 2 after a proposal that was rejected entirely, else 1 and 3."""
    return 2 * hint.kind + own.accepted.get(drafter, False)


def _most(limits: Budget, room: int) -> int:
    return min(limits.nodes, room if limits.width == 1 else SIZES[-1], SIZES[-1])


def _rate_of(hint: int) -> float:
    return 1.0 - (1.0 - UNKNOWN_RATE) * 2.0 / (1 + max(hint, 1))


def _tree_of(limits: Budget, hint: int) -> list[float]:
    """Gains of a tree's nodes by the kind of a hint: with one, the likeliest nodes are one path."""
    if hint:
        return [_rate_of(hint) ** (1 + place) for place in range(min(limits.nodes, 64))]
    return [UNKNOWN_RATE ** (1 + place // limits.width) / limits.width for place in range(min(limits.nodes, 64))]
