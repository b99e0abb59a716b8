"""The goodput controller: at every step the drafters and budgets from which most tokens a second are expected.

What a decision looks at. Everything is known before the step drafts anything, so whether a draw exists never depends
on its token (docs/concepts.md, predictable choice). Tokens of greedy and seeded requests hang on no budget, and no two
others share noise in an engine, so what became of one request's drafts may decide about any other.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias, TypeVar

from truedraft.control.allocation import STOPS, Allocation, Allocator, Candidate, Share
from truedraft.control.base import Controller, StepTimes
from truedraft.control.survival import UNKNOWN_RATE, ChainGains, Exploration, Gains, Odds, TreeGains, UpperBound
from truedraft.core.budget import NO_DRAFT, Budget, Decision, Hint, RequestView
from truedraft.core.stats import RequestStep, StepRecord

_PRIOR_WEIGHT, _POOL_MEMORY = 4.0, 200.0  # verdicts
_OWN_MEMORY = 12.0  # verdicts
_MOST_KINDS = 512  # of guesses, over drafters and sampling options, of which it is known how good they are
_AHEAD = 32  # tokens over which catching up must pay, where so many may come
_LOOK_SHARE = 0.003  # of time that deciding may take before decisions are kept for several steps
_LONGEST_HOLD = 96
_DECIDE_SHARE, _MOST_HELD = 0.02, 2  # of time that deciding may take where drafts are made, and steps that it rests for
_OTHER_BATCH = 0.34  # change of the number of requests after which prices are others
_LOOKS, _LOOKS_S = (8, 32), 0.02  # steps, at first and at most, or seconds, until who drafts nothing is looked at
_SURPRISE = 0.15  # change of a first node's gain after which decisions are not kept
_CREDIT_STEPS = 4.0  # steps whose time may be lost by probing at once
_PLAIN_AGE_S, _PLAIN_STEPS = 0.25, 3  # after which what a plain step takes is measured again, and by how many
_LEAST_LOST = 0.1  # of a plain step, for the first of them finds caches cold
_READY_WITHIN = 48  # tokens
_PROBED_AT_MOST = 4  # requests that are looked at before one is probed with
_DEAR_LEVEL_S = 5e-4  # of a token drafted, from which it pays to look how likely tokens are: a tenth of it, measured
_SLOW = 0.1  # share by which one step moves what steps are known to take

Key = TypeVar("Key")
Value = TypeVar("Value")
Kind: TypeAlias = tuple[str, int]
"""What a request's estimates are kept apart by: drafter and kind of hint; the pool's by sampling options too."""


@dataclass(slots=True, eq=False)
class _Probing:
    """What probing may still lose.

    Attributes:
        credit_s: seconds, by drafting.
        plain_credit_s: by plain decoding where drafting is best, which would leave nothing for the other.
        plain_at: when a step was last plain decoding.
        request: that the running step probes with; None where it does not.
        rate: tokens a second that the step was expected to emit without the probe.
        staked_s: seconds taken from the credit for it.
        wanted_s: that a hopeful probe would take which had to wait, for credit or for its time; 0 without one.
    """

    plain_at: float
    credit_s: float = 0.0
    plain_credit_s: float = 0.0
    request: int | None = None
    rate: float = 0.0
    staked_s: float = 0.0
    wanted_s: float = 0.0

    def earn(self, seconds: float, most: float, *, drafted: bool, now: Callable[[], float]) -> None:
        """A step was made, of which so many seconds may be lost later; at `most` that many in all, or one probe."""
        plain = min(seconds / 2.0, max(most - self.plain_credit_s, 0.0))
        self.plain_credit_s += plain
        self.credit_s = min(self.credit_s + seconds - plain, max(most, self.wanted_s))
        if not drafted:
            self.plain_at = now()

    def stake(self, request: int, rate: float, seconds: float) -> None:
        """The running step probes."""
        self.credit_s -= seconds
        self.request, self.rate, self.staked_s = request, rate, seconds

    def settle(self, step: RequestStep) -> None:
        """What the tokens were worth comes back, so only what was lost was spent."""
        self.request = None
        self.credit_s += min(max(step.emitted - 1, 0) / self.rate, self.staked_s)


@dataclass(slots=True, eq=False)
class _Own:
    """What is kept of a request while it runs.

    Attributes:
        shaping: its sampling options that acceptance hangs on.
        gains: estimates from its own verdicts.
        hints: kinds of hints at the last decision, of the drafters that give any.
        share: what the joint allocation gave it.
        decision: the last, probes apart.
        drafts: whether it drafted in the last step, probes apart.
        stale: whether it must choose again, whatever the hints.
        expected: gains of first nodes at the last decision.
        surplus: tokens that its decision brings beyond its price, see `Allocator.surplus`.
        by_hints: decisions at the prices of the last allocation, and their surplus, by kinds of hints.
        unhinted: candidates at that allocation, of the drafters that give no hints.
    """

    shaping: object
    gains: dict[Kind, Gains] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    share: tuple[str, int] | None = None
    decision: Decision | None = None
    drafts: bool = False
    stale: bool = False
    expected: dict[Kind, float] = field(default_factory=dict)
    surplus: float = 0.0
    by_hints: dict[tuple[int, ...], tuple[Decision, float]] = field(default_factory=dict)
    unhinted: dict[str, Candidate] = field(default_factory=dict)


class Goodput(Controller):
    """Chooses drafters and budgets by expected tokens per second; the default.

    Args:
        exploration: how optimistic probes are.
        probing: share of time that probing may lose, a fraction. It never ends, so no drafter is given up for ever.
        hysteresis: gain in goodput, a fraction, below which nothing is changed, for costs are not known better.
        clock: seconds.
    """

    weighs_costs: ClassVar[bool] = True

    def __init__(
        self,
        exploration: Exploration | None = None,
        *,
        probing: float = 0.01,
        hysteresis: float = 0.02,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._exploration = exploration or UpperBound()
        self._share = probing
        self._hysteresis = hysteresis
        self._clock = clock
        self._times: StepTimes | None = None
        self._expected: dict[str, Sequence[float]] = {}  # gains of chains by drafter
        self._pool: dict[tuple[object, Kind], Gains] = {}
        self._odds: dict[tuple[object, str], Odds] = {}
        self._own: dict[int, _Own] = {}
        self._probing = _Probing(clock())
        self._joint: tuple[Allocator, Allocation] | None = None
        self._batch: tuple[int, ...] = ()  # requests of that allocation
        self._speedup = 1.0  # that is expected of it
        self._start_tokens = 0.0  # see `Allocator.start_tokens`
        self._probes = 0  # that the running step makes
        self._turn = 0  # whose turn it is to be probed with
        self._step = 0
        self._left = 0  # steps for which the allocation is kept
        self._plain_left = 0  # plain steps to come before it is followed
        self._every = _LOOKS[0]  # steps between looks at requests that draft nothing; more, the longer nothing changes
        self._idle = 0  # until the next one
        self._rested = 0  # steps since the one that was last observed
        self._plain_rest = False  # whether nothing was drafted in these
        self._observed = clock()
        self._look_s = 0.0  # that deciding takes
        self._steps_s = 0.0  # that a step takes
        self._decide_s = 0.0  # that asking takes, all that the engine does for it included

    def begin(self, times: StepTimes) -> None:
        self._times = times

    def expect(self, survival: Mapping[str, Sequence[float]]) -> None:
        self._expected.update(survival)

    # ------------------------------------------------------------------------------------ deciding

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        self._rested, self.rests = self.rests, 0
        decisions = self._decided(views)
        kept = self._left > 0 and self._idle > 1 and not (self._probes or self._plain_left)
        self._plain_rest = kept and all(each.budget.nodes == 0 for each in decisions)
        if kept:
            self.rests = min(self._idle - 1, self._left)
            if not self._plain_rest:
                self.rests = min(self.rests, self._hold())
            self._left -= self.rests
        return decisions

    def _hold(self) -> int:
        """Steps behind one with drafts in which its decisions are kept, lest deciding take too much of the time."""
        return min(int(self._decide_s / (_DECIDE_SHARE * self._steps_s)), _MOST_HELD) if self._steps_s else 0

    def _decided(self, views: Sequence[RequestView]) -> list[Decision]:
        if self._probes:  # of a step that failed
            self._probes = 0
            self._probing.request = None
        if self._plain_left and self._batch == tuple([view.id for view in views]):
            self._plain_left -= 1
            if not self._plain_left:
                self._left = 0  # what they took may change all
            return [self._plain(view, "probe") for view in views]
        owns = [self._own_of(view) for view in views]
        joint = self._joint
        if joint is None or self._left <= 0 or not self._still_fits(views):
            return self._renew(views, owns)
        self._left -= 1
        self._idle -= 1 + self._rested
        # The engine breaks a rest where hints change.
        look, news = self._idle <= 0 or (self._rested > 0 and self._plain_rest), False
        for view, own in zip(views, owns, strict=True):
            gone = own.decision is not None and not own.decision.is_zero and own.decision.drafter not in view.limits
            own.stale |= own.decision is None or gone
            if own.stale or (own.hints and (own.drafts or look)):
                news |= self._choose_again(view, own, joint)
        if look:
            if _are_ready(views) and 0.0 < self._probing.wanted_s <= self._probing.credit_s:
                self._left = 0
            self._every = _LOOKS[0] if news else min(2 * self._every, _LOOKS[1])
            self._idle = self._look_again()
        return self._worth_starting(views, owns)

    def _worth_starting(self, views: Sequence[RequestView], owns: Sequence[_Own]) -> list[Decision]:
        """The decisions of requests, if together they bring more than a step with drafts takes longer than without."""
        together = math.fsum(own.surplus for own in owns) > self._start_tokens
        decisions = []
        for view, own in zip(views, owns, strict=True):
            assert own.decision is not None
            own.drafts = together and not own.decision.is_zero
            decisions.append(own.decision if own.drafts or own.decision.is_zero else self._plain(view))
        return decisions

    def _look_again(self) -> int:
        """Steps until requests that draft nothing are looked at."""
        return max(1, min(self._every, int(_LOOKS_S / self._steps_s))) if self._steps_s else 1

    def _still_fits(self, views: Sequence[RequestView]) -> bool:
        """Whether the last allocation says anything of a batch: of about as many requests, and alone the same one."""
        now, then = len(views), len(self._batch)
        if min(now, then) == 1:
            return now == then and views[0].id == self._batch[0]
        return abs(now - then) <= _OTHER_BATCH * then

    def _choose_again(self, view: RequestView, own: _Own, joint: tuple[Allocator, Allocation]) -> bool:
        """Choose at the prices of an allocation that is kept, where a request is new or drafters know other things.

        Returns whether there was anything to choose.
        """
        hints = tuple([_kind_of(view.hints[drafter]()) for drafter in own.hints])
        if own.stale:
            own.by_hints.clear()
        elif hints == tuple(own.hints.values()):
            return False
        own.hints = dict(zip(own.hints, hints, strict=True))
        known = own.by_hints.get(hints)
        if known is None:
            share = joint[0].alone(joint[1], self._candidates(view, own))
            decision = self._decision(view, share, joint[0].floor(joint[1], share))
            known = own.by_hints[tuple(own.hints.values())] = decision, joint[0].surplus(joint[1], share)
            own.share = None if share is None else (share[0].drafter, share[1])
        (own.decision, own.surplus), own.stale = known, False
        return True

    def _renew(self, views: Sequence[RequestView], owns: Sequence[_Own]) -> list[Decision]:
        """Decisions from scratch, and for how many steps they are kept."""
        began = self._clock()
        self._every, self._plain_left = _LOOKS[0], 0
        self._idle = self._look_again()
        for own in owns:
            own.unhinted.clear()
        contexts = [view.context for view in views]
        allocator = Allocator(self._timing, contexts, all(view.params.greedy for view in views))
        known = [self._candidates(*each) for each in zip(views, owns, strict=True)]
        best = self._settled(allocator, allocator.best(known), known, owns)
        self._speedup = best.rate / allocator.plain().rate
        self._start_tokens = allocator.start_tokens()
        for view, own, share in zip(views, owns, best.shares, strict=True):
            own.share = None if share is None else (share[0].drafter, share[1])
            own.decision, own.stale = self._decision(view, share, allocator.floor(best, share)), False
            own.surplus, own.drafts = allocator.surplus(best, share), share is not None
            own.by_hints = {tuple(own.hints.values()): (own.decision, own.surplus)}
        decisions = self._with_probes(views, owns, allocator, best, known)
        self._joint, self._batch = (allocator, best), tuple([view.id for view in views])
        took = self._clock() - began
        self._look_s += _SLOW * (took - self._look_s) if self._look_s else took
        self._left = min(int(self._look_s / (_LOOK_SHARE * self._steps_s)), _LONGEST_HOLD) if self._steps_s else 0
        return decisions

    def _decision(self, view: RequestView, share: Share, floor: float) -> Decision:
        if share is None:
            return self._plain(view)
        candidate, nodes = share
        tokens = 1.0 + sum(candidate.gains[:nodes])
        return Decision(candidate.drafter, candidate.budget(nodes, floor), (), "pays", tokens, self._speedup)

    def _plain(self, view: RequestView, reason: str = "plain") -> Decision:
        return Decision(next(iter(view.limits)), NO_DRAFT, (), reason, 1.0, self._speedup)

    def _own_of(self, view: RequestView) -> _Own:
        own = self._own.get(view.id)
        if own is None:
            params = view.params
            own = self._own[view.id] = _Own((params.probs_key, params.seeded, params.structured is not None))
        return own

    def _candidates(self, view: RequestView, own: _Own) -> list[Candidate]:
        """The drafters that may draft for a request, as far as its own verdicts say, too."""
        room = view.remaining - 1
        found = []
        for drafter, limits in view.limits.items():
            if limits.is_zero or room < 1:
                continue
            if drafter in own.unhinted:
                found.append(own.unhinted[drafter])
                continue
            hint = view.hints[drafter]() if drafter in view.hints else Hint()
            if hint.kind or not hint.finds or drafter in own.hints:
                own.hints[drafter] = _kind_of(hint)
            if not hint.finds:
                continue
            kind: Kind = drafter, hint.kind
            gains = self._gains_of(view, own, kind, limits)
            most = min(limits.nodes, room, STOPS[-1]) if limits.width == 1 else min(limits.nodes, STOPS[-1])
            late_s, ahead = self._timing.catch_up_s(drafter, hint.behind), max(1, min(room, _AHEAD) // 2)
            candidate = Candidate(drafter, limits.cut(room), gains.gains(most), late_s, ahead, hint.kind)
            candidate.guessed = hint.guessed
            if hint.confident and self._level_s(drafter, view.params.greedy) >= _DEAR_LEVEL_S:
                candidate.odds = self._odds_of(own, drafter).odds
            own.expected[kind] = candidate.gains[0]
            found.append(candidate)
            if drafter not in own.hints:
                own.unhinted[drafter] = candidate
        return found

    def _level_s(self, drafter: str, greedy: bool) -> float:
        """Seconds that a drafter takes for one more token of one request."""
        return self._timing.drafting_s(drafter, 1, 2, greedy) - self._timing.drafting_s(drafter, 1, 1, greedy)

    def _gains_of(self, view: RequestView, own: _Own, kind: Kind, limits: Budget) -> Gains:
        gains = own.gains.get(kind)
        if gains is None:
            pool = self._pooled(view, own, kind, limits)
            gains = own.gains[kind] = pool.of_one(_OWN_MEMORY)
        return gains

    def _odds_of(self, own: _Own, drafter: str) -> Odds:
        key = own.shaping, drafter
        if key not in self._odds:
            self._odds[key] = Odds()
        return _used(self._odds, key)

    def _pooled(self, view: RequestView, own: _Own, kind: Kind, limits: Budget) -> Gains:
        key = own.shaping, kind
        if key not in self._pool:
            chain = limits.width == 1
            told = self._expected.get(kind[0]) if chain and not kind[1] else None
            known = [gain for gain in told or self._timing.acceptance(kind[0], view) if gain > 0.0]
            if chain:
                rates = [after / before for before, after in itertools.pairwise([1.0, *known])] or [_rate_of(kind[1])]
                self._pool[key] = ChainGains(rates, _PRIOR_WEIGHT, _POOL_MEMORY)
            else:
                self._pool[key] = TreeGains(known or _tree_of(limits, kind[1]), _PRIOR_WEIGHT, _POOL_MEMORY)
        return _used(self._pool, key)

    def _settled(
        self, allocator: Allocator, best: Allocation, known: Sequence[Sequence[Candidate]], owns: Sequence[_Own]
    ) -> Allocation:
        """The allocation of before, where it fits and the best one is hardly better."""
        shares: list[Share] = []
        for own, candidates in zip(owns, known, strict=True):
            if own.decision is None:
                return best
            if own.share is None:
                shares.append(None)
                continue
            drafter, nodes = own.share
            candidate = next((each for each in candidates if each.drafter == drafter), None)
            if candidate is None or len(candidate.gains) < nodes:
                return best
            shares.append((candidate, nodes))
        before = allocator.priced(shares)
        return before if before.rate * (1.0 + self._hysteresis) >= best.rate else best

    # ------------------------------------------------------------------------------------ probing

    def _with_probes(
        self,
        views: Sequence[RequestView],
        owns: Sequence[_Own],
        allocator: Allocator,
        best: Allocation,
        every: Sequence[Sequence[Candidate]],
    ) -> list[Decision]:
        """The decisions of a step, some of them changed to learn something where credit and hope suffice."""
        decisions = [own.decision for own in owns if own.decision is not None]
        plain = self._plain_probe(views, allocator, best)
        if plain is not None:
            return plain
        probing = self._probing
        probing.wanted_s = 0.0
        hope: tuple[float, int, Candidate, int, float] | None = None  # the greatest
        self._turn += _PROBED_AT_MOST
        if probing.credit_s <= 0.0 or probing.request is not None:
            return decisions
        for place in range(min(_PROBED_AT_MOST, len(owns))):
            number = (self._turn + place) % len(owns)
            drafting = decisions[number].drafter if not decisions[number].is_zero else None
            for candidate in every[number]:
                if candidate.drafter == drafting:
                    found = self._larger(allocator, best, number, owns[number], candidate)
                else:
                    hoped = self._hoped(owns[number], candidate)
                    found = allocator.hope(best, number, candidate, hoped) if hoped > 0.0 else None
                if found is None:
                    continue
                value, nodes, stake_s = found
                if value > 0.0 and (hope is None or value > hope[0]):
                    hope = value, number, candidate, nodes, stake_s
        if hope is None:
            return decisions
        _, number, candidate, nodes, stake_s = hope
        if stake_s > probing.credit_s or not _are_ready(views):
            probing.wanted_s = stake_s
        else:
            probing.stake(views[number].id, best.rate, stake_s)
            self._probes += 1
            tokens = 1.0 + sum(candidate.gains[:nodes])
            speedup = self._speedup
            decisions[number] = Decision(candidate.drafter, candidate.budget(nodes), (), "probe", tokens, speedup)
        return decisions

    def _larger(
        self, allocator: Allocator, best: Allocation, number: int, own: _Own, candidate: Candidate
    ) -> tuple[float, int, float] | None:
        """What a request's tree might bring if all of it were drafted; None of chains, whose first tokens tell it."""
        share, limits = best.shares[number], candidate.limits
        estimate = own.gains.get((candidate.drafter, candidate.hint))
        most = min(limits.nodes, STOPS[-1])
        if share is None or limits.width == 1 or estimate is None or share[1] >= most:
            return None
        more = most - share[1]
        hoped = self._exploration.hoped(*estimate.beyond(share[1], most, self._step))
        seconds = allocator.step_s(best.rows + more) - allocator.step_s(best.rows)
        each = 1.0 + sum(candidate.gains[: share[1]])
        value = more * hoped * (best.tokens / len(best.shares) / each) - best.rate * seconds
        return value, most, seconds

    def _plain_probe(
        self, views: Sequence[RequestView], allocator: Allocator, best: Allocation
    ) -> list[Decision] | None:
        """Plain decoding for some steps although drafting is best, lest what it takes be known from long ago alone.

        The first of them takes longer than those that follow: the processor's caches hold what drafting needs.
        """
        probing, plain = self._probing, allocator.plain()
        if best.tokens <= plain.tokens or probing.request is not None:
            return None
        # They are worth their tokens. Where drafting hardly pays little is lost, and what plain steps take counts most.
        lost_s = max(plain.seconds - plain.tokens / best.rate, _LEAST_LOST * plain.seconds)
        stake_s = _PLAIN_STEPS * lost_s
        if stake_s > probing.plain_credit_s or self._clock() - probing.plain_at < _PLAIN_AGE_S:
            return None
        probing.plain_credit_s -= stake_s
        probing.stake(views[0].id, best.rate, 0.0)
        self._probes += 1
        self._plain_left = _PLAIN_STEPS - 1
        return [self._plain(view, "probe") for view in views]

    def _hoped(self, own: _Own, candidate: Candidate) -> float:
        """The gain to hope for of a candidate's first node; 0 where there is no more to hope for than is expected."""
        estimate = own.gains.get((candidate.drafter, candidate.hint))
        if estimate is None or not candidate.gains:
            return 0.0
        hoped = self._exploration.hoped(*estimate.outlook(self._step))
        return hoped if hoped > candidate.gains[0] else 0.0

    # ------------------------------------------------------------------------------------ learning

    def observe(self, record: StepRecord) -> None:
        steps, now = 1 + self._rested, self._clock()
        self._step += steps
        if self._times is not None:
            self._times.observe(record)
        if not record.prefill:
            self._steps_s += _SLOW * (record.total_s - self._steps_s) if self._steps_s else record.total_s
            took = record.total_s if steps == 1 else min(steps * record.total_s, now - self._observed)
            self._decide_s += _SLOW * (record.decide_s - self._decide_s)
            seconds, most_s = self._share * took, _CREDIT_STEPS * self._steps_s
            self._probing.earn(seconds, most_s, drafted=record.nodes > 0, now=self._clock)
        self._observed = now
        for step in record.requests:
            if (step.shares or self._probes) and step.id in self._own:
                self._observe_one(self._own[step.id], step)
        if len(self._own) > 2 * len(record.requests) + 8:
            running = {step.id for step in record.requests}
            self._own = {number: own for number, own in self._own.items() if number in running}

    def _observe_one(self, own: _Own, step: RequestStep) -> None:
        if self._probing.request == step.id:
            self._probing.settle(step)
            self._probes -= 1
            self._choose_anew(own)
        if step.shares:
            self._learn(own, step)

    def _choose_anew(self, own: _Own) -> None:
        """Let a request choose again, at the prices that are; alone at new ones, as soon as that is not too dear."""
        if len(self._batch) == 1:
            dear = self._look_s / (_DECIDE_SHARE * self._steps_s) if self._steps_s else 0.0
            self._left = min(self._left, int(dear))
        else:
            own.stale = True
            own.unhinted.clear()

    def _learn(self, own: _Own, step: RequestStep) -> None:
        for share in step.shares:
            kind = share.drafter, own.hints.get(share.drafter, 0)
            if kind in own.gains:
                budget = step.decision.budget if step.decision is not None else NO_DRAFT
                stopped = share.depth < min(budget.depth, budget.nodes) and len(share.path) == share.depth
                stopped = stopped and budget.floor > 0.0
                key = own.shaping, kind
                pool = _used(self._pool, key) if key in self._pool else None
                if pool is not None:
                    pool.judge(own.gains[kind], share)
                own.gains[kind].learn(share, self._step, stopped)
                if abs(own.gains[kind].first - own.expected.get(kind, 0.0)) > _SURPRISE:
                    self._choose_anew(own)
                if pool is not None:
                    pool.learn(share, self._step, stopped)
                    if share.confidence:
                        self._odds_of(own, share.drafter).learn(share)

    @property
    def _timing(self) -> StepTimes:
        assert self._times is not None, "an engine says what steps take when it takes a controller on"
        return self._times


