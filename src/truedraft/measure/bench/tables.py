"""The tables of a benchmark, the same on a terminal and in the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from truedraft.core.stats import PROBE
from truedraft.engine.policy.decisions import END, NOT_ASKED, Decisions
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
    """A table as text; headings may have a line break."""

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

    def identical(summary: Summary) -> str:
        compared = summary.ours or peers_agree
        return f"{summary.identical_groups} of {summary.compared_groups}" if compared else _MISSING

    columns: list[Column] = [
        ("tokens/s", _speed),
        _column("x plain", "speedup.mean"),
        ("first\ntoken", lambda each: "-" if each.first_token_s is None else f"{each.first_token_s.median:.3f} s"),
        ("target\ncalls", lambda each: _MISSING if each.target_calls is None else f"{each.target_calls:,}"),
        _column("tokens\n/call", "mean_acceptance_length"),
        _column("core-s\n/1,000", "cpu_s_per_1000_tokens", 1),
    ]
    return _table([*columns, ("identical", identical)] if must_agree else columns, summaries)


def divergence_table(summaries: Sequence[Summary]) -> TextTable:
    """The divergence caused by a lossy rule: means over its emitted tokens, for the systems that used one."""
    columns = [
        _column("total\nvariation", "counters.mean_total_variation", 3),
        _column("KL,\nnats", "counters.mean_kl", 3),
        _column("the same\nof greedy", "counters.mean_total_variation_greedy", 3),
        _column("KL\nof greedy", "counters.mean_kl_greedy", 3),
    ]
    return _table(columns, [each for each in summaries if each.lossy])


def time_table(summaries: Sequence[Summary]) -> TextTable:
    """The time of decoding by part, and the predictions of the cost curves; plain decoding would predict itself."""
    predicted, over = _column("", "predicted_speedup")[1], _column("", "measured_over_predicted")[1]
    columns: list[Column] = [
        ("predicted", lambda each: _MISSING if each.name == PLAIN else predicted(each)),
        _column("decode\nx plain", "decode_speedup.mean"),
        ("measured/\npredicted", lambda each: _MISSING if each.name == PLAIN else over(each)),
        _column("target", "shares.target"),
        _column("draft", "shares.draft"),
        _column("host", "shares.host"),
        _column("verify", "shares.verification", 3),
        _column("MBU", "mbu"),
    ]
    return _table(columns, summaries)


def acceptance_table(summaries: Sequence[Summary]) -> TextTable:
    """Acceptance rate of the k-th drafted token where it was reached, for systems that drafted."""
    drafting = [each for each in summaries if each.acceptance_per_position]
    longest = max((len(each.acceptance_per_position) for each in drafting), default=0)

    def at(place: int) -> Column:
        def cell(summary: Summary) -> str:
            rates = summary.acceptance_per_position
            return _number(rates[place] if place < len(rates) else None, 2)

        return f"{'' if place else 'accepted'}\nat {place + 1}", cell

    return _table([at(place) for place in range(min(longest, _SHOWN_POSITIONS))], drafting)


def tree_table(trees: Sequence[DraftedTree]) -> TextTable:
    """Predicted and measured tokens per target call of each token tree."""
    headings = ("", "nodes", "promised", "if\nindependent", "measured", "measured/\npromised")
    rows = []
    for each in trees:
        numbers = (each.promised, each.product, each.measured, each.measured_over_promised)
        rows.append((each.system, str(each.nodes), *(_number(number, 2) for number in numbers)))
    return TextTable(headings, tuple(rows))


def decisions_table(decisions: Decisions) -> TextTable:
    """The decisions, their frequency, reasons and results; numbers are means per step and request."""
    headings = ("", "steps", "share", "drafted", "accepted/\ndrafted", "tokens\nexpected", "tokens\nemitted", "time")
    rows = []
    for name, each in decisions.ordered.items():
        means = (each.drafted_per_step, each.acceptance, each.expected_per_step, each.emitted_per_step)
        numbers = (decisions.share(each), *means, decisions.time_share(each))
        reasons = sorted(each.reasons, key=each.reasons.__getitem__, reverse=True)
        why = ", ".join(_REASONS.get(reason, reason) for reason in reasons)
        rows.append((name, f"{each.steps:,}", *(_number(number, 2) for number in numbers), why))
    return TextTable((*headings, "why"), tuple(rows))


def _column(heading: str, path: str, digits: int = 2) -> Column:
    def cell(summary: Summary) -> str:
        value: Any = summary
        for name in path.split("."):
            value = None if value is None else getattr(value, name)
        return _number(value, digits)

    return heading, cell


def _table(columns: Sequence[Column], summaries: Sequence[Summary]) -> TextTable:
    names = ((each, f"{each.name} (lossy)" if each.lossy else each.name) for each in summaries)
    rows = tuple((name, *(cell(each) for _, cell in columns)) for each, name in names)
    return TextTable(("", *(heading for heading, _ in columns)), rows)


def _speed(summary: Summary) -> str:
    speed = summary.tokens_per_s
    return f"{_three_digits(speed.median)} ({_three_digits(speed.low)}-{_three_digits(speed.high)})"


def _three_digits(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _number(value: float | None, digits: int) -> str:
    return _MISSING if value is None else f"{value:.{digits}f}"
