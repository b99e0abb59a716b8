"""Certification of a sampler on worlds with a known answer: counts of its output, until their evidence suffices."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from truedraft.certify.checks import Deadline, Finding, Part, ReportProgress, Status, now
from truedraft.certify.e_process import (
    ALARM,
    CERTAIN,
    FLOOR,
    EProcess,
    log_dirichlet,
    log_mean,
    smallest_detectable,
    total_variation,
    variation_by_chance,
)
from truedraft.certify.faults import Fault
from truedraft.certify.report import Report, evidence_words
from truedraft.certify.samplers.contract import Sampler
from truedraft.certify.samplers.worlds import Rows, SamplerWorld, accepted_by_rule, joint_of, sampler_worlds, suspects
from truedraft.core import probs as L
from truedraft.errors import OptionError

PAIRS = ("neighbouring rows of a call share their noise", "calls repeat the noise of the call before")


class Tally:
    """Counts of one world: cells, pairs of first tokens, accepted and invalid tokens."""

    def __init__(self, world: SamplerWorld) -> None:
        self.world = world
        self.cells = torch.zeros_like(world.joint)
        self.pairs = world.joint.new_zeros(len(PAIRS), world.vocab**2)
        self.accepted = 0
        self.strays = 0
        self.forbidden = 0
        self._recovered = torch.zeros(world.vocab, dtype=torch.float64)  # at the first position
        self._bonus = torch.zeros(2, world.vocab, dtype=torch.float64)  # observed, expected

    @property
    def rows(self) -> int:
        return int(self.cells.sum())

    @property
    def accepted_by_rule(self) -> float:
        """Number of drafted tokens that token-by-token speculative sampling would have accepted in as many rows."""
        return self.rows * accepted_by_rule(self.world)

    def count(self, calls: Sequence[Tensor]) -> None:
        vocab = self.world.vocab
        self.cells += torch.cat(list(calls)).bincount(minlength=len(self.cells))
        first, second = (each // vocab**self.world.drafted for each in calls)
        adjacent = torch.cat([each[: len(each) // 2 * 2].view(-1, 2) for each in (first, second)])
        for kind, (one, other) in enumerate((adjacent.unbind(1), (first, second))):
            self.pairs[kind] += (one * vocab + other).bincount(minlength=vocab**2)

    def add(self, rows: Rows, emitted: Tensor) -> None:
        world, drafted = self.world, self.world.drafted
        lengths = (emitted >= 0).sum(-1)
        self.accepted += int((lengths - 1).sum())
        last_but = torch.arange(drafted) < (lengths - 1)[:, None]
        self.strays += int(((emitted[:, :-1] != rows.draft_tokens) & last_but).any(-1).sum())
        self._recovered += emitted[lengths == 1, 0].bincount(minlength=world.vocab)
        text = torch.zeros(len(rows), dtype=torch.int64)
        bonus = lengths == drafted + 1
        for depth in range(drafted + 1):
            there = emitted[:, depth] >= 0
            p, token = world.target[depth][text], emitted[:, depth].clamp_min(0)
            self.forbidden += int((p.gather(1, token[:, None])[:, 0] == 0.0)[there].sum())
            if depth == drafted:
                self._bonus[0] += token[bonus].bincount(minlength=world.vocab)
                self._bonus[1] += p[bonus].sum(0)
            text = text * world.vocab + token

    def merge(self, other: Tally) -> None:
        for name in vars(self).keys() - {"world"}:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def places(self) -> list[Finding]:
        """Distances of tokens from the target by place, with recovered and bonus tokens as in speculative sampling."""
        world = self.world
        found = []
        shape = (world.vocab,) * (world.drafted + 1)
        for place in range(world.drafted + 1):
            others = [axis for axis in range(world.drafted + 1) if axis != place]
            observed, exact = (each.view(shape).sum(others) for each in (self.cells, world.joint))
            found.append(_place(f"token {place + 1}", world, observed, exact))
        recovered = L.residual(world.target[0][0], world.draft[0][0])
        found.append(_place("recovered at the first token", world, self._recovered, recovered))
        expected = self._bonus[1] / self._bonus[1].sum().clamp_min(1.0)
        found.append(_place("bonus", world, self._bonus[0], expected))
        return [each for each in found if each.facts["rows"]]


def worst_places(tallies: Sequence[Tally]) -> list[Finding]:
    """The worst world for each place, by the ratio of its distance to the one by chance."""

    def excess(place: Finding) -> float:
        by_chance, off = place.facts["by_chance"], float(place.facts["total_variation"])
        return off / by_chance if by_chance else math.inf * off if off else 0.0

    worst: dict[str, Finding] = {}
    for tally in tallies:
        for place in tally.places():
            worst[place.name] = max(worst.get(place.name, place), place, key=excess)
    return list(worst.values())


def _place(name: str, world: SamplerWorld, observed: Tensor, exact: Tensor) -> Finding:
    rows = int(observed.sum())
    facts = {
        "world": world.name,
        "rows": rows,
        "total_variation": total_variation(observed, exact),
        "by_chance": variation_by_chance(rows, exact),
    }
    text = "{rows:,} rows: total variation {total_variation:.4f}, by chance {by_chance:.4f}; its worst world: {world}"
    return Finding(Part.PLACES, name, Status.MEASURED, text.format(**facts), facts)


_STRENGTHS = (0.999, 0.5, 0.2, 0.05)
UNKNOWN = "none of the known faults"
DEPENDENT = "rows share their noise"


class Evidence:
    """Evidence from the counts of all worlds; `process` has the e-value by number of rows."""

    def __init__(self, worlds: Sequence[SamplerWorld], suspects: Sequence[Fault]) -> None:
        self.suspects = suspects
        self.tallies = [Tally(world) for world in worlds]
        self._ratios = [_ratios(world, suspects) for world in worlds]
        self.process = EProcess(known=0.45, any=0.45, pairs=0.1)
        self.tokens = 0

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.tallies)

    @property
    def rows_of_each(self) -> int:
        return self.rows // len(self.tallies)

    @property
    def deviates(self) -> bool:
        return CERTAIN in self.process.reached

    def call(self, sampler: Sampler, batch: int, seeds: random.Random) -> None:
        """Call a sampler twice in each world, for as many rows."""
        for tally in self.tallies:
            cells = []
            for _ in range(2):
                generator = torch.Generator().manual_seed(seeds.getrandbits(63))
                rows = tally.world.rows(batch, generator)
                emitted = sampler.emit(rows, seeds.getrandbits(31))
                tally.add(rows, emitted)
                self.tokens += int((emitted >= 0).sum())
                cells.append(tally.world.cells(emitted, generator))
            tally.count(cells)
        self.process.see(self.log_parts(), (self.rows, self.tokens))

    def merge(self, other: Evidence) -> None:
        for mine, its in zip(self.tallies, other.tallies, strict=True):
            mine.merge(its)

    def log_e(self) -> float:
        return self.process.mean(self.log_parts())

    def log_parts(self) -> dict[str, float]:
        return {
            "known": log_mean(self.of_suspects()),
            "any": log_mean(torch.tensor(self.log_e_of_worlds(), dtype=torch.float64)),
            "pairs": log_mean(self._of_pairs()),
        }

    def log_e_of_worlds(self) -> list[float]:
        """The logarithm of each world's e-value against its joint distribution, for any alternative."""
        return [log_dirichlet(each.cells, each.world.joint) for each in self.tallies]

    def log_dependence(self) -> Tensor:
        """Log likelihood ratios, by `PAIRS`, of pairs against two independent rows of any distribution."""
        found = self._of_pairs()
        for number, tally in enumerate(self.tallies):
            for kind, pairs in enumerate(tally.pairs.view(-1, tally.world.vocab, tally.world.vocab)):
                for marginal in (pairs.sum(0), pairs.sum(1)):
                    found[number, kind] -= log_dirichlet(marginal, tally.world.target[0][0])
        return found.sum(0)

    def of_suspects(self) -> Tensor:
        """The log likelihood ratio of each suspect `[suspects, strengths]`, mixed with p, against p."""
        terms = [ratios @ each.cells for each, ratios in zip(self.tallies, self._ratios, strict=True)]
        return torch.stack(terms).sum(0)

    def _of_pairs(self) -> Tensor:
        found = []
        for tally in self.tallies:
            independent = torch.outer(tally.world.target[0][0], tally.world.target[0][0]).flatten()
            found.append([log_dirichlet(own, independent) for own in tally.pairs])
        return torch.tensor(found, dtype=torch.float64)

    def facts(self) -> dict[str, Any]:
        found = {
            f"1e{math.log10(level):.0f}": self.process.reached.get(level, (None, None)) for level in (ALARM, CERTAIN)
        }
        return {
            "log10_e": self.log_e() / math.log(10.0),
            "rows": self.rows,
            "tokens": self.tokens,
            "rows_to": {name: rows for name, (rows, _) in found.items()},
            "tokens_to": {name: tokens for name, (_, tokens) in found.items()},
        }


