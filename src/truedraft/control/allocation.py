"""Which nodes of which requests a step drafts: the allocation with the most expected tokens per second.

Goodput of a step (Liu et al., arXiv 2406.14066) is expected tokens over expected seconds. Tokens of a request are one
and the gains of all nodes that are drafted for it; seconds are those of the step with so many rows and of the drafting.
Nothing drafted is an allocation like any other: plain decoding.

Of several requests the geometric mean of their tokens counts. Their sum would let one request wait through long steps
because others guess well; with the mean, a step that takes twice as long must double what they emit on balance. What a
request is worth grows by the logarithm of its tokens, so the next node goes to whom it makes faster most.

Worked example: one request, gains 0.6 and 0.3, a step of 10 ms with one row and 11 ms with two or three, 1 ms for
drafting one token and 2 ms for two. Plain decoding emits 100 tokens a second, one drafted token 1.6 / 12 ms = 133, two
1.9 / 13 ms = 146: two it is. Of two requests of which one emits 4 tokens and the other 1, the geometric mean is 2, so
together they count as 4 tokens and not as 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from truedraft.control.base import StepTimes
from truedraft.core.budget import NO_DRAFT, Budget

STOPS = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Numbers of nodes at which an allocation may end; steps cost about the same in between."""
_AT_STOP = frozenset(STOPS)
_ROUNDS = 3  # of choices at the prices of those before


@dataclass(slots=True, eq=False)
class Candidate:
    """A drafter that may draft for a request.

    Attributes:
        drafter: by name.
        limits: of it, cut to what is left of the answer.
        gains: of its nodes, in the order in which a budget takes them, falling.
        catch_up_s: seconds that it takes to read what it has not read.
        steps: over which that must pay.
        hint: kind of what it knows beforehand.
        odds: how its own probabilities tell acceptance; None where it cannot stop by them.
        guessed: share of a chain's tokens, its first apart, that take no level of drafting.
    """

    drafter: str
    limits: Budget
    gains: Sequence[float]
    catch_up_s: float = 0.0
    steps: int = 1
    hint: int = 0
    odds: tuple[float, float] | None = None
    guessed: float = 0.0

    @property
    def setup_s(self) -> float:
        """Seconds of catching up that one step is charged."""
        return self.catch_up_s / self.steps

    def budget(self, nodes: int, floor: float = 0.0) -> Budget:
        """The budget that drafts so many nodes; with a floor of survival, as many as pay, about so many."""
        if not nodes:
            return NO_DRAFT
        least = self.limits.min_probability
        if self.odds is None or not floor:
            return Budget(self.depth(nodes), self.limits.width, nodes, least)
        most = self.depth(2 * nodes + 2)
        # The next token is about as likely to be accepted as the first one.
        return Budget(most, 1, most, least, min(floor / self.gains[0], 1.0), self.odds)

    def depth(self, nodes: int) -> int:
        """Of a proposal of so many nodes."""
        return min(nodes, self.limits.depth)

    def levels(self, nodes: int) -> float:
        """Of drafting, one behind another, that a proposal of so many nodes is expected to take."""
        depth = self.depth(nodes)
        return depth - self.guessed * (depth - 1) if self.guessed else depth


Share: TypeAlias = tuple[Candidate, int] | None
"""What is drafted for one request: by whom and how many nodes; None is nothing."""


@dataclass(slots=True, eq=False)
class Allocation:
    """What a step drafts.

    Attributes:
        shares: one for each request.
        tokens: as many as there are requests, times the geometric mean of what each is expected to emit.
        seconds: expected.
    """

    shares: list[Share]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds

    @property
    def rows(self) -> int:
        """That the target is fed."""
        return len(self.shares) + sum(share[1] for share in self.shares if share is not None)


