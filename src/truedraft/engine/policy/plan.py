"""What a step drafts: for each request the drafter and the size with the most expected tokens per second.

Goodput (Liu et al., arXiv 2406.14066) is expected tokens over expected seconds. A request's tokens are one plus the
gains of its drafted nodes.

For several requests the geometric mean of their tokens counts. Their sum would let one request wait through long steps
because others have many accepted tokens.

Worked example: one request, gains 0.6 and 0.3, a step of 10 ms with one row and 11 ms with two or three, 1 ms for
drafting one token and 2 ms for two. Plain decoding emits 100 tokens a second, one drafted token 1.6 / 12 ms = 133, two
1.9 / 13 ms = 146: two it is. Of two requests of which one emits 4 tokens and the other 1, the geometric mean is 2, so
together they count as 4 tokens and not as 5.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from truedraft.core.budget import Budget
from truedraft.engine.policy.base import StepTimes

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of nodes considered; steps cost about the same in between."""
TOLD = 4
"""Tokens of the drafts with costs in reports, where the answer has room for as many."""
_ROUNDS = 3  # of choices, each at the rate of the plan before


@dataclass(slots=True, eq=False)
class Candidate:
    """A drafter that may draft for a request."""

    drafter: str
    limits: Budget  # the drafter's, cut to the rest of the answer
    gains: Sequence[float]  # of its nodes, in the order of the budget, falling
    setup_s: float = 0.0  # seconds of catching up that are charged to one step
    catch_up_s: float = 0.0  # all seconds of catching up
    odds: tuple[float, float] | None = None  # how its token probabilities predict acceptance; None: it cannot stop
    guessed: float = 0.0  # share of a chain's tokens, without its first, that take no level of drafting
    drafted: Sequence[float] | None = None  # share of proposals with so many tokens, where it can stop before
    optimism: float = 1.0  # factor on the gains by which drafts are chosen
    sizes: Sequence[int] = field(init=False)
    tokens: Sequence[float] = field(init=False)  # hoped for in a step with 0, 1, 2, ... nodes
    logs: Sequence[float] = field(init=False)

    def __post_init__(self) -> None:
        most = len(self.gains)
        # One that can stop may be as long as it is likely.
        self.sizes = [*itertools.takewhile(lambda size: size < most, SIZES if self.drafted is None else ()), most]
        self.tokens = list(itertools.accumulate([min(self.optimism * each, 1.0) for each in self.gains], initial=1.0))
        self.logs = list(map(math.log, self.tokens))

    def nearest(self, size: int) -> int:
        return min(size, len(self.gains)) if self.drafted is None else len(self.gains)

    def expected(self, nodes: int) -> float:
        return 1.0 + sum(self.gains[:nodes])

    def rows(self, nodes: int) -> float:
        """Expected number of drafted nodes."""
        return nodes if self.drafted is None else sum(self.drafted[:nodes])

    def levels(self, nodes: int) -> float:
        depth = min(self.rows(nodes), self.limits.depth)
        return depth - self.guessed * (depth - 1) if self.guessed else depth

    def budget(self, nodes: int, floor: float = 0.0) -> Budget:
        """The budget for `nodes` nodes; with a floor of survival, as many as pay."""
        limits = self.limits
        if self.odds is None or not floor:
            return Budget(min(nodes, limits.depth), limits.width, nodes, limits.min_probability)
        most = min(limits.nodes, limits.depth)
        return Budget(most, 1, most, limits.min_probability, min(floor, 1.0), self.odds)


Share: TypeAlias = tuple[Candidate, int] | None
"""What is drafted for one request: the candidate and the number of nodes; None is nothing."""


@dataclass(slots=True, eq=False)
class Plan:
    """What a step drafts; `tokens` is the number of requests, times the geometric mean of their expected tokens."""

    shares: list[Share]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Choice(NamedTuple):
    """The best share for one request, given the others'; its value is in tokens beyond the plan's in the same time."""

    share: Share
    value: float
    seconds: float


