"""Summaries of rows: medians and spread over prompts, ratios paired by prompt, and the lengths of token trees."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from truedraft.core.params import SamplingParams
from truedraft.core.rank_tree import RankTree
from truedraft.core.stats import Counters
from truedraft.core.theory import expected_tokens_if_independent, predicted_speedup
from truedraft.engine.policy.decisions import Decisions
from truedraft.measure.bench.costs import Memory
from truedraft.measure.bench.runs import Row, Shares, known_share, shares
from truedraft.measure.bench.suite import PLAIN, Suite
from truedraft.options import record_of

_KILO = 1000
_SHOWN_NAMES = 3
_SPEED, _DECODE_SPEED = operator.attrgetter("tokens_per_s"), operator.attrgetter("decode_tokens_per_s")

Counts = TypeVar("Counts")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles over the groups of prompts, each with the median of its runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratios of tokens per second to plain decoding's, paired by group; `mean` is their geometric mean."""

    mean: float
    low: float
    high: float
    share_faster: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        mean = statistics.geometric_mean(ratios) if min(ratios) > 0 else 0.0
        return cls(mean, min(ratios), max(ratios), sum(ratio > 1 for ratio in ratios) / len(ratios))


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of one system."""

    name: str
    ours: bool
    groups: int
    tokens: int  # new tokens of one run of each group, as are `target_calls`, `counters` and `empty_answers`
    tokens_per_s: Spread  # prefill included, as is `speedup`; the others are of tokens after it
    decode_tokens_per_s: Spread
    first_token_s: Spread | None
    target_calls: int | None  # None where they cannot be counted, as is `mean_acceptance_length`
    mean_acceptance_length: float | None
    counters: Counters | None  # None for a peer, as are `shares` and `decisions`
    speedup: Ratio | None  # over plain decoding; None without plain rows to pair with
    decode_speedup: Ratio | None
    predicted_speedup: float | None  # from acceptance and cost curves, the geometric mean over groups
    measured_over_predicted: float | None  # the geometric mean over groups that have both
    shares: Shares | None
    mbu: float | None  # used share of memory bandwidth in decoding; None if above 1, as with weights in caches
    cpu_s_per_1000_tokens: float
    identical_groups: int  # groups with the tokens of plain decoding's first run in all runs
    compared_groups: int
    empty_answers: tuple[str, ...] = ()
    decisions: Decisions | None = None
    unsettled: int = 0  # decoding steps of all runs, see `StepRecord.settled`
    unsettled_s: float = 0.0

    @property
    def lossy(self) -> bool:
        return self.counters is not None and self.counters.divergence is not None

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Accepted over tried for the k-th drafted token, k from 1, up to the last position that was tried."""
        if self.counters is None:
            return ()
        pairs = zip(self.counters.accepted_per_position, self.counters.tried_per_position, strict=True)
        return tuple(accepted / tried for accepted, tried in pairs if tried)


Groups = dict[tuple[str, ...], list[Row]]
ByGroup = dict[tuple[str, ...], float]


def summarise(
    rows: Sequence[Row], names: Sequence[str], ours: Sequence[str], memory: Mapping[str, Memory]
) -> list[Summary]:
    """One summary per system with rows, in the order of `names`, with memory bandwidth for those in `memory`."""
    by_name: dict[str, Groups] = {}
    for row in rows:
        by_name.setdefault(row.system, {}).setdefault(row.prompts, []).append(row)
    plain = by_name.get(PLAIN, {})
    return [_summary(name, name in ours, by_name[name], plain, memory.get(name)) for name in names if name in by_name]


def shown(summaries: Sequence[Summary], best_of: Mapping[str, Sequence[str]]) -> tuple[list[Summary], list[str]]:
    """The summaries to show, only the fastest of each group in `best_of`; and for each a sentence with its setting."""
    titles: dict[str, str] = {}
    hidden: set[str] = set()
    notes = []
    for title, names in best_of.items():
        tried = {each.name: each.tokens_per_s.median for each in summaries if each.name in names}
        if len(tried) > 1:
            best = max(tried, key=lambda name: tried[name])
            titles[best] = title
            hidden |= tried.keys() - {best}
            speeds = "; ".join(f"{name.removeprefix(title).lstrip(', ')} {speed:.1f}" for name, speed in tried.items())
            notes.append(f"{title} is the best of {len(tried)} settings, in tokens/s: {speeds}")
    left = (summary for summary in summaries if summary.name not in hidden)
    return [dataclasses.replace(each, name=titles.get(each.name, each.name)) for each in left], notes


