"""The folder of a benchmark: rows as they finish, then record, plots and the Markdown report."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from truedraft.engine.policy.decisions import NOT_ASKED
from truedraft.errors import DataError
from truedraft.measure.bench.plots import draw_all, draw_decisions, draw_drafted
from truedraft.measure.bench.record import Circumstances
from truedraft.measure.bench.runs import Row
from truedraft.measure.bench.summary import Summary
from truedraft.measure.bench.tables import TextTable, all_tables, decisions_table, tree_table
from truedraft.measure.bench.trees import DraftedTree
from truedraft.pictures import check_drawing

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

    Raises:
        DataError: it cannot be made or written.
        MissingExtraError: plots cannot be drawn here.
    """

    def __init__(self, folder: Path) -> None:
        check_drawing("plots and report", "leave --out away")
        self.folder = folder.expanduser()
        self._made = [each for each in (self.folder, *self.folder.parents) if not each.exists()]
        try:
            self._had_rows = (self.folder / _ROWS).exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._rows: IO[str] = (self.folder / _ROWS).open("a", encoding="utf-8")
        except OSError as error:
            raise DataError(f"cannot write into {str(folder)!r}: {error.strerror or error}") from error
        self._begun = False

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it; the created folder is removed if nothing was written, as with a drafter that does not exist."""
        self._rows.close()
        if not self._begun and not self._had_rows and not (self.folder / _RECORD).exists():
            with contextlib.suppress(OSError):
                (self.folder / _ROWS).unlink()
                for folder in self._made:
                    folder.rmdir()

    def keep(self, row: Row, about: Mapping[str, Any] | None = None) -> None:
        """Write a finished row with the description of the run at once, so that no later failure loses it.

        Raises:
            DataError: the file cannot be written.
        """
        try:
            if not self._begun:
                self._rows.truncate(0)
                self._begun = True
            self._rows.write(json.dumps(row.as_dict() | dict(about or {}), allow_nan=False) + "\n")
            self._rows.flush()
        except OSError as error:
            raise DataError(f"cannot write {str(self.folder / _ROWS)!r}: {error.strerror or error}") from error

    def finish(
        self,
        summaries: Sequence[Summary],
        circumstances: Circumstances,
        costs: Sequence[Mapping[str, float]],
        notes: Sequence[str],
        record: Mapping[str, Any],
        trees: Sequence[DraftedTree] = (),
    ) -> Path:
        """Write record, plots and report; returns the report's path.

        Raises:
            DataError: a file cannot be written.
        """
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
    parts = [
        "# Benchmark",
        f"{circumstances.line()}.",
        *map(_table, all_tables(summaries, circumstances)),
    ]
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    parts += [f"![{_CAPTIONS[name]}]({name}.svg)\n\n{_CAPTIONS[name]}" for name in pictures]
    if decided:
        parts += ["## Decisions", _DECIDED.rstrip(), *(_decisions(*each) for each in decided)]
    if trees:
        parts += ["## Token trees", _table(tree_table([tree for tree, _ in trees])), _PROMISE.rstrip()]
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
        _table(decisions_table(summary.decisions)),
        *([] if speedup is None else [f"{speedup.describe()}."]),
        f"![Who drafted, and what was accepted, while {summary.name} decoded]({picture}.svg)",
    ]
    return "\n\n".join(parts)


def _table(table: TextTable) -> str:
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