_rate = operator.attrgetter("rate")
_Load: TypeAlias = tuple[float, dict[str, tuple[int, float]], float]  # see `Planner._load`


class Planner:
    """Finds the plan of one step, of requests with so many cached tokens each."""

    def __init__(self, times: StepTimes, contexts: Sequence[int], greedy: bool) -> None:
        self._times = times
        self._contexts = contexts
        self._greedy = greedy
        self._steps_s: dict[int, float] = {}  # by rows
        self._drafting_s: dict[tuple[str, int, float], float] = {}  # by drafter, requests and levels
        self.plain = Plan([None] * len(contexts), float(len(contexts)), self.step_s(len(contexts)))

    def best(self, candidates: Sequence[Sequence[Candidate]]) -> Plan:
        """The plan with the most expected tokens per second.

        It starts with plain decoding or one drafter and size for all. Then each request takes its best share given the
        others' (Dinkelbach's iteration), as long as that improves the plan.
        """
        starts = [self.plain]
        for name in dict.fromkeys(each.drafter for own in candidates for each in own) if len(candidates) > 1 else ():
            own = [next((each for each in of_one if each.drafter == name), None) for of_one in candidates]
            sizes = sorted({size for each in own if each is not None for size in each.sizes})
            same = [[None if each is None else (each, each.nearest(size)) for each in own] for size in sizes]
            starts.append(max(map(self.plan, same), key=_rate))
        return max([self._improved(plan, candidates) for plan in starts], key=_rate)

    def _improved(self, plan: Plan, candidates: Sequence[Sequence[Candidate]]) -> Plan:
        for _ in range(_ROUNDS):
            shares = list(plan.shares)
            for number, own in enumerate(candidates):
                shares[number] = None
                shares[number] = self.choice(plan, shares, own).share
            if shares == plan.shares or (found := self.plan(shares)).rate <= plan.rate:
                break
            plan = found
        return plan

    def choice(self, plan: Plan, others: Sequence[Share], candidates: Sequence[Candidate]) -> Choice:
        """The share of a request that gains the most tokens beyond the value of its seconds, by the rate of a plan."""
        load = self._load(others)
        best = Choice(None, 0.0, 0.0)
        for candidate in candidates:
            for nodes, seconds in self._extra_s(load, candidate, candidate.sizes):
                value = self._value(plan, candidate, nodes) - plan.rate * seconds
                if value > best.value:
                    best = Choice((candidate, nodes), value, seconds)
        return best

    def valued(self, plan: Plan, others: Sequence[Share], share: Share) -> Choice:
        """The value of a share given those of the others; see `choice`."""
        if share is None:
            return Choice(None, 0.0, 0.0)
        ((_, seconds),) = self._extra_s(self._load(others), share[0], [share[1]])
        return Choice(share, self._value(plan, *share) - plan.rate * seconds, seconds)

    def _extra_s(self, load: _Load, candidate: Candidate, sizes: Iterable[int]) -> Iterator[tuple[int, float]]:
        rows, drafting, _ = load
        name, (requests, deepest) = candidate.drafter, drafting.get(candidate.drafter, (0, 0.0))
        without_s = self.step_s(rows) + self.drafting_s(name, requests, deepest) - candidate.setup_s
        for nodes in sizes:
            levels = max(candidate.levels(nodes), deepest)
            more_s = self.step_s(rows + candidate.rows(nodes)) + self.drafting_s(name, requests + 1, levels)
            yield nodes, more_s - without_s

    def _value(self, plan: Plan, candidate: Candidate, nodes: int) -> float:
        """Tokens of the batch beyond the first: the slope of count times a geometric mean, by the logarithm of one."""
        count = len(self._contexts)
        return candidate.tokens[nodes] - 1.0 if count == 1 else plan.tokens / count * candidate.logs[nodes]

    def settled(self, plan: Plan, before: Sequence[Share], margin: float) -> Plan:
        """The plan with `before` shares where the new ones gain less than a margin, a fraction of its tokens."""
        shares = list(plan.shares)
        for number, (now, former) in enumerate(zip(plan.shares, before, strict=True)):
            if now == former:
                continue
            shares[number] = None
            gained = self.valued(plan, shares, now).value - self.valued(plan, shares, former).value
            shares[number] = former if gained <= margin * plan.tokens / len(shares) else now
        return self.plan(shares)

    def plan(self, shares: list[Share]) -> Plan:
        rows, drafting, setup_s = self._load(shares)
        drafting_s = sum(self.drafting_s(name, *load) for name, load in drafting.items())
        mean = sum(share[0].logs[share[1]] for share in shares if share is not None) / len(shares)
        return Plan(shares, len(shares) * math.exp(mean), self.step_s(rows) + drafting_s + setup_s)

    def weighed(self, candidates: Sequence[Candidate]) -> str:
        count, notes = len(self._contexts), []
        for each in candidates:
            nodes = min(TOLD, len(each.gains))
            draft_ms = 1e3 * self.drafting_s(each.drafter, 1, each.levels(nodes))
            row_ms = 1e3 * max(self.step_s(count + nodes) - self.step_s(count), 0.0) / nodes
            notes.append(
                f"{each.drafter}: a draft of {nodes} takes {draft_ms:.2f} ms, a row {row_ms:.2f} ms, and "
                f"{each.expected(nodes) - 1.0:.1f} of {nodes} were expected to be accepted"
            )
        return f"{'; '.join(notes)}; a plain step takes {1e3 * self.step_s(count):.2f} ms"

    def floor(self, plan: Plan, share: Share) -> float:
        """The survival of a chain's last token below which a further token does not pay.

        It is accepted as often as a first one, and then the tokens that follow bring what those after a first one do.
        Its level's cost is shared by the batch.
        """
        if share is None:
            return 0.0
        candidate, nodes = share
        rows, drafting, _ = self._load(plan.shares)
        row_s = max(self.step_s(rows + 2) - self.step_s(rows), 0.0) / 2.0
        together, _ = drafting.get(candidate.drafter, (1, 0.0))
        levels = candidate.levels(nodes)
        levels_s = [self.drafting_s(candidate.drafter, together, each) for each in (levels, levels + 1)]
        level_s = max(levels_s[1] - levels_s[0], 0.0) / together
        count = len(self._contexts)
        value = 1.0 if count == 1 else plan.tokens / count / candidate.tokens[nodes]
        price = plan.rate * (row_s + level_s) / value
        later = sum(candidate.gains[1:nodes]) - price * (candidate.rows(nodes) - 1.0)
        return price / (candidate.gains[0] + max(later, 0.0))

    def _load(self, shares: Sequence[Share]) -> _Load:
        rows, setup_s = float(len(shares)), 0.0
        drafting: dict[str, tuple[int, float]] = {}
        for share in shares:
            if share is not None:
                candidate, nodes = share
                rows += candidate.rows(nodes)
                setup_s += candidate.setup_s
                requests, deepest = drafting.get(candidate.drafter, (0, 0.0))
                drafting[candidate.drafter] = requests + 1, max(deepest, candidate.levels(nodes))
        return rows, drafting, setup_s

    def step_s(self, rows: float) -> float:
        """Seconds of a step with an expected number of rows, without drafting."""
        whole = int(rows)
        found = self._steps_s.get(whole)
        if found is None:
            found = self._steps_s[whole] = self._times.step_s(whole, self._contexts, self._greedy)
        return found if rows == whole else found + (rows - whole) * (self.step_s(whole + 1) - found)

    def drafting_s(self, drafter: str, requests: int, levels: float) -> float:
        """Seconds of drafting for `requests` requests, where the deepest takes `levels` levels."""
        key = drafter, requests, levels
        found = self._drafting_s.get(key)
        if found is None:
            found = self._times.drafting_s(*key, self._greedy) if requests else 0.0
            self._drafting_s[key] = found
        return found
