"""What speculation did, as counts: of one request in one step, of a step, of a request. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from truedraft.core.sums import summed
from truedraft.core.verdict import Divergence

if TYPE_CHECKING:
    from truedraft.core.budget import Decision


PROBE = "probe"
"""The reason of decisions that are made to learn what they bring."""


class WarmsUp(Protocol):
    """Models or drafters: `warmups` counts forwards that took longer than others of their shape will."""

    @property
    def warmups(self) -> int: ...


class Settling:
    """Says whether what ran since it was made is settled: took as long as it will whenever it comes again.

    It is not where a forward ran as it will never run again. On a GPU the first forward of a shape runs kernel by
    kernel, and the second is being recorded; only those that follow are replays. What such a forward took says nothing
    of any other, so nothing is measured by it, learned from it or decided by it.

    Args:
        parts: models and drafters that may have run.
    """

    def __init__(self, *parts: WarmsUp) -> None:
        self._parts = parts
        self._before = self._warmups()

    @property
    def settled(self) -> bool:
        """Whether it is, up to now."""
        return self._warmups() == self._before

    def _warmups(self) -> int:
        return sum(part.warmups for part in self._parts)


@dataclass(frozen=True, slots=True)
class DraftShare:
    """What one drafter did for one request in one step.

    Attributes:
        drafter: by name.
        nodes: that it proposed.
        depth: length of its longest path.
        path: its nodes on the accepted path, from the root's child down, as long as they follow that path.
        judged: drafted positions of it that the verdict came to: those accepted, and one more where its draws there
            were rejected.
        confidence: the drafter's own probability of the tokens there, of a chain where it was worked out.
    """

    drafter: str
    nodes: int
    depth: int
    path: tuple[int, ...] = ()
    judged: int = 0
    confidence: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftTime:
    """What asking one drafter took in a step.

    Attributes:
        drafter: by name.
        requests: that it was asked for.
        depth: of its deepest proposal.
        nodes: of all of them.
        behind: committed tokens that it caught up with, of all of them.
        seconds: of `propose`.
        levels: of drafting that it took, one behind another; None where these are as many as it is deep.
    """

    drafter: str
    requests: int
    depth: int
    nodes: int
    behind: int
    seconds: float
    levels: int | None = None


@dataclass(slots=True, eq=False)
class RequestStep:
    """What one step did for one request.

    Attributes:
        id: of the request.
        context: tokens in the target's cache before the step.
        rows: tokens that the target was fed for it.
        prefill: whether these were a part of its prompt. What such a step emits is the answer's first token.
        nodes: drafted nodes.
        depth: length of the proposal's longest path.
        listed_tokens: tokens of all its paths, one behind another.
        accepted: accepted tokens that were emitted (none past a stop).
        emitted: all tokens that were emitted.
        rejected: whether draws were judged and rejected below the accepted path.
        stop_tokens: 1 where an end-of-text or stop token ended the answer.
        decision: what was decided for it; None where nobody was asked, as during its prompt.
        shares: what each drafter did that drafted for it.
        greedy: whether it is at temperature 0.
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
        """For each drafted position that the verdict came to, whether its token was accepted."""
        return (True,) * self.accepted + (False,) * self.rejected


@dataclass(frozen=True)
class StepRecord:
    """What one step of an engine did, and how long its parts took: what controllers, listeners and reports see.

    Seconds are those of the host; on a device that can time its own queue, those of the queue, but for `total_s`.

    Attributes:
        requests: what it did for each request that took part.
        draft_s: asking the drafters, catch-up included.
        target_s: the target's forward.
        verify_s: probabilities and verdicts.
        total_s: the whole step: accepted tokens emitted, caches committed, drafters told.
        decide_s: asking the controller.
        drafting: what asking each drafter took that was asked; empty on a device, where that is only queued.
        settled: whether its forwards took as long as they will, see `Settling`; else its seconds say nothing of others.
    """

    requests: tuple[RequestStep, ...]
    draft_s: float
    target_s: float
    verify_s: float
    total_s: float
    decide_s: float = 0.0
    drafting: tuple[DraftTime, ...] = ()
    settled: bool = True

    # Each is worked out once: a server asks for them once for every request of the step.

    @cached_property
    def rows(self) -> int:
        """Tokens that the target's forward was fed."""
        return sum(each.rows for each in self.requests)

    @cached_property
    def contexts(self) -> tuple[int, ...]:
        """Cached tokens of each request before the step."""
        return tuple(each.context for each in self.requests)

    @cached_property
    def nodes(self) -> int:
        """Drafted nodes of all requests."""
        return sum(each.nodes for each in self.requests)

    @cached_property
    def prefill(self) -> bool:
        """Whether a part of a prompt was among them."""
        return any(each.prefill for each in self.requests)

    @cached_property
    def numbers(self) -> Mapping[int, int]:
        """Where in `requests` each request stands, by id."""
        return {each.id: number for number, each in enumerate(self.requests)}

    @cached_property
    def seconds_of_each(self) -> tuple[float, ...]:
        """Its seconds by request: what a drafter took goes to those that it was asked for, the rest in parts to all."""
        requests = self.requests
        left = self.total_s
        each = [0.0] * len(requests)
        for spent in self.drafting:
            asked = [
                number
                for number, step in enumerate(requests)
                if step.decision is not None and any(part.drafter == spent.drafter for part in step.decision.parts)
            ]
            for number in asked:
                each[number] += spent.seconds / len(asked)
            left -= spent.seconds if asked else 0.0
        return tuple(own + left / len(requests) for own in each)

    @property
    def counters(self) -> Counters:
        """The counts of the step over all its requests, prefill apart."""
        counters = Counters()
        for each in self.requests:
            counters.count(each)
        return counters