def _used(found: dict[Key, Value], key: Key) -> Value:
    """One of what was learned of sampling options; of too many, as clients may ask with ever new ones, those go that
    were not used for longest."""
    found[key] = value = found.pop(key)
    while len(found) > _MOST_KINDS:
        del found[next(iter(found))]
    return value


def _kind_of(hint: Hint) -> int:
    """The kind of a hint; -1 where there is nothing to propose."""
    return hint.kind if hint.finds else -1


def _are_ready(views: Sequence[RequestView]) -> bool:
    """Whether it is time to probe: with one request from one of its tokens on, another one for each request.

    The first steps of an answer say little of those that follow: of far-fetched prompts the first drafts are rejected
    nearly always, and once the answer has found its way nearly never.
    """
    return len(views) > 1 or views[0].counters.emitted_tokens >= views[0].id * 29 % _READY_WITHIN


def _rate_of(hint: int) -> float:
    """Acceptance of a drafted token of which nobody knows more than the kind of a hint: a longer match is better."""
    return 1.0 - (1.0 - UNKNOWN_RATE) * 2.0 / (1 + max(hint, 1))


def _tree_of(limits: Budget, hint: int) -> list[float]:
    """Gains of a tree's nodes of which nobody knows more than the kind of a hint: then the likeliest are one path."""
    if hint:
        return [_rate_of(hint) ** (1 + place) for place in range(min(limits.nodes, 64))]
    return [UNKNOWN_RATE ** (1 + place // limits.width) / limits.width for place in range(min(limits.nodes, 64))]
