"""What a benchmark says: tables, the JSON record, and a folder of rows, record, plots and the Markdown report."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from truedraft.core.stats import PROBE, Counters
from truedraft.engine.policy.decisions import END, NOT_ASKED, Decisions
from truedraft.errors import DataError
from truedraft.files import write_errors
from truedraft.measure.bench.answers import VocabularyCost
from truedraft.measure.bench.plots import draw_all, draw_decisions, draw_drafted
from truedraft.measure.bench.runs import Results, Row
from truedraft.measure.bench.suite import PLAIN
from truedraft.measure.bench.summary import DraftedTree, Spread, Summary
from truedraft.options import record_of
from truedraft.pictures import check_drawing

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
    columns = [_column(heading, f"counters.{name}", 3) for name, heading in _DIVERGENCES.items()]
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

    def cell(place: int, summary: Summary) -> str:
        rates = summary.acceptance_per_position
        return _number(rates[place] if place < len(rates) else None, 2)

    places = range(min(longest, _SHOWN_POSITIONS))
    return _table([(f"{'' if at else 'accepted'}\nat {at + 1}", partial(cell, at)) for at in places], drafting)


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


_SUMMARY = (
    "name", "ours", "groups", "tokens", "target_calls", "mean_acceptance_length", "acceptance_per_position", "counters",
    "predicted_speedup", "measured_over_predicted", "shares", "mbu", "cpu_s_per_1000_tokens", "empty_answers",
    "unsettled_s",
)  # fmt: skip
_OF_A_ROW = (
    "model", "pad_to", "weights", "note", "rule", "controller", "lossless", "dtype", "device", "threads", "batch",
)  # fmt: skip
_DIVERGENCES = {
    "mean_total_variation": "total\nvariation", "mean_kl": "KL,\nnats",
    "mean_total_variation_greedy": "the same\nof greedy", "mean_kl_greedy": "KL\nof greedy",
}  # fmt: skip
"""Distances of the distributions of emitted tokens from the target's, by `Counters`, with the headings of a table."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The conditions of a benchmark, with names as typed; its reports repeat them."""

    model: str
    note: str | None  # the meaning of a padded target's figures; None for an unpadded target
    pad_to: str | None
    weights: str | None
    drafters: tuple[str, ...]
    peers: tuple[str, ...]
    rule: str
    dtype: str
    device: str
    threads: int
    fast_paths: tuple[str, ...]  # enabled in the target in addition to the plain forward
    batch: int
    prompt_set: str
    prompts: int
    runs: int  # answers of each system to each group
    sampling: Mapping[str, Any]
    must_agree: bool  # whether our engines must give the tokens of plain decoding
    costs_kept: bool  # whether a cost curve is from an earlier run, and so from another state of the machine
    bandwidth: float | None
    weight_bytes: int | None
    machine: Mapping[str, Any]
    lossless: bool = True
    controller: str = "goodput"

    @property
    def peers_agree(self) -> bool:
        return (self.must_agree or not self.lossless) and not self.sampling.get("temperature", 0.0)

    @property
    def compares_tokens(self) -> bool:
        """Whether identity of our tokens is guaranteed, or only a lossy rule can break it."""
        return self.must_agree or self.peers_agree

    def line(self) -> str:
        where = self.device if self.device != "cpu" else f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        temperature = self.sampling.get("temperature", 0.0)
        how, seed = f"temperature {temperature:g}" if temperature else "greedy", self.sampling.get("seed")
        how += f", seed {seed}" if temperature and seed is not None else ""
        runs = f"{self.runs} run{'s' if self.runs > 1 else ''} each"
        model = self.model if self.pad_to is None else f"{self.model} padded to {self.pad_to}"
        model += "" if self.weights is None else f" with {self.weights} weights"
        prompts = f"{self.prompts} prompt{'s' if self.prompts > 1 else ''} of {self.prompt_set}"
        rule = "" if self.lossless else f"lossy rule {self.rule}"
        controller = f"controller {self.controller}" if self.drafters else ""
        most = f"at most {self.sampling.get('max_tokens')} tokens"
        parts = [self.dtype, where, f"batch {self.batch}", how, rule, controller, prompts, most, runs]
        head = f"{model}, " if self.note is None else f"{model}: {self.note}; "
        return head + ", ".join(filter(None, parts))

    def of_a_row(self) -> dict[str, Any]:
        return record_of(self, *_OF_A_ROW)