@dataclass(slots=True)
class DrafterCounters:
    """Counts of one drafter.

    Attributes:
        target_calls: forwards of the target that judged a proposal of it.
        draft_tokens: nodes that it proposed.
        accepted_tokens: emitted tokens that it proposed, as far as the accepted path was its own from the root down.
            One that two drafters proposed counts for both, so of merged proposals the sum may exceed that of the
            request.
    """

    target_calls: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted tokens per drafted token; 0 when nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    __add__ = summed


@dataclass(slots=True)
class Counters:
    """Counts of one request, or the sum over several.

    Attributes:
        target_calls: forwards of the target that judged this request's proposals (empty ones included).
        prefill_calls: forwards of the target over parts of the prompt; the token that the last of them emits is
            counted in `prefill_tokens` alone.
        draft_tokens: nodes that were proposed.
        accepted_tokens: proposed tokens that were emitted.
        emitted_tokens: tokens emitted by target calls: accepted, recovered and bonus ones, stops excluded.
        prefill_tokens: tokens emitted by prefill calls: 0 or 1 for each request, and 1 more for each time that it gave
            its room back and was read again.
        accepted_per_position: how often the k-th drafted token of a path was accepted, k from 1.
        tried_per_position: how often a path reached the k-th drafted position.
        listed_tokens: tokens that the paths of the proposed trees would come to as a plain list, from the root to
            each leaf; `draft_tokens` is what is left of them because shared prefixes are merged.
        recoveries: how often a step or a proposal failed for several requests together and was done again for this
            one alone or with fewer. The answer is none the worse, but something is broken and slow; it is 0 where
            nothing is.
        divergence: how far the emitted tokens' distributions were from the target's, where a lossy rule judged; None
            where every token was emitted losslessly.
        stop_tokens: tokens that target calls gave and that ended the answer without being part of it: an end-of-text
            or stop token, or those of a stop text. What was drafted behind them is counted nowhere.
        by_drafter: the counts of each drafter that proposed something, by name.
        drafted_calls: target calls that judged drafts, those apart that a controller had made to learn from.
        undrafted: why there were none of these, or fewer than one in twenty, though there is a drafter, in words.
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

        The tokens that ended the answer count as well, for a call gave them, so that plain decoding has exactly 1.
        """
        return (self.emitted_tokens + self.stop_tokens) / self.target_calls if self.target_calls else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted tokens per drafted token; 0 when nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def mean_total_variation(self) -> float | None:
        """Between the distribution of an emitted token and the target's, over the tokens of lossy rules; None without
        any."""
        return self._mean(lambda sums: sums.total_variation)

    @property
    def mean_kl(self) -> float | None:
        """KL(distribution of an emitted token || target's distribution) in nats, likewise."""
        return self._mean(lambda sums: sums.kl)

    @property
    def mean_total_variation_greedy(self) -> float | None:
        """What greedy decoding would have at the same places: the mean of 1 - max p."""
        return self._mean(lambda sums: sums.total_variation_greedy)

    @property
    def mean_kl_greedy(self) -> float | None:
        """What greedy decoding would have at the same places, in nats: the mean of -log max p."""
        return self._mean(lambda sums: sums.kl_greedy)

    def _mean(self, of: Callable[[Divergence], float]) -> float | None:
        sums = self.divergence
        return of(sums) / sums.tokens if sums is not None and sums.tokens else None

    def count(self, step: RequestStep) -> None:
        """Count what one step did for one request."""
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
            own = self.by_drafter.get(share.drafter)
            if own is None:
                own = self.by_drafter[share.drafter] = DrafterCounters()
            own.target_calls += 1
            own.draft_tokens += share.nodes
            own.accepted_tokens += len(share.path)
        if step.depth:
            _grow(self.tried_per_position, step.depth)
            _grow(self.accepted_per_position, step.depth)
            for position in range(step.accepted + step.rejected):
                self.tried_per_position[position] += 1
            for position in range(step.accepted):
                self.accepted_per_position[position] += 1

    __add__ = summed


def _grow(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))


def repeated_ngrams(token_ids: Sequence[int], size: int = 8) -> float | None:
    """Share of n-grams that occurred before in the same tokens; None where there are none.

    >>> repeated_ngrams([1, 2, 1, 2, 1], size=2)
    0.5
    """
    ngrams = [tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else None
