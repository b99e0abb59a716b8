"""Counts of speculation: of one request in one step, of a step, of a request. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from truedraft.core.sums import summed
from truedraft.core.verdict import Divergence

if TYPE_CHECKING:
    from truedraft.core.budget import Decision


PROBE = "probe"
"""The reason of decisions made to measure drafters."""


class WarmsUp(Protocol):
    """A model or drafter: `warmups` counts forwards that took longer than later ones of their shape will."""

    @property
    def warmups(self) -> int: ...


class Settling:
    """Detects whether all forwards of some models and drafters since its creation took as long as repeated ones will.

    On a GPU the first forward of a shape runs kernel by kernel, and the second is recorded; only later ones are
    replays. The time of such a forward is not used to measure, to learn or to decide.
    """

    def __init__(self, *parts: WarmsUp) -> None:
        self._parts = parts
        self._before = self._warmups()

    @property
    def settled(self) -> bool:
        return self._warmups() == self._before

    def _warmups(self) -> int:
        return sum(part.warmups for part in self._parts)


@dataclass(frozen=True, slots=True)
class DraftShare:
    """The work of one drafter for one request in one step.

    Attributes:
        depth: length of its longest path.
        path: its nodes on the accepted path, from the root's child down, until the path leaves its proposal.
        judged: its verified positions: accepted ones, and one more where its draws there were rejected.
        confidence: the drafter's own probabilities of the tokens of a chain, where computed.
    """

    drafter: str
    nodes: int
    depth: int
    path: tuple[int, ...] = ()
    judged: int = 0
    confidence: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftTime:
    """One drafter's time in a step; `behind` counts committed tokens read first, and `levels` None equals the depth."""

    drafter: str
    requests: int
    depth: int
    nodes: int
    behind: int
    seconds: float
    levels: int | None = None


@dataclass(slots=True, eq=False)
class RequestStep:
    """Counts of one request in one step.

    Attributes:
        context: tokens in the target's cache before the step.
        rows: tokens fed to the target.
        prefill: whether these were a chunk of its prompt. Such a step emits at most the answer's first token.
        listed_tokens: tokens of all root-to-leaf paths, shared prefixes counted once per path.
        accepted: accepted tokens that were emitted (none past a stop).
        rejected: whether draws below the accepted path were rejected.
        stop_tokens: 1 where an end-of-text or stop token ended the answer.
    """

    id: int
    context: int
    rows: int
    prefill: bool
    nodes: int = 0
    depth: int = 0
    listed_tokens: int = 0
    accepted: int = 0
    emitted: int = 0
    rejected: bool = False
    stop_tokens: int = 0
    decision: Decision | None = None
    shares: tuple[DraftShare, ...] = ()
    greedy: bool = False

    @property
    def survival(self) -> tuple[bool, ...]:
        return (True,) * self.accepted + (False,) * self.rejected


@dataclass(frozen=True)
class StepRecord:
    """Counts and times of one step of an engine, for controllers, listeners and reports.

    Seconds are those of the host. On a device that can time its own queue all but `total_s` are those of the queue.

    Attributes:
        draft_s: drafting, catch-up included.
        total_s: the whole step, with emitting tokens, committing caches and notifying drafters.
        drafting: times of the drafters that were called; empty on a device, where drafting is only queued.
        settled: see `Settling`; if False its seconds predict no other step.
    """

    requests: tuple[RequestStep, ...]
    draft_s: float
    target_s: float
    verify_s: float
    total_s: float
    decide_s: float = 0.0
    drafting: tuple[DraftTime, ...] = ()
    settled: bool = True

    # Cached: a server reads them once for every request of the step.

    @cached_property
    def rows(self) -> int:
        return sum(each.rows for each in self.requests)

    @cached_property
    def contexts(self) -> tuple[int, ...]:
        return tuple(each.context for each in self.requests)

    @cached_property
    def nodes(self) -> int:
        return sum(each.nodes for each in self.requests)

    @cached_property
    def prefill(self) -> bool:
        return any(each.prefill for each in self.requests)

    @cached_property
    def numbers(self) -> Mapping[int, int]:
        return {each.id: number for number, each in enumerate(self.requests)}

    @cached_property
    def seconds_of_each(self) -> tuple[float, ...]:
        """Seconds by request: a drafter's time is shared by the requests that it drafted for, the rest by all."""
        left, each = self.total_s, [0.0] * len(self.requests)
        parts = [() if step.decision is None else step.decision.parts for step in self.requests]
        for spent in self.drafting:
            drafted = [number for number, own in enumerate(parts) if any(p.drafter == spent.drafter for p in own)]
            for number in drafted:
                each[number] += spent.seconds / len(drafted)
            left -= spent.seconds if drafted else 0.0
        return tuple(own + left / len(each) for own in each)

    @property
    def counters(self) -> Counters:
        counters = Counters()
        for each in self.requests:
            counters.count(each)
        return counters