def bench_record(
    summaries: Sequence[Summary],
    circumstances: Circumstances,
    costs: Sequence[Mapping[str, float]],
    results: Results,
    differences: Sequence[str] = (),
    trees: Sequence[DraftedTree] = (),
    vocabularies: Sequence[VocabularyCost] = (),
) -> dict[str, Any]:
    """The record; `tokens_per_s` and `speedup` at the top are those of the first drafter that finished a row."""
    ours = [each for each in summaries if each.ours]
    speculative = [each for each in ours if each.name != PLAIN]
    first = next(iter(speculative or ours), None)
    verdicts = [_all_identical(each) for each in ours if each.compared_groups and circumstances.must_agree]
    return {
        "command": "bench",
        "tokens_per_s": None if first is None else first.tokens_per_s.median,
        "speedup": None if first is None or first.speedup is None else first.speedup.mean,
        "identical": all(verdicts) if verdicts else None,
        "differences": list(differences),
        "interrupted": results.interrupted,
        "failures": [failure.describe() for failure in results.failures],
        "systems": [_summary_record(each, circumstances) for each in summaries],
        "costs": [dict(point) for point in costs],
        "trees": [tree.as_dict() for tree in trees],
        "vocabularies": [record_of(each) for each in vocabularies],
        **record_of(circumstances),
    }


def _all_identical(summary: Summary) -> bool | None:
    return summary.identical_groups == summary.compared_groups if summary.compared_groups else None


def _summary_record(summary: Summary, circumstances: Circumstances) -> dict[str, Any]:
    must_agree = circumstances.must_agree if summary.ours else circumstances.peers_agree
    reported, ratio = must_agree or (summary.ours and circumstances.compares_tokens), summary.speedup
    spread = None if ratio is None else {"min": ratio.low, "max": ratio.high, "share_faster": ratio.share_faster}
    return {
        **record_of(summary, *_SUMMARY),
        "note": circumstances.note,
        **_spread("tokens_per_s", summary.tokens_per_s),
        **_spread("decode_tokens_per_s", summary.decode_tokens_per_s),
        **_spread("first_token_s", summary.first_token_s),
        "draft_acceptance_rate": None if summary.counters is None else summary.counters.draft_acceptance_rate,
        "speedup": None if ratio is None else ratio.mean,
        "speedup_spread": spread,
        "decode_speedup": None if summary.decode_speedup is None else summary.decode_speedup.mean,
        "identical": _all_identical(summary) if must_agree else None,
        "identical_groups": summary.identical_groups if reported else None,
        "compared_groups": summary.compared_groups if reported else None,
        "lossless": not summary.lossy if summary.ours else None,
        "unsettled_steps": summary.unsettled,
        "decisions": None if summary.decisions is None else summary.decisions.as_dict(),
        **{name: getattr(summary.counters or Counters(), name) for name in _DIVERGENCES},
    }


def _spread(name: str, spread: Spread | None) -> dict[str, Any]:
    if spread is None:
        return {name: None, f"{name}_quartiles": None}
    return {name: spread.median, f"{name}_quartiles": [spread.low, spread.high]}


