"""Costs of models and drafters on this machine: stored ones while they are valid, else measured on first use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

from truedraft.core.params import SamplingParams
from truedraft.core.stats import StepRecord
from truedraft.core.theory import DraftCost, TargetCost
from truedraft.drafters.base import Drafter
from truedraft.engine.policy.measuring import (
    DrafterTimes,
    Effort,
    TargetTimes,
    measure_drafter,
    measure_target,
    piecewise,
    rehearse,
)
from truedraft.engine.policy.store import LITTLE_DOUBT, CostKey, CostStore, drafter_key, target_key
from truedraft.errors import TruedraftError
from truedraft.machine import run_delay_s
from truedraft.models.base import LanguageModel
from truedraft.progress import Progress, unwatched

STEPS = 50
"""Steps in the median that a curve is checked by."""
_PARTED = 0.15
_SHORT_TARGET, _SHORT_DRAFTER = Effort(1.0, 3, 25), Effort(0.5, 3, 40)
_SHORT = "short"

Cost = TypeVar("Cost", DraftCost, TargetCost)
Made = TypeVar("Made", covariant=True)


@dataclass(frozen=True, slots=True)
class Measured(Generic[Cost]):
    """A cost and its origin.

    Attributes:
        kept: whether it was measured earlier and found in the cache folder.
        measuring_s: seconds of measuring now; 0 if it was kept.
        warnings: about the file or the measurement, one sentence each.
    """

    value: Cost
    kept: bool
    measuring_s: float
    path: Path
    warnings: tuple[str, ...] = ()


def target_cost(
    model: LanguageModel,
    *,
    progress: Progress = unwatched,
    refresh: bool = False,
    effort: Effort | None = None,
    store: CostStore | None = None,
) -> Measured[TargetCost]:
    """V(rows, contexts) of a model on this machine, in seconds; see `measure_target`.

    Args:
        progress: called after each measured forward; not called for a kept cost.
        refresh: measure even if there is a kept cost.
        store: where costs are kept; None is the user's cache folder.

    Raises:
        ModelError: the model failed.
    """
    return _kept_or_measured(
        target_key(model),
        TargetCost,
        lambda: measure_target(model, effort=effort, progress=progress),
        store or CostStore(),
        refresh,
    )


def drafter_cost(
    drafter: Drafter,
    target: LanguageModel,
    *,
    params: SamplingParams | None = None,
    progress: Progress = unwatched,
    refresh: bool = False,
    effort: Effort | None = None,
    store: CostStore | None = None,
) -> Measured[DraftCost]:
    """Cost of a drafter's proposals on this machine, in seconds; see `measure_drafter`.

    Args:
        drafter: with its options: other options are measured and kept separately.
        params: sampling options; those that shape the distribution matter. None is greedy.
        progress: called after each measured proposal; not called for a kept cost.
        refresh: measure even if there is a kept cost.
        store: where costs are kept; None is the user's cache folder.

    Raises:
        CompositionError: the drafter does not fit the target.
        DrafterError: the drafter failed.
    """
    params = params or SamplingParams()
    return _kept_or_measured(
        drafter_key(drafter, target, params),
        DraftCost,
        lambda: measure_drafter(drafter, target, params=params, effort=effort, progress=progress),
        store or CostStore(),
        refresh,
    )


def _kept_or_measured(
    key: CostKey, kind: type[Cost], measure: Callable[[], Cost], store: CostStore, refresh: bool
) -> Measured[Cost]:
    found, warning = (None, None) if refresh else store.load(key, kind)
    if found is not None:
        return Measured(found, True, 0.0, store.path(key))
    started, delay_s = time.perf_counter(), run_delay_s()
    cost = measure()
    seconds = time.perf_counter() - started
    delayed, busy = min((run_delay_s() - delay_s) / seconds, 1.0), None
    if delayed > LITTLE_DOUBT:
        busy = (
            f"the costs of {key.what} are in doubt, for other programs ran while they were measured ({delayed:.0%} of "
            "that time was spent waiting for a core); they are used until there are better ones"
        )
    warnings = (warning, busy, store.save(key, asdict(cost), delayed))
    return Measured(cost, False, seconds, store.path(key), tuple(each for each in warnings if each is not None))


class Times(Protocol[Made]):
    """Measures a cost one key at a time, as `TargetTimes` does."""

    keys: list[Any]

    def measure(self, key: Any, number: int) -> bool: ...
    def cost(self, *, whole: bool) -> Made: ...
    def release(self) -> None: ...


class Growing(Generic[Cost]):
    """A cost that is measured in pieces: known after its first round, improved by later ones, then kept.

    Args:
        name: of the drafter; None is the target.
        take: called with the first cost, and with the final one.
        known: whether there is a cost already, which a worse one does not replace.
    """

    def __init__(
        self,
        name: str | None,
        key: CostKey,
        store: CostStore,
        times: Times[Cost],
        effort: Effort,
        take: Callable[[Cost], None],
        known: bool,
    ) -> None:
        self.name, self.known = name, known
        self._key, self._store, self._least = key, store, effort.least_rounds
        self._times: Times[Cost] = times
        self._take: Callable[[Cost], None] = take
        self._spent_s = self._delay_s = 0.0
        self._pieces = piecewise(times.keys, times.measure, effort, clock=lambda: self._spent_s)

    def go_on(self) -> bool:
        """Measure one more point; returns whether there is more.

        Raises:
            TruedraftError: the model or the drafter failed.
        """
        began, delay_s = time.perf_counter(), run_delay_s()
        rounds = next(self._pieces, None)
        cost = self._times.cost(whole=True) if rounds is None else None
        self._spent_s += time.perf_counter() - began
        self._delay_s += run_delay_s() - delay_s
        if rounds and not self.known:
            cost = self._times.cost(whole=False)
        if cost is not None:
            doubt = min(max(self._delay_s / self._spent_s, 1.0 - (rounds or self._least) / self._least), 1.0)
            better = not self.known or doubt <= max(LITTLE_DOUBT, self._store.doubt(self._key))
            self._store.save(self._key, asdict(cost), doubt)
            if better:
                self._take(cost)
            self.known = True
        return rounds is not None

    def release(self) -> None:
        """Free what measuring holds; it is taken again for further measurements."""
        self._times.release()


class StepCosts:
    """Costs of a target's steps on this machine, found on first use.

    V is the given curve, or the one kept by an earlier benchmark, or a short measurement of about a second for a small
    model. That one is kept as well, but separately, so that it never replaces a longer measurement. Where V is measured
    now, drafting costs are too, so that both are of the same moment.

    Args:
        target: must not run elsewhere during a measurement.
        refresh: measure even if there are kept costs.
        store: where costs are kept; None is the user's cache folder.

    Attributes:
        measuring_s: seconds of measuring so far; 0 where all costs were kept.
        warnings: about kept costs, one sentence each.
    """

    def __init__(
        self,
        target: LanguageModel,
        *,
        forwards: TargetCost | None = None,
        refresh: bool = False,
        store: CostStore | None = None,
        progress: Progress = unwatched,
    ) -> None:
        self.target = target
        self.measuring_s = 0.0
        self.warnings: list[str] = []
        self._forwards, self._given = forwards, forwards is not None
        self._refresh = refresh
        self._store = store or CostStore()
        self._short = CostStore(self._store.folder / _SHORT, self._store.clock)
        self._progress = progress
        self._drafting: dict[tuple[Drafter, object], DraftCost] = {}

    def forwards(self) -> TargetCost:
        """V(rows, contexts) of the target, in seconds.

        Raises:
            ModelError: the model failed.
        """
        if not self._has_forwards():
            found = target_cost(
                self.target,
                effort=_SHORT_TARGET,
                store=self._short,
                progress=self._progress,
                refresh=self._refresh,
            )
            self._forwards = self._noted(found)
            self._refresh = self._refresh or not found.kept
        assert self._forwards is not None
        return self._forwards

    def drafting(self, drafter: Drafter, params: SamplingParams) -> DraftCost:
        """Seconds of a drafter's proposals for requests with these options; lets the drafter draft once.

        Raises:
            CompositionError: the drafter does not fit the target.
            DrafterError: the drafter failed.
        """
        self.forwards()  # first, because it decides whether kept costs are used
        key = _of(drafter, params)
        if not self._has_drafting(drafter, params):
            found = drafter_cost(
                drafter,
                self.target,
                params=params,
                effort=_SHORT_DRAFTER,
                store=self._short,
                progress=self._progress,
                refresh=self._refresh,
            )
            self._drafting[key] = self._noted(found)
        return self._drafting[key]

    def _has_forwards(self) -> bool:
        """Whether V is known; a kept one is loaded, however doubtful."""
        for store, doubt in ((self._store, LITTLE_DOUBT), (self._short, 1.0)):
            if self._forwards is None and not self._refresh:
                self._forwards = store.load(self._target_key, TargetCost, doubt)[0]
        return self._forwards is not None

    def _has_drafting(self, drafter: Drafter, params: SamplingParams) -> bool:
        """Whether the drafting cost is known; with a kept one the drafter drafts once."""
        key = _of(drafter, params)
        if key not in self._drafting and not self._refresh:
            found = self._short.load(drafter_key(drafter, self.target, params), DraftCost, 1.0)[0]
            if found is not None:
                rehearse(drafter, self.target, params)
                self._drafting[key] = found
        return key in self._drafting

    def pieces(
        self, drafters: Mapping[str, Drafter], params: SamplingParams, failed: Callable[[str, Exception], None]
    ) -> list[Growing[Any]]:
        """Costs still to be measured for requests with these options, V first, in pieces.

        A cost that is known, and in little doubt, is left out. No other method may be used while a cost is unknown.

        Args:
            failed: called with the name of a drafter that failed, and the error.
        """
        found: list[Growing[Any]] = []
        known, at = self._has_forwards(), self._target_key
        if not known or (not self._given and min(self._store.doubt(at), self._short.doubt(at)) > LITTLE_DOUBT):
            times = TargetTimes(self.target)
            found.append(Growing(None, at, self._short, times, _SHORT_TARGET, partial(self._take, None), known))
        self._refresh = self._refresh or not known
        for name, drafter in drafters.items():
            if drafter.limits.is_zero:
                continue
            try:
                drafter.check(self.target)
                known, at = self._has_drafting(drafter, params), drafter_key(drafter, self.target, params)
            except TruedraftError as error:
                failed(name, error)
                continue
            if not known or self._short.doubt(at) > LITTLE_DOUBT:
                of_it, take = DrafterTimes(drafter, self.target, params), partial(self._take, _of(drafter, params))
                found.append(Growing(name, at, self._short, of_it, _SHORT_DRAFTER, take, known))
        return found

    def _take(self, place: tuple[Drafter, object] | None, cost: Any) -> None:
        if place is None:
            self._forwards = cost
        else:
            self._drafting[place] = cost

    def _noted(self, found: Measured[Cost]) -> Cost:
        self.measuring_s += found.measuring_s
        self.warnings += found.warnings
        return found.value

    def check(self) -> CurveCheck | None:
        """A listener for `Engine.listeners`: where steps deviate from V, it is measured again at its next use.

        None on a device, see `judge`.
        """
        if self.target.device.type != "cpu":
            return None
        return CurveCheck(self.forwards(), self.judge)

    def judge(self, ratio: float) -> None:
        """Record that the target's steps take `ratio` times what kept curves say; see `CostStore.judge`.

        Not on a device, where forwards are only queued and the host cannot measure their time.
        """
        for store in (self._store, self._short) if self.target.device.type == "cpu" else ():
            store.judge(self._target_key, ratio, parts(ratio))

    @cached_property
    def _target_key(self) -> CostKey:
        return target_key(self.target)


def _of(drafter: Drafter, params: SamplingParams) -> tuple[Drafter, object]:
    return drafter, (params.probs_key, params.seeded)


class CurveCheck:
    """A listener for `Engine.listeners` that compares forwards with V, so that a disturbed measurement is replaced.

    Args:
        forwards: V(rows, contexts), in seconds.
        tell: called with the median of measured / V after every 50 settled steps without a part of a prompt.
    """

    def __init__(self, forwards: Callable[[int, Sequence[int]], float], tell: Callable[[float], None]) -> None:
        self._forwards = forwards
        self._tell = tell
        self._ratios: list[float] = []

    def __call__(self, step: StepRecord) -> None:
        expected_s = self._forwards(step.rows, step.contexts) if step.settled and not step.prefill else 0.0
        if expected_s <= 0.0:
            return
        self._ratios.append(step.target_s / expected_s)
        if len(self._ratios) == STEPS:
            ratio = median(self._ratios)
            self._ratios.clear()
            self._tell(ratio)


def parts(ratio: float) -> bool:
    """Whether step times and the curve differ by more than 15 %, in either direction."""
    return not 1.0 / (1.0 + _PARTED) <= ratio <= 1.0 + _PARTED