def empty_answers(summaries: Sequence[Summary]) -> list[str]:
    """A sentence for each system with answers that ended before their first token; these have no speed and ratio."""
    notes = []
    for each in summaries:
        if names := each.empty_answers:
            first = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
            notes.append(f"{each.name}: {len(names)} answers ended before their first token (prompt {first})")
    return notes


def unsettled_steps(summaries: Sequence[Summary]) -> list[str]:
    """A sentence for each system with steps that were not settled, in spite of the warm-up."""
    return [
        f"{each.name}: forwards of new shapes were made ready in {each.unsettled} steps, which took "
        f"{each.unsettled_s:.2f} s; they count in tokens/s and x plain, and neither in shares of time nor predictions"
        for each in summaries
        if each.unsettled
    ]


def differing_answers(
    rows: Sequence[Row], names: Sequence[str]
) -> list[tuple[str, str, tuple[int, ...], tuple[int, ...]]]:
    """System, prompt, plain tokens and its tokens, where these differ from plain decoding's first run."""
    answers = [
        (row.system, name, tokens)
        for row in rows
        for name, tokens in zip(row.prompts, row.output.token_ids, strict=True)
    ]
    plain = {name: tokens for system, name, tokens in reversed(answers) if system == PLAIN}
    return [
        (system, name, plain[name], tokens)
        for system, name, tokens in answers
        if system in names and tokens != plain.get(name, tokens)
    ]


def _summary(name: str, ours: bool, groups: Groups, plain: Groups, memory: Memory | None) -> Summary:
    rows = [row for runs in groups.values() for row in runs]
    firsts = [runs[0] for runs in groups.values()]
    first_token_s = [seconds for row in rows for seconds in row.output.first_token_s if seconds is not None]
    breakdown, counters = _sum(row.breakdown for row in rows), _sum(row.output.counters for row in firsts)
    calls = [row.output.target_calls for row in firsts]
    ratios, decode_ratios = _ratios(groups, plain, _SPEED), _ratios(groups, plain, _DECODE_SPEED)
    predictions = _predictions(groups)
    over = [ratio / predictions[key] for key, ratio in decode_ratios.items() if key in predictions]
    tokens = sum(row.tokens for row in rows)
    return Summary(
        name=name,
        ours=ours,
        groups=len(groups),
        tokens=sum(row.tokens for row in firsts),
        tokens_per_s=Spread.of([_median(runs, _SPEED) for runs in groups.values()]),
        decode_tokens_per_s=Spread.of([_median(runs, _DECODE_SPEED) for runs in groups.values()]),
        first_token_s=Spread.of(first_token_s) if first_token_s else None,
        target_calls=None if None in calls else sum(call for call in calls if call is not None),
        mean_acceptance_length=_mean_acceptance_length(counters, firsts),
        counters=counters,
        speedup=Ratio.of(list(ratios.values())) if ratios else None,
        decode_speedup=Ratio.of(list(decode_ratios.values())) if decode_ratios else None,
        predicted_speedup=statistics.geometric_mean(predictions.values()) if predictions else None,
        measured_over_predicted=statistics.geometric_mean(over) if over else None,
        shares=None if breakdown is None else shares(breakdown),
        mbu=None if memory is None else _bandwidth_used(rows, memory),
        cpu_s_per_1000_tokens=sum(row.cpu_s for row in rows) / tokens * _KILO if tokens else 0.0,
        identical_groups=sum(
            all(row.output.token_ids == plain[key][0].output.token_ids for row in runs)
            for key, runs in groups.items()
            if key in plain
        ),
        compared_groups=sum(key in plain for key in groups),
        empty_answers=tuple(
            prompt for row in firsts for prompt, own in zip(row.prompts, row.output.token_ids, strict=True) if not own
        ),
        decisions=_sum(row.decisions for row in rows),
        unsettled=0 if breakdown is None else breakdown.unsettled,
        unsettled_s=0.0 if breakdown is None else breakdown.unsettled_s,
    )


def _sum(counts: Iterable[Counts | None]) -> Counts | None:
    found: list[Any] = [each for each in counts if each is not None]
    return functools.reduce(operator.add, found) if found else None


def _median(runs: Sequence[Row], speed: Callable[[Row], float]) -> float:
    return statistics.median(map(speed, runs))


def _ratios(groups: Groups, plain: Groups, speed: Callable[[Row], float]) -> ByGroup:
    """Ratios only of groups in which both emitted tokens, because a sampled answer may be empty."""
    both = ((key, _median(runs, speed), _median(plain[key], speed)) for key, runs in groups.items() if key in plain)
    return {key: measured / below for key, measured, below in both if measured > 0 and below > 0}


