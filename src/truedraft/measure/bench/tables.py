"""The tables of a benchmark, the same on a terminal and in the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from truedraft.core.stats import PROBE, Counters
from truedraft.engine.policy.decisions import END, NOT_ASKED, Decisions, Tally
from truedraft.measure.bench.record import Circumstances
from truedraft.measure.bench.suite import PLAIN
from truedraft.measure.bench.summary import Summary
from truedraft.measure.bench.trees import DraftedTree

_MISSING = "-"
_SHOWN_POSITIONS = 8
_REASONS = {
    "": "as set",
    "pays": "it pays",
    "plain": "no draft pays",
    PROBE: "to learn",
    END: "answer ends",
    NOT_ASKED: "not asked",
}


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table as text; headings may have a line break, and the first is for the engines' names."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Column = tuple[str, Callable[[Summary], str]]


def all_tables(summaries: Sequence[Summary], circumstances: Circumstances) -> list[TextTable]:
    """The tables of a report, in order; each begins with the meaning of a padded target's figures."""
    corner = "" if circumstances.note is None else circumstances.note.partition(" (")[0].replace(", ", ",\n")
    speeds = speed_table(summaries, circumstances.compares_tokens, circumstances.peers_agree)
    tables = [speeds, divergence_table(summaries), time_table(summaries), acceptance_table(summaries)]
    return [TextTable((corner, *table.headings[1:]), table.rows) for table in tables if table.rows]


def speed_table(summaries: Sequence[Summary], must_agree: bool, peers_agree: bool = True) -> TextTable:
    """The speed of each system, and whether it gave the tokens of plain decoding, where these are compared."""
    columns: list[Column] = [
        ("tokens/s", _speed),
        ("x plain", lambda each: _number(None if each.speedup is None else each.speedup.mean, 2)),
        ("first\ntoken", lambda each: "-" if each.first_token_s is None else f"{each.first_token_s.median:.3f} s"),
        ("target\ncalls", lambda each: _MISSING if each.target_calls is None else f"{each.target_calls:,}"),
        ("tokens\n/call", lambda each: _number(each.mean_acceptance_length, 2)),
        ("core-s\n/1,000", lambda each: f"{each.cpu_s_per_1000_tokens:.1f}"),
    ]
    if must_agree:
        columns.append(("identical", lambda each: _identical(each) if each.ours or peers_agree else _MISSING))
    return _table(columns, summaries)


def divergence_table(summaries: Sequence[Summary]) -> TextTable:
    """The divergence caused by a lossy rule: means over its emitted tokens, for the systems that used one."""
    columns: list[Column] = [
        ("total\nvariation", lambda each: _number(_counters(each).mean_total_variation, 3)),
        ("KL,\nnats", lambda each: _number(_counters(each).mean_kl, 3)),
        ("the same\nof greedy", lambda each: _number(_counters(each).mean_total_variation_greedy, 3)),
        ("KL\nof greedy", lambda each: _number(_counters(each).mean_kl_greedy, 3)),
    ]
    return _table(columns, [each for each in summaries if each.lossy])


def _counters(summary: Summary) -> Counters:
    return Counters() if summary.counters is None else summary.counters


def time_table(summaries: Sequence[Summary]) -> TextTable:
    """The time of decoding by part, and the predictions of the cost curves."""
    columns: list[Column] = [
        ("predicted", lambda each: _number(_unless_plain(each, each.predicted_speedup), 2)),
        ("decode\nx plain", lambda each: _number(None if each.decode_speedup is None else each.decode_speedup.mean, 2)),
        ("measured/\npredicted", lambda each: _number(_unless_plain(each, each.measured_over_predicted), 2)),
        ("target", lambda each: _number(None if each.shares is None else each.shares.target, 2)),
        ("draft", lambda each: _number(None if each.shares is None else each.shares.draft, 2)),
        ("host", lambda each: _number(None if each.shares is None else each.shares.host, 2)),
        ("verify", lambda each: _number(None if each.shares is None else each.shares.verification, 3)),
        ("MBU", lambda each: _number(each.mbu, 2)),
    ]
    return _table(columns, summaries)


def acceptance_table(summaries: Sequence[Summary]) -> TextTable:
    """Acceptance rate of the k-th drafted token where it was reached, for systems that drafted."""
    drafting = [each for each in summaries if each.acceptance_per_position]
    longest = max((len(each.acceptance_per_position) for each in drafting), default=0)
    columns: list[Column] = [
        (f"{'' if place else 'accepted'}\nat {place + 1}", partial(_accepted_at, place))
        for place in range(min(longest, _SHOWN_POSITIONS))
    ]
    return _table(columns, drafting)


def tree_table(trees: Sequence[DraftedTree]) -> TextTable:
    """Predicted and measured tokens per target call of each token tree."""
    headings = ("", "nodes", "promised", "if\nindependent", "measured", "measured/\npromised")
    rows = tuple(
        (
            each.system,
            str(each.nodes),
            _number(each.promised, 2),
            _number(each.product, 2),
            _number(each.measured, 2),
            _number(each.measured_over_promised, 2),
        )
        for each in trees
    )
    return TextTable(headings, rows)


def decisions_table(decisions: Decisions) -> TextTable:
    """The decisions, their frequency, reasons and results: each drafter, plain decoding, and exploration steps.

    Numbers of nodes and tokens are means of a step and request; shares are fractions.
    """
    headings = ("", "steps", "share", "drafted", "accepted/\ndrafted", "tokens\nexpected", "tokens\nemitted", "time")
    rows = tuple(
        (
            name,
            f"{each.steps:,}",
            _number(decisions.share(each), 2),
            _number(each.drafted_per_step, 2),
            _number(each.acceptance, 2),
            _number(each.expected_per_step, 2),
            _number(each.emitted_per_step, 2),
            _number(decisions.time_share(each), 2),
            _why(each),
        )
        for name, each in decisions.ordered.items()
    )
    return TextTable((*headings, "why"), rows)


def _why(tally: Tally) -> str:
    reasons = sorted(tally.reasons, key=lambda reason: -tally.reasons[reason])
    return ", ".join(_REASONS.get(reason, reason) for reason in reasons)


def _accepted_at(place: int, summary: Summary) -> str:
    rates = summary.acceptance_per_position
    return _number(rates[place] if place < len(rates) else None, 2)


def _table(columns: Sequence[Column], summaries: Sequence[Summary]) -> TextTable:
    rows = tuple((_marked(each), *(cell(each) for _, cell in columns)) for each in summaries)
    return TextTable(("", *(heading for heading, _ in columns)), rows)


def _marked(summary: Summary) -> str:
    return f"{summary.name} (lossy)" if summary.lossy else summary.name


def _identical(summary: Summary) -> str:
    return f"{summary.identical_groups} of {summary.compared_groups}"


def _speed(summary: Summary) -> str:
    speed = summary.tokens_per_s
    return f"{_three_digits(speed.median)} ({_three_digits(speed.low)}-{_three_digits(speed.high)})"


def _three_digits(value: float) -> str:
    """At least three significant digits, and no exponent."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _unless_plain(summary: Summary, value: float | None) -> float | None:
    """None for plain decoding, which would predict itself."""
    return None if summary.name == PLAIN else value


def _number(value: float | None, digits: int) -> str:
    return _MISSING if value is None else f"{value:.{digits}f}"