_ROWS, _RECORD, _REPORT = "rows.jsonl", "record.json", "report.md"
_LIBRARIES = ("truedraft", "torch", "transformers", "python")
_KEPT = "kept from an earlier run; shares and predictions suffer if the machine was busier then, or is now"
_CAPTIONS = {
    "speed": "Tokens per second by method: the median over prompts, with quartiles.",
    "cost": "Milliseconds of one forward of the target by its number of tokens, measured without the engine.",
    "acceptance": "How often the k-th drafted token was accepted, of the times it was reached.",
}
_MEANINGS = """\
- *tokens/s*: new tokens per second from submission to the last token, prefill included; the median over prompts (over
  groups of prompts at batch sizes above 1), quartiles in brackets.
- *x plain*: the geometric mean over prompts of the ratio to plain decoding in our engine.
- *first token*: time from submission to the first new token, the median over prompts and runs.
- *target calls*: forwards of the target that gave tokens after the first, summed over prompts; for assisted generation
  and prompt lookup of a peer all its forwards, as its first one already judges a draft.
- *tokens/call*: mean acceptance length, emitted tokens per target call.
- *core-s/1,000*: measured CPU time of the process, all threads together, per thousand new tokens.
- *identical*: prompts (or groups) with exactly the tokens of plain decoding. Peers run other kernels, whose rounding
  may turn near ties.
- *decode x plain*: the geometric mean of the ratio to plain decoding for tokens after the prefill.
- *predicted*: mean acceptance length times V(1) / (V(nodes + 1) + draft cost), V and draft cost from curves measured
  before the run and without the engine; the geometric mean over prompts. *measured/predicted* is *decode x plain*
  divided by it, prompt by prompt.
- *target, draft, host*: fractions of decoding time: V of the steps, cost of the drafting, both by the curves, and what
  is left over. *verify* is the timed part of host that distributions and verdicts take.
- *MBU*: bytes that had to be read in decoding / its time / measured read bandwidth. Weights that fit into the
  processor's caches may be read faster than memory.
  *-* is shown where that would be more than all: the curves, or the bandwidth, were measured while the machine was
  busier; measure them again (`--refresh-costs`).
- *accepted at k*: how often the k-th drafted token was accepted, of the times that those before it were.
"""
_LOSSY = """\
- *lossy*: a rule that does not keep the target's distribution. *total variation* and *KL* are the mean distances
between the distribution
  of an emitted token, given the text before it, and the target's distribution there (at temperature 0: that at
  temperature 1), over all emitted tokens; *of greedy* is what taking the likeliest token at the same places would have.
"""
_PROMISE = """\
*promised*: tokens per target call that trees of so many nodes bring on the text that is named below, walked as decoding
walks: of trees that are chosen at each step where these are drafted, else of the counted tree in the picture; *if
independent*: what the heads' accuracies would predict there, as if they did not err together. Neither looked at
this run; *measured* is of its own prompts. In the pictures a node's number is the rank of the head's guess, its colour
and size how often it was accepted on the counting text.
"""


_DECIDED = """\
*steps*: decisions, one for each request of each step after the prompt. *drafted*: mean nodes. *tokens expected* by the
controller and *emitted*: of a step and request, the target's own token included. *time*: share of the seconds of
decoding; what a drafter took is charged to its steps, the rest of a step in equal parts to its requests.
*plain*: nothing was drafted; *probe*: a step that was made to learn from. The estimated speed-up compares measured
steps with the plain steps that the same tokens would have needed; its interval is over these steps only.
"""


class OutputFolder:
    """The output folder of a benchmark. An earlier benchmark's rows stay until there is a new row.

    Raises DataError if it cannot be made, MissingExtraError if plots cannot be drawn.
    """

    def __init__(self, folder: Path) -> None:
        check_drawing("plots and report", "leave --out away")
        self.folder = folder.expanduser()
        self._made = [each for each in (self.folder, *self.folder.parents) if not each.exists()]
        with write_errors(folder, "cannot write into"):
            self._had_rows = (self.folder / _ROWS).exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._rows: IO[str] = (self.folder / _ROWS).open("a", encoding="utf-8")
        self._begun = False

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Close it; the created folder is removed if nothing was written, as with a drafter that does not exist."""
        self._rows.close()
        if not self._begun and not self._had_rows and not (self.folder / _RECORD).exists():
            with contextlib.suppress(OSError):
                (self.folder / _ROWS).unlink()
                for folder in self._made:
                    folder.rmdir()

    def keep(self, row: Row, about: Mapping[str, Any] | None = None) -> None:
        """Write a finished row with the description of the run at once, so that no later failure loses it.

        Raises DataError if it cannot be written.
        """
        with write_errors(self.folder / _ROWS):
            if not self._begun:
                self._rows.truncate(0)
                self._begun = True
            self._rows.write(json.dumps(row.as_dict() | dict(about or {}), allow_nan=False) + "\n")
            self._rows.flush()

    def finish(
        self,
        summaries: Sequence[Summary],
        circumstances: Circumstances,
        costs: Sequence[Mapping[str, float]],
        notes: Sequence[str],
        record: Mapping[str, Any],
        trees: Sequence[DraftedTree] = (),
    ) -> Path:
        """Write record, plots and report; returns the report's path; DataError if a file cannot be written."""
        bandwidth, n_bytes, under = circumstances.bandwidth, circumstances.weight_bytes, circumstances.line()
        limit_s = n_bytes / bandwidth if bandwidth and n_bytes else None
        report = self.folder / _REPORT
        try:
            (self.folder / _RECORD).write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")
            pictures = draw_all(self.folder, summaries, costs, limit_s, under)
            decided = [
                (each, draw_decisions(self.folder, each.name, each.decisions, under))
                for each in summaries
                if each.decisions is not None and decides(each)
            ]
            drawn = [(tree, draw_drafted(self.folder, tree, under)) for tree in trees]
            report.write_text(markdown(summaries, circumstances, pictures, notes, drawn, decided), encoding="utf-8")
        except OSError as error:
            raise DataError(f"cannot write into {str(self.folder)!r}: {error.strerror or error}") from error
        return report