def _predictions(groups: Groups) -> ByGroup:
    found: ByGroup = {}
    for key, runs in groups.items():
        counters, breakdown = _sum(row.output.counters for row in runs), _sum(row.breakdown for row in runs)
        if counters is None or breakdown is None or not breakdown.steps or not counters.mean_acceptance_length:
            continue
        curves = breakdown.plain_curve_s, breakdown.forward_curve_s, breakdown.drafting_curve_s
        means = [seconds / breakdown.steps for seconds in curves if seconds is not None]
        if len(means) == len(curves):
            found[key] = predicted_speedup(counters.mean_acceptance_length, *means)
    return found


def _mean_acceptance_length(counters: Counters | None, firsts: Sequence[Row]) -> float | None:
    if counters is not None:
        return counters.mean_acceptance_length
    weighted = [(row.output.mean_acceptance_length, row.output.target_calls) for row in firsts]
    known = [(length, calls) for length, calls in weighted if length is not None and calls]
    return sum(length * calls for length, calls in known) / sum(calls for _, calls in known) if known else None


def _bandwidth_used(rows: Sequence[Row], memory: Memory) -> float | None:
    seconds = sum(row.decode_s for row in rows)
    if seconds <= 0:
        return None
    read = sum(memory.target.read(row.output.forwards, row.output.context_tokens) for row in rows)
    if memory.draft is not None:
        read += sum(memory.draft.read(row.output.draft_forwards, 0) for row in rows)
    return known_share(read / seconds / memory.bandwidth)


class ChosenTrees(NamedTuple):
    """Trees that are chosen at each step, with the tokens per target call predicted by replay, if there was one."""

    nodes: int
    promised: float | None


@dataclass(frozen=True, slots=True)
class DraftedTree:
    """A system's trees, with predicted and measured tokens per target call."""

    system: str
    tree: RankTree  # with `survival` where it was counted; for `chosen` trees the counted one of the same heads
    measured: float | None
    product: float | None = None
    chosen: ChosenTrees | None = None  # the trees drafted instead of `tree`, if they are chosen at each step
    promised_on: str = ""  # the text of the prediction; `measured` is on the benchmark's own

    @property
    def nodes(self) -> int:
        return len(self.tree) if self.chosen is None else self.chosen.nodes

    @property
    def counted(self) -> float | None:
        return None if math.isnan(self.tree.expected_tokens) else self.tree.expected_tokens

    @property
    def promised(self) -> float | None:
        return self.counted if self.chosen is None else self.chosen.promised

    @property
    def measured_over_promised(self) -> float | None:
        return None if self.measured is None or self.promised is None else self.measured / self.promised

    def describe(self) -> str:
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        trees = f"a tree of {nodes}" if self.chosen is None else f"trees of {nodes}, chosen at each step"
        on = f" (on {self.promised_on})" if self.promised_on else ""
        numbers = (
            (self.promised, f"promised {{:.2f}} tokens per target call{on}"),
            (None if self.chosen is None else self.counted, "{:.2f} by the counted tree"),
            (self.product, "{:.2f} if heads erred independently"),
            (self.measured, "measured {:.2f}"),
            (self.measured_over_promised, "{:.2f} of what was promised"),
        )
        parts = [words.format(number) for number, words in numbers if number is not None]
        return ", ".join([f"{self.system}: {trees}", *parts])

    def as_dict(self) -> dict[str, Any]:
        numbers = ("nodes", "promised", "promised_on", "counted", "product", "measured", "measured_over_promised")
        kind = "fixed" if self.chosen is None else "likeliest"
        return {"trees": kind} | record_of(self, "system", *numbers, "tree")


def drafted_trees(suite: Suite, measured: Mapping[str, float | None], params: SamplingParams) -> list[DraftedTree]:
    """The trees of our drafters that draft by ranks; `measured` has the mean acceptance length of each engine."""
    found = []
    drafting = [(each, *member) for each in suite.ours for member in each.engine.drafter.members.items()]
    for system, name, member in drafting:
        title = system.title_of(name)
        facts = None if member.trees is None else member.trees.tree_facts(params)
        if facts is None:
            continue
        counted = facts.accuracy is not None and bool(facts.tree.survival)
        product = expected_tokens_if_independent(facts.tree.paths, facts.accuracy or ()) if counted else None
        tokens = None if facts.curve is None else facts.curve.tokens(facts.nodes)
        chosen = None if facts.fixed else ChosenTrees(facts.nodes, tokens)
        text = "" if facts.curve is None else facts.curve.measured_on
        found.append(DraftedTree(title, facts.tree, measured.get(title), product, chosen, text))
    return found