def _ratios(world: SamplerWorld, suspects: Sequence[Fault]) -> Tensor:
    """log r/p `[suspects, strengths, cells]` of each suspect, mixed with p."""
    p = world.joint
    r = torch.stack([joint_of(each, world) for each in suspects])[:, None]  # [suspects, 1, cells]
    strength = torch.tensor(_STRENGTHS, dtype=torch.float64)[:, None]
    mixed = strength * r + (1.0 - strength) * p
    # A cell without mass in both is no evidence on this suspect.
    return torch.where(mixed > 0.0, mixed.clamp_min(1e-300).log() - p.clamp_min(FLOOR).log(), 0.0)


def diagnose(evidence: Evidence) -> dict[str, Any]:
    """Name the fault.

    Every known fault has a likelihood in closed form, and so has the free fit (a Dirichlet average in each world, which
    pays for its freedom): the most likely is named. Rows that depend on each other come first, because under them no
    likelihood of single rows means anything.

    Returns:
        The fault, or `UNKNOWN` if a free fit is more likely; its detail; the next fault of another name, and the log10
        likelihood ratio to it; further observations, one sentence each.
    """
    logs = evidence.of_suspects().amax(-1)  # at its best share in the mixture
    order = logs.argsort(descending=True).tolist()
    best = evidence.suspects[order[0]]
    other = next(number for number in order if evidence.suspects[number].name != best.name)
    lead = float(logs[order[0]] - logs[other]) / math.log(10.0)
    free = sum(evidence.log_e_of_worlds())
    pairs = evidence.log_dependence()
    kind = int(pairs.argmax())
    found = {
        "fault": best.name,
        "detail": best.detail,
        "log10_over_next": lead,
        "next_fault": evidence.suspects[other].name,
        "notes": _notes(evidence),
    }
    if float(pairs[kind]) >= math.log(CERTAIN):
        return found | {"fault": DEPENDENT, "detail": PAIRS[kind], "next_fault": best.name}
    if float(logs[order[0]]) < free:
        return found | {"fault": UNKNOWN, "detail": f"the nearest is {best.name!r} ({best.detail})"}
    return found