def markdown(
    summaries: Sequence[Summary],
    circumstances: Circumstances,
    pictures: Sequence[str],
    notes: Sequence[str],
    trees: Sequence[tuple[DraftedTree, str]] = (),
    decided: Sequence[tuple[Summary, str]] = (),
) -> str:
    """The report; `pictures` are names without suffix in its folder, as PNG and SVG."""
    parts = ["# Benchmark", f"{circumstances.line()}.", *map(_markdown_of, all_tables(summaries, circumstances))]
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    parts += [f"![{_CAPTIONS[name]}]({name}.svg)\n\n{_CAPTIONS[name]}" for name in pictures]
    if decided:
        parts += ["## Decisions", _DECIDED.rstrip(), *(_decisions(*each) for each in decided)]
    if trees:
        parts += ["## Token trees", _markdown_of(tree_table([tree for tree, _ in trees])), _PROMISE.rstrip()]
        parts += [f"- {tree.system}: promised on {tree.promised_on}" for tree, _ in trees if tree.promised_on]
        parts += [f"![The token tree of {tree.system}]({name}.svg)" for tree, name in trees]
    meanings = _MEANINGS + ("" if circumstances.lossless else _LOSSY)
    parts += ["## How to read it", meanings.rstrip(), "## Where it was run", _where(circumstances)]
    return "\n\n".join(parts) + "\n"


def decides(summary: Summary) -> bool:
    """Whether there were drafters to choose from."""
    decisions = summary.decisions
    return decisions is not None and any(set(each.reasons) != {NOT_ASKED} for each in decisions.tallies.values())


def _decisions(summary: Summary, picture: str) -> str:
    assert summary.decisions is not None
    speedup = summary.decisions.speedup()
    parts = [
        f"### {summary.name}",
        _markdown_of(decisions_table(summary.decisions)),
        *([] if speedup is None else [f"{speedup.describe()}."]),
        f"![Who drafted, and what was accepted, while {summary.name} decoded]({picture}.svg)",
    ]
    return "\n\n".join(parts)


def _markdown_of(table: TextTable) -> str:
    in_a_line = (" ".join(heading.split("\n")).strip() for heading in table.headings)
    headings = tuple(heading.replace(" /", "/").replace("/ ", "/") for heading in in_a_line)
    rows = [headings, ("---", *("---:" for _ in headings[1:])), *table.rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def _where(circumstances: Circumstances) -> str:
    machine = circumstances.machine
    threads = f"{circumstances.threads} thread{'s' if circumstances.threads > 1 else ''}"
    sampling = (f"{name} {value}" for name, value in circumstances.sampling.items() if value not in ((), ""))
    facts = {
        "CPU": f"{machine.get('cpu')}, {machine.get('cores')} cores, {threads} in use",
        "versions": ", ".join(f"{name} {machine.get(name)}" for name in _LIBRARIES),
        "fast paths": "; ".join(circumstances.fast_paths) or "none",
        "sampling": ", ".join(sampling),
        "drafters": ", ".join(circumstances.drafters) or "none",
        "controller": circumstances.controller,
        "rule": circumstances.rule if circumstances.lossless else f"{circumstances.rule} (lossy)",
        "cost curves": _KEPT if circumstances.costs_kept else "measured right before this run",
    }
    if circumstances.bandwidth is not None:
        facts["read bandwidth"] = f"{circumstances.bandwidth / 1e9:.1f} GB/s"
    if circumstances.weight_bytes is not None:
        facts["weights read in a forward"] = f"{circumstances.weight_bytes / 1e6:,.0f} MB"
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())
