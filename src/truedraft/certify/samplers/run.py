"""Certification of a sampler on worlds with a known answer, until its evidence suffices, and the report."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from truedraft.certify.checks import Deadline, Finding, Part, ReportProgress, Status, now
from truedraft.certify.e_process import ALARM, CERTAIN, smallest_detectable, total_variation, variation_by_chance
from truedraft.certify.report import Report, evidence_words
from truedraft.certify.samplers.contract import Sampler
from truedraft.certify.samplers.evidence import Evidence, diagnose, worst_places
from truedraft.certify.samplers.suspects import suspects
from truedraft.certify.samplers.worlds import SamplerWorld, sampler_worlds
from truedraft.errors import OptionError

GOAL = 0.05
"""A sampler is certified if the smallest detectable total variation is at most this in every world."""
ROWS = 60_000
"""Maximum number of rows per world."""
_FIRST, _GROWTH, _LARGEST = 2, 1.25, 4096  # rows of a call
_NAMED = 1_000  # rows per world, to name a fault


@dataclass
class _Run:
    seeds: random.Random
    evidence: Evidence
    tokens: int = 0
    batch: float = _FIRST

    @property
    def deviates(self) -> bool:
        return CERTAIN in self.evidence.process.reached

    @property
    def rows_of_each(self) -> int:
        return self.evidence.rows // len(self.evidence.tallies)

    def call(self, sampler: Sampler) -> None:
        batch = int(self.batch)
        for tally in self.evidence.tallies:
            cells = []
            for _ in range(2):
                generator = torch.Generator().manual_seed(self.seeds.getrandbits(63))
                rows = tally.world.rows(batch, generator)
                emitted = sampler.emit(rows, self.seeds.getrandbits(31))
                tally.add(rows, emitted)
                self.tokens += int((emitted >= 0).sum())
                cells.append(tally.world.cells(emitted, generator))
            tally.count(cells)
        self.evidence.process.see(self.evidence.log_parts(), (self.evidence.rows, self.tokens))
        self.batch = min(_LARGEST, self.batch * _GROWTH)

    def facts(self) -> dict[str, Any]:
        reached = self.evidence.process.reached
        found = {f"1e{math.log10(level):.0f}": reached.get(level, (None, None)) for level in (ALARM, CERTAIN)}
        return {
            "log10_e": self.evidence.log_e() / math.log(10.0),
            "rows": self.evidence.rows,
            "tokens": self.tokens,
            "rows_to": {name: rows for name, (rows, _) in found.items()},
            "tokens_to": {name: tokens for name, (_, tokens) in found.items()},
        }


def certify_sampler(
    sampler: Sampler,
    *,
    seconds: float = 300.0,
    seed: int = 0,
    rows: int = ROWS,
    worlds: Sequence[SamplerWorld] | None = None,
    tell: ReportProgress = lambda done: None,
) -> Report:
    """Check that a sampler's tokens, continued by the target, have the target's joint distribution.

    Args:
        seconds: maximum duration, including the second run, in which a deviation must repeat.
        seed: for drafts and for the sampler's numbers.
        rows: maximum number of rows per world and run.
        worlds: None is `sampler_worlds`.
        tell: callback with the completed fraction.

    Raises:
        OptionError: an unusable time, or the sampler failed or returned no tokens.
    """
    if not 0.0 < seconds < math.inf:
        raise OptionError(f"the time for a sampler must be above 0, got {seconds} seconds")
    started = now()
    worlds = sampler_worlds() if worlds is None else worlds
    time = Deadline(seconds)

    def run(number: int, done: Callable[[_Run], bool]) -> _Run:
        own = _Run(random.Random(f"{seed}/{number}"), Evidence(worlds, suspects()))
        while not own.rows_of_each or not done(own):
            own.call(sampler)
            tell(min(1.0, max(own.rows_of_each / rows, time.fraction)))
        return own

    def first_done(own: _Run) -> bool:
        return own.deviates or own.rows_of_each >= rows or time.over

    def second_done(own: _Run) -> bool:
        again = own.deviates and own.rows_of_each >= _NAMED
        return again or own.rows_of_each >= rows or time.over

    runs = [run(0, first_done)]
    if runs[0].deviates:
        runs.append(run(1, second_done))
    return _report(sampler, runs, {"parameters": list(sampler.parameters), "seed": seed}, now() - started)


def _report(sampler: Sampler, runs: Sequence[_Run], about: Mapping[str, Any], seconds: float) -> Report:
    facts = [run.facts() for run in runs]
    found = [run.deviates for run in runs]
    evidence = runs[0].evidence
    for other in runs[1:]:
        evidence.merge(other.evidence)
    worlds, rows, tallies = _of_worlds(evidence), evidence.rows, evidence.tallies
    diagnosis = diagnose(evidence) if any(found) else {}
    kept, by_rule = (sum(getattr(each, name) for each in tallies) / rows for name in ("accepted", "accepted_by_rule"))
    return Report(
        "Certificate of a sampler",
        [_verdict(facts, found, worlds, diagnosis), *worlds, *worst_places(tallies)],
        f"{sampler.name}, {rows:,} rows",
        [
            *map(_note, itertools.count(1), facts),
            f"{kept:.3f} drafted tokens kept for each row; speculative sampling keeps {by_rule:.3f}, token by token",
            *diagnosis.get("notes", ()),
        ],
        {**about, "runs": facts, "accepted": kept, "accepted_by_rule": by_rule},
        seconds=seconds,
    )


def _verdict(
    runs: Sequence[Mapping[str, Any]], found: Sequence[bool], worlds: Sequence[Finding], diagnosis: Mapping[str, Any]
) -> Finding:
    """A deviation must repeat; without one, the smallest that would have been found in every world."""
    least = max(each.facts["smallest_detectable_tv"] for each in worlds)
    log10 = min(run["log10_e"] for run in runs)
    facts = {"log10_evidence": log10, "smallest_detectable_tv": least, **diagnosis}
    status, details = Status.HOLDS, f"a total variation of {least:.3f} in any direction would have been found"
    if diagnosis:
        details = (
            "likeliest: {fault}, {detail}; the next is {next_fault!r}, less likely by a factor of "
            "1e{log10_over_next:.1f}"
        ).format(**diagnosis)
        status = Status.FAILS if all(found) else Status.NOT_ENOUGH
        if not all(found):
            details = f"it deviated once, and that did not repeat in the time given; give more --minutes; {details}"
    elif least > GOAL:
        status = Status.NOT_ENOUGH
        details = f"what would have been found begins at {least:.3f}, and not at {GOAL:g}; give more --minutes"
    summary = f"evidence {evidence_words(log10)}; {details}"
    return Finding(Part.WORLDS, "tokens have the target's joint distribution", status, summary, facts)


def _note(number: int, run: Mapping[str, Any]) -> str:
    words = [f"run {number}: e-value 1e{run['log10_e']:.1f} after {run['rows']} rows, {run['tokens']} tokens"]
    for level, rows in run["rows_to"].items():
        words.append(f"{level} after {rows} rows, {run['tokens_to'][level]} tokens" if rows else f"{level} not reached")
    return "; ".join(words)


def _of_worlds(evidence: Evidence) -> list[Finding]:
    needed = math.log(CERTAIN * len(evidence.tallies) / evidence.process.share("any"))
    found = []
    for tally, log_e in zip(evidence.tallies, evidence.log_e_of_worlds(), strict=True):
        world, rows = tally.world, tally.rows
        facts = {
            "rows": rows,
            "log10_e": log_e / math.log(10.0),
            "total_variation": total_variation(tally.cells, world.joint),
            "by_chance": variation_by_chance(rows, world.joint),
            "smallest_detectable_tv": smallest_detectable(world.joint, rows, needed),
        }
        summary = (
            "{rows:,} rows: total variation {total_variation:.4f}, by chance {by_chance:.4f}, smallest detectable "
            "{smallest_detectable_tv:.4f}; log10 e {log10_e:.1f}"
        ).format(**facts)
        found.append(Finding(Part.WORLDS, world.name, Status.MEASURED, summary, facts))
    return found
