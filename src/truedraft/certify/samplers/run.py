"""A sampler, run on worlds whose answer is known until its evidence speaks, and what came of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from truedraft.certify.checks import PATIENCE, Deadline, Status, Tell, now
from truedraft.certify.samplers.contract import Sampler
from truedraft.certify.samplers.detectable import smallest_detectable
from truedraft.certify.samplers.diagnosis import Diagnosis, diagnose
from truedraft.certify.samplers.evidence import SHARE_OF_ANY, Evidence
from truedraft.certify.samplers.suspects import suspects
from truedraft.certify.samplers.tally import Place, Tally, total_variation, variation_by_chance, worst_places
from truedraft.certify.samplers.worlds import SamplerWorld, sampler_worlds
from truedraft.errors import OptionError

NOTICED, DEVIATES = 1e3, 1e6
"""E-values: rows until these are told; a deviation is called one where the second is reached, and again."""
GOAL = 0.05
"""A sampler is lossless as far as was tested if a total variation of this size would have been found in every world."""
ROWS = 60_000
"""Of each world, at most."""
_FIRST, _GROWTH, _LARGEST = 2, 1.25, 4096  # rows of a call
_LEAST = 30_000  # of each world, for which more time is taken
_NAMED = 1_000  # of each world, to name a fault


@dataclass(frozen=True, slots=True)
class WorldResult:
    """One world.

    Attributes:
        name: of it.
        rows: that were judged.
        log10_e: of its e-value against the exact distribution, whatever the fault.
        total_variation: between the tokens and the exact distribution.
        by_chance: what that would be on average without a fault.
        smallest_detectable: the total variation that so many rows would have shown.
    """

    name: str
    rows: int
    log10_e: float
    total_variation: float
    by_chance: float
    smallest_detectable: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """One of the runs; the second one has other seeds.

    Attributes:
        log10_e: of the e-value at its end.
        rows: that were judged.
        tokens: that were emitted.
        rows_to: rows until each of the e-values `NOTICED` and `DEVIATES`; None where it was not reached.
        tokens_to: tokens until then.
    """

    log10_e: float
    rows: int
    tokens: int
    rows_to: dict[str, int | None]
    tokens_to: dict[str, int | None]


@dataclass(frozen=True, slots=True)
class SamplerCertificate:
    """What came of a sampler.

    Attributes:
        name: of it.
        parameters: what it is called with.
        status: HOLDS, FAILS, or NOT_ENOUGH evidence.
        runs: one, or two where the first found a deviation.
        worlds: of all runs together.
        places: where tokens are, and how far from what they should be.
        accepted: drafted tokens kept, for each row.
        accepted_by_rule: the same of speculative sampling, token by token.
        diagnosis: what is wrong; None where nothing was found.
        seed: of the first run.
        seconds: that it took.
    """

    name: str
    parameters: tuple[str, ...]
    status: Status
    runs: tuple[RunResult, ...]
    worlds: tuple[WorldResult, ...]
    places: tuple[Place, ...]
    accepted: float
    accepted_by_rule: float
    diagnosis: Diagnosis | None
    seed: int
    seconds: float

    @property
    def smallest_detectable(self) -> float:
        """The total variation that would have been found in every world."""
        return max(world.smallest_detectable for world in self.worlds)


@dataclass
class _Run:
    """A run under way."""

    worlds: Sequence[SamplerWorld]
    seeds: random.Random
    evidence: Evidence
    tallies: list[Tally]
    tokens: int = 0
    batch: float = _FIRST
    reached: dict[float, tuple[int, int]] = field(default_factory=dict)  # rows and tokens, by e-value

    @property
    def rows_of_each(self) -> int:
        """Rows of each world."""
        return self.evidence.rows // len(self.worlds)

    def go_on(self, sampler: Sampler) -> None:
        """Two calls in each world, and a look at the evidence."""
        batch = int(self.batch)
        for number, world in enumerate(self.worlds):
            cells = []
            for _ in range(2):
                generator = torch.Generator().manual_seed(self.seeds.getrandbits(63))
                rows = world.rows(batch, generator)
                emitted = sampler.emit(rows, self.seeds.getrandbits(31))
                self.tallies[number].add(rows, emitted)
                self.tokens += int((emitted >= 0).sum())
                cells.append(world.cells(emitted, generator))
            self.evidence.add(number, cells)
        log_e = self.evidence.log_e()
        for level in (NOTICED, DEVIATES):
            if log_e >= math.log(level):
                self.reached.setdefault(level, (self.evidence.rows, self.tokens))
        self.batch = min(_LARGEST, self.batch * _GROWTH)

    def result(self) -> RunResult:
        """What came of it."""
        found = {f"1e{math.log10(level):.0f}": self.reached.get(level) for level in (NOTICED, DEVIATES)}
        return RunResult(
            self.evidence.log_e() / math.log(10.0),
            self.evidence.rows,
            self.tokens,
            {name: None if each is None else each[0] for name, each in found.items()},
            {name: None if each is None else each[1] for name, each in found.items()},
        )


def certify_sampler(
    sampler: Sampler,
    *,
    seconds: float = 300.0,
    seed: int = 0,
    rows: int = ROWS,
    worlds: Sequence[SamplerWorld] | None = None,
    tell: Tell = lambda done: None,
) -> SamplerCertificate:
    """Check that a sampler's tokens, continued by the target, have the target's joint distribution.

    Args:
        sampler: the function.
        seconds: about how long to take at most; up to four times as long where little could be seen by then, or where a
            deviation must be seen a second time. A fast sampler is done sooner.
        seed: of drafts and of the sampler's numbers.
        rows: of each world, after which a run is over at the latest.
        worlds: None is `sampler_worlds`.
        tell: is told the fraction that is done.

    Raises:
        OptionError: an unusable time, or the sampler failed or gave back no tokens.
    """
    if not 0.0 < seconds < math.inf:
        raise OptionError(f"the time for a sampler must be above 0, got {seconds} seconds")
    started = now()
    worlds = sampler_worlds() if worlds is None else worlds
    time, patience = Deadline(seconds), Deadline(PATIENCE * seconds)

    def run(number: int, done: Callable[[_Run], bool]) -> _Run:
        seeds = random.Random(f"{seed}/{number}")
        own = _Run(worlds, seeds, Evidence(worlds, suspects()), [Tally(world) for world in worlds])
        while not own.rows_of_each or not done(own):
            own.go_on(sampler)
            tell(min(1.0, max(own.rows_of_each / rows, (time if number == 0 else patience).fraction)))
        return own

    def first_done(own: _Run) -> bool:
        limit = time if own.rows_of_each >= _LEAST else patience
        return DEVIATES in own.reached or own.rows_of_each >= rows or limit.over

    def second_done(own: _Run) -> bool:
        again = DEVIATES in own.reached and own.rows_of_each >= _NAMED
        return again or own.rows_of_each >= rows or patience.over

    runs = [run(0, first_done)]
    if DEVIATES in runs[0].reached:
        runs.append(run(1, second_done))
    return _certificate(sampler, worlds, runs, seed, now() - started)


def _certificate(
    sampler: Sampler, worlds: Sequence[SamplerWorld], runs: Sequence[_Run], seed: int, seconds: float
) -> SamplerCertificate:
    told = tuple(run.result() for run in runs)
    evidence, tallies = runs[0].evidence, runs[0].tallies
    for other in runs[1:]:
        evidence.merge(other.evidence)
        for tally, more in zip(tallies, other.tallies, strict=True):
            tally.merge(more)
    results = _world_results(worlds, evidence)
    found = [DEVIATES in run.reached for run in runs]
    if all(found):
        status = Status.FAILS
    elif any(found) or max(each.smallest_detectable for each in results) > GOAL:
        status = Status.NOT_ENOUGH
    else:
        status = Status.HOLDS
    rows = sum(tally.rows for tally in tallies)
    return SamplerCertificate(
        sampler.name,
        sampler.parameters,
        status,
        told,
        tuple(results),
        tuple(worst_places(tallies, evidence.counts)),
        sum(tally.accepted for tally in tallies) / rows,
        sum(tally.accepted_by_rule for tally in tallies) / rows,
        diagnose(evidence, tallies) if any(found) else None,
        seed,
        seconds,
    )


def _world_results(worlds: Sequence[SamplerWorld], evidence: Evidence) -> list[WorldResult]:
    needed = math.log(DEVIATES * len(worlds) / SHARE_OF_ANY)
    return [
        WorldResult(
            world.name,
            counts.rows,
            log_e / math.log(10.0),
            total_variation(counts.cells, world.joint),
            variation_by_chance(counts.rows, world.joint),
            smallest_detectable(world.joint, counts.rows, needed),
        )
        for world, counts, log_e in zip(worlds, evidence.counts, evidence.log_e_of_worlds(), strict=True)
    ]