@dataclass(slots=True)
class DrafterCounters:
    """Counts of one drafter; target calls are those that verified its proposals.

    An accepted token proposed by two drafters counts for both, so with merged proposals the sum may exceed that of the
    request.
    """

    target_calls: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    __add__ = summed


@dataclass(slots=True)
class Counters:
    """Counts of one request, or the sum over several; target calls include those of empty proposals.

    Attributes:
        prefill_calls: forwards of the target over chunks of the prompt.
        emitted_tokens: tokens emitted by target calls: accepted, recovered and bonus ones, stops excluded.
        prefill_tokens: tokens emitted by prefill calls: 0 or 1 for each request, and 1 more for each preemption.
        accepted_per_position: how often the k-th drafted token of a path was accepted, k from 1.
        tried_per_position: how often a path reached the k-th drafted position.
        listed_tokens: tokens of all root-to-leaf paths of the proposed trees, shared prefixes counted once per path.
        recoveries: how often a step or proposal failed for several requests together and was repeated for this one by
            itself or with fewer. Answers are correct, but something is broken and slow; normally 0.
        divergence: distance of the emitted tokens' distributions from the target's under a lossy rule; None where every
            token was emitted losslessly.
        stop_tokens: tokens of target calls that ended the answer without being part of it. Drafted tokens after them
            are not counted.
        drafted_calls: target calls that verified drafts, except drafts made to measure drafters.
        undrafted: why there were no such calls, or fewer than one in twenty, although there is a drafter; a sentence.
    """

    target_calls: int = 0
    prefill_calls: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    emitted_tokens: int = 0
    prefill_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    tried_per_position: list[int] = field(default_factory=list)
    listed_tokens: int = 0
    recoveries: int = 0
    divergence: Divergence | None = None
    stop_tokens: int = 0
    by_drafter: dict[str, DrafterCounters] = field(default_factory=dict)
    drafted_calls: int = 0
    undrafted: str | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target call, the recovered or bonus token included (tau); 0 before any call.

        Tokens that ended the answer count as well, so that plain decoding has exactly 1.
        """
        return (self.emitted_tokens + self.stop_tokens) / self.target_calls if self.target_calls else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted tokens per drafted token; 0 when nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    # Means of `Divergence` over emitted tokens; None without lossy rules.

    @property
    def mean_total_variation(self) -> float | None:
        return self._mean("total_variation")

    @property
    def mean_kl(self) -> float | None:
        return self._mean("kl")

    @property
    def mean_total_variation_greedy(self) -> float | None:
        return self._mean("total_variation_greedy")

    @property
    def mean_kl_greedy(self) -> float | None:
        return self._mean("kl_greedy")

    def _mean(self, name: str) -> float | None:
        sums = self.divergence
        return getattr(sums, name) / sums.tokens if sums is not None and sums.tokens else None

    def count(self, step: RequestStep) -> None:
        if step.prefill:
            self.prefill_calls += 1
            self.prefill_tokens += step.emitted
            return
        self.target_calls += 1
        self.draft_tokens += step.nodes
        self.drafted_calls += bool(step.nodes) and (step.decision is None or step.decision.reason != PROBE)
        self.listed_tokens += step.listed_tokens
        self.accepted_tokens += step.accepted
        self.emitted_tokens += step.emitted
        self.stop_tokens += step.stop_tokens
        for share in step.shares:
            own = self.by_drafter.setdefault(share.drafter, DrafterCounters())
            own.target_calls += 1
            own.draft_tokens += share.nodes
            own.accepted_tokens += len(share.path)
        if step.depth:
            for counts, reached in (
                (self.tried_per_position, step.accepted + step.rejected),
                (self.accepted_per_position, step.accepted),
            ):
                counts.extend([0] * (step.depth - len(counts)))
                for position in range(reached):
                    counts[position] += 1

    __add__ = summed


def repeated_ngrams(token_ids: Sequence[int], size: int = 8) -> float | None:
    """Fraction of n-grams that occurred before in the same tokens; None without n-grams.

    >>> repeated_ngrams([1, 2, 1, 2, 1], size=2)
    0.5
    """
    ngrams = [tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else None