def _notes(evidence: Evidence) -> list[str]:
    strays, forbidden = (sum(getattr(each, name) for each in evidence.tallies) for name in ("strays", "forbidden"))
    rows = evidence.rows
    notes = []
    if strays:
        notes.append(f"{strays} of {rows} rows go on behind a token that was not drafted: the target there is unknown")
    if forbidden:
        notes.append(f"{forbidden} tokens in {rows} rows have target probability 0")
    return notes


GOAL = 0.05  # a sampler is certified if the smallest detectable total variation is at most this in every world
ROWS = 60_000  # maximum number of rows per world
_FIRST, _GROWTH, _LARGEST = 2, 1.25, 4096  # rows of a call
_NAMED = 1_000  # rows per world, to name a fault


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

    Raises OptionError for an unusable time, or if the sampler failed or gave no tokens.
    """
    if not 0.0 < seconds < math.inf:
        raise OptionError(f"the time for a sampler must be above 0, got {seconds} seconds")
    started = now()
    worlds = sampler_worlds() if worlds is None else worlds
    time = Deadline(seconds)

    def run(number: int, named: int = 0) -> Evidence:
        """Until the sampler deviates with so many rows per world, or rows or time are used up."""
        seeds, batch, own = random.Random(f"{seed}/{number}"), float(_FIRST), Evidence(worlds, suspects())
        while True:
            own.call(sampler, int(batch), seeds)
            batch, done = min(_LARGEST, batch * _GROWTH), own.rows_of_each
            tell(min(1.0, max(done / rows, time.fraction)))
            if done >= rows or time.over or (own.deviates and done >= named):
                return own

    runs = [run(0)]
    if runs[0].deviates:
        runs.append(run(1, _NAMED))
    return _report(sampler, runs, {"parameters": list(sampler.parameters), "seed": seed}, now() - started)


def _report(sampler: Sampler, runs: Sequence[Evidence], about: Mapping[str, Any], seconds: float) -> Report:
    facts = [run.facts() for run in runs]
    found = [run.deviates for run in runs]
    evidence = runs[0]
    for other in runs[1:]:
        evidence.merge(other)
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