class Allocator:
    """Finds allocations for the requests of one step.

    Args:
        times: what steps and drafting take.
        contexts: cached tokens of each request.
        greedy: whether the requests are greedy; draws from distributions cost more.
    """

    def __init__(self, times: StepTimes, contexts: Sequence[int], greedy: bool) -> None:
        self._times = times
        self._contexts = contexts
        self._greedy = greedy
        self._steps_s: dict[int, float] = {}  # by rows
        self._drafting_s: dict[tuple[str, int, float], float] = {}  # by drafter, requests and levels

    def step_s(self, rows: int) -> float:
        """Seconds of the step with so many rows, drafting apart."""
        found = self._steps_s.get(rows)
        if found is None:
            found = self._steps_s[rows] = self._times.step_s(rows, self._contexts, self._greedy)
        return found

    def _row_s(self, rows: int) -> float:
        """Seconds of one more row in a step with so many, or a few more than there are requests."""
        rows = max(rows, len(self._contexts) + 1)
        return max(self.step_s(rows + 4) - self.step_s(rows), 0.0) / 4.0

    def drafting_s(self, candidate: Candidate, requests: int, nodes: int) -> float:
        """Seconds of drafting for so many requests, of which the deepest gets so many nodes."""
        key = candidate.drafter, requests, candidate.levels(nodes)
        found = self._drafting_s.get(key)
        if found is None:
            found = self._drafting_s[key] = self._times.drafting_s(*key, self._greedy)
        return found

    def plain(self) -> Allocation:
        """Nothing is drafted."""
        count = len(self._contexts)
        return Allocation([None] * count, float(count), self.step_s(count))

    def best(self, candidates: Sequence[Sequence[Candidate]]) -> Allocation:
        """The best allocation: of one drafter, or of several where requests are better off with others.

        Args:
            candidates: of each request, at most one for each drafter.
        """
        best = self.plain()
        names = dict.fromkeys(each.drafter for own in candidates for each in own)
        for name in names:
            own = [next((each for each in of_one if each.drafter == name), None) for of_one in candidates]
            found = self._filled(own, best.rate)
            best = found if found is not None else best
        for _ in range(_ROUNDS if len(candidates) > 1 and len(names) > 1 else 0):
            mixed = self.priced([self.alone(best, own) for own in candidates])
            if mixed.rate <= best.rate:
                break
            best = mixed  # at whose prices more may pay
        return best

    def _filled(self, candidates: Sequence[Candidate | None], rate: float) -> Allocation | None:
        """The best allocation to one drafter: nodes by the share that each adds to its request, as many as pay.

        Args:
            candidates: that drafter's, of each request.
            rate: that must be beaten, else there is none.
        """
        count, found = len(candidates), None
        own = [each for each in candidates if each is not None and each.gains]
        if not own:
            return None
        most = count + math.fsum(sum(each.gains) for each in own)
        if most <= rate * (self.step_s(count + 1) + self.drafting_s(own[0], 1, 1)):
            return None
        # What brings much less than a row costs cannot pay.
        least = 0.25 * rate * self._row_s(2 * count)
        nodes: list[tuple[float, int, int, Candidate]] = []
        for number, candidate in enumerate(candidates):
            if candidate is None:
                continue
            before = 1.0
            for place, gain in enumerate(candidate.gains):
                if gain <= least:
                    break
                nodes.append((-gain / before, place, number, candidate))
                before += gain
        nodes.sort(key=lambda node: node[:3])
        mean, deepest, setup_s, drafted = 0.0, 0, 0.0, 0  # of logarithms
        for filled, (loss, place, _, candidate) in enumerate(nodes, 1):
            mean += math.log1p(-loss) / count
            if place == 0:
                drafted += 1
                setup_s += candidate.setup_s
            deepest = max(deepest, place + 1)
            if filled not in _AT_STOP and filled != len(nodes):
                continue
            tokens = count * math.exp(mean)
            seconds = self.step_s(count + filled) + setup_s + self.drafting_s(candidate, drafted, deepest)
            if tokens > rate * seconds:
                rate, found = tokens / seconds, (filled, tokens, seconds)
        if found is None:
            return None
        shares: list[Share] = [None] * count
        for _, place, number, candidate in nodes[: found[0]]:
            shares[number] = candidate, place + 1  # a request's nodes come in order
        return Allocation(shares, *found[1:])

    def floor(self, allocation: Allocation, share: Share) -> float:
        """The chance of being accepted below which another token of a chain does not pay, at an allocation's prices.

        A level of drafting is paid for by all that draft with it.
        """
        if share is None:
            return 0.0
        candidate, nodes = share
        row_s = self._row_s(allocation.rows)
        together = sum(each is not None and each[0].drafter == candidate.drafter for each in allocation.shares) or 1
        level_s = self.drafting_s(candidate, together, nodes + 1) - self.drafting_s(candidate, together, nodes)
        worth = 1.0
        if len(self._contexts) > 1:
            worth = allocation.tokens / len(self._contexts) / (1.0 + sum(candidate.gains[:nodes]))
        return allocation.rate * (row_s + max(level_s, 0.0) / together) / worth

    def _worth(self, tokens: float, each: float) -> float:
        """What a request's tokens beyond its first are worth, in tokens of the batch, where `each` is its mean."""
        return tokens if len(self._contexts) == 1 else each * math.log1p(tokens)

    def start_tokens(self) -> float:
        """What plain decoding would emit in the time that drafting anything at all adds to a step, rows apart."""
        count, plain = len(self._contexts), self.plain()
        return plain.rate * max(self.step_s(count + 1) - plain.seconds - self._row_s(count + 1), 0.0)

    def surplus(self, allocation: Allocation, share: Share) -> float:
        """Tokens that a share brings beyond what plain decoding would emit in the time that it takes.

        Those of all requests must add up to more than `start_tokens`, or the step had better draft nothing.
        """
        if share is None:
            return 0.0
        candidate, nodes = share
        shared = any(each is not None and each[0].drafter == candidate.drafter for each in allocation.shares)
        seconds = self._row_s(allocation.rows) * nodes + self._added_s(candidate, shared, nodes) + candidate.setup_s
        return self._worth(sum(candidate.gains[:nodes]), 1.0) - self.plain().rate * seconds

    def alone(self, allocation: Allocation, candidates: Sequence[Candidate]) -> Share:
        """What one request would draft at the prices of an allocation.

        A second is worth the allocation's tokens; a row costs what some more rows would there, and a drafter what one
        more request costs it, or a first one where it drafts for nobody.

        Args:
            allocation: sets the prices.
            candidates: of the request.
        """
        row_s, rate = self._row_s(allocation.rows), allocation.rate
        each = allocation.tokens / len(self._contexts)
        drafting = {share[0].drafter for share in allocation.shares if share is not None}
        best: Share = None
        most = 0.0
        for candidate in candidates:
            shared = candidate.drafter in drafting
            least_s = row_s + candidate.setup_s + self._added_s(candidate, shared, 1)
            if self._worth(sum(candidate.gains), each) - most <= rate * least_s:
                continue
            brought = worth = 0.0
            for nodes, gain in enumerate(candidate.gains, 1):
                brought, before, worth = brought + gain, worth, self._worth(brought + gain, each)
                value = worth - rate * (row_s * nodes + candidate.setup_s + self._added_s(candidate, shared, nodes))
                if value > most:
                    best, most = (candidate, nodes), value
                if worth - before <= rate * row_s:  # those behind it bring less and cost as much
                    break
        return best

    def _added_s(self, candidate: Candidate, shared: bool, nodes: int) -> float:
        """Seconds of drafting for one more request: by a drafter that drafts for others as well, or for nobody."""
        seconds = self.drafting_s(candidate, 1 + shared, nodes)
        return seconds - self.drafting_s(candidate, 1, nodes) if shared else seconds

    def priced(self, shares: list[Share]) -> Allocation:
        """The allocation with these shares."""
        mean, seconds = 0.0, 0.0
        largest: dict[str, tuple[Candidate, int, int]] = {}  # by drafter: what takes most levels, and requests
        for share in shares:
            if share is not None:
                candidate, nodes = share
                mean += math.log1p(sum(candidate.gains[:nodes])) / len(shares)
                seconds += candidate.setup_s
                before, requests, most = largest.get(candidate.drafter, (candidate, 0, 0))
                deepest = max((before, most), share, key=lambda each: each[0].levels(each[1]))
                largest[candidate.drafter] = deepest[0], requests + 1, deepest[1]
        seconds += sum(self.drafting_s(*each) for each in largest.values())
        allocation = Allocation(shares, len(shares) * math.exp(mean), seconds)
        allocation.seconds += self.step_s(allocation.rows)
        return allocation

    def hope(self, allocation: Allocation, number: int, candidate: Candidate, first: float) -> tuple[float, int, float]:
        """What another drafter would bring one request at best.

        Args:
            allocation: as it is without it.
            number: of the request.
            candidate: to draft in its place.
            first: the gain to hope for of its first node; those below are hoped for in proportion, and of a chain each
                token is hoped to fare as the first.

        Returns:
            Tokens that it would add, with how many nodes, and the seconds that are lost if it brings nothing.
        """
        now = allocation.shares[number]
        plan_s = self.step_s(allocation.rows)
        spared_s = 0.0 if now is None else self.drafting_s(now[0], 1, now[1])
        brings = 0.0 if now is None else sum(now[0].gains[: now[1]])
        each = allocation.tokens / len(self._contexts)
        best: tuple[float, int, float] | None = None
        total = 0.0
        if candidate.limits.width == 1:
            hoped = [first**place for place in range(1, min(candidate.limits.nodes, candidate.limits.depth, 4) + 1)]
        else:
            hoped = [min(gain * first / max(candidate.gains[0], 1e-9), first) for gain in candidate.gains[:4]]
        for nodes, gain in enumerate(hoped, 1):
            total += gain
            rows = allocation.rows + nodes - (0 if now is None else now[1])
            seconds = self.step_s(rows) - plan_s + self.drafting_s(candidate, 1, nodes) + candidate.setup_s - spared_s
            value = self._worth(total, each) - self._worth(brings, each) - allocation.rate * seconds
            if best is None or value > best[0]:
                late_s = candidate.catch_up_s - candidate.setup_s  # which this step alone takes
                best = value, nodes, max(seconds + late_s + brings / allocation.rate, 0.0)
        assert best is not None
        return best
