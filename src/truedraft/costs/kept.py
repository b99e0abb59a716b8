"""Costs of models and drafters on this machine: kept ones where they still hold, else measured when first asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Generic, TypeVar

from truedraft.core.params import SamplingParams
from truedraft.core.stats import StepRecord
from truedraft.costs.measuring import Effort, measure_drafter, measure_target, rehearse
from truedraft.costs.store import CostKey, CostStore, drafter_key, target_key
from truedraft.drafters.base import Drafter
from truedraft.machine import run_delay_s
from truedraft.models.base import LanguageModel
from truedraft.progress import Progress, unwatched
from truedraft.theory import DraftCost, TargetCost

STEPS = 50
"""Steps whose median a curve is held to."""
_PARTED = 0.15
_DELAYED = 0.1  # share of the time of a measurement that its threads may wait for a core
_SHORT_TARGET, _SHORT_DRAFTER = Effort(1.0, 3, 25), Effort(0.5, 3, 40)
_SHORT = "short"

Cost = TypeVar("Cost", DraftCost, TargetCost)


@dataclass(frozen=True, slots=True)
class Measured(Generic[Cost]):
    """A cost, and how it came about.

    Attributes:
        value: the cost.
        kept: whether it was measured earlier and found in the cache folder.
        measuring_s: seconds that measuring took now; 0 if it was kept.
        path: its file, whether or not it could be written.
        warnings: what was wrong with the file, one sentence each.
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
        model: the target.
        progress: told after each forward that is measured; not called for a kept cost.
        refresh: measure although a kept cost would do.
        effort: how long to measure.
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
    """What proposals of a drafter cost on this machine, in seconds; see `measure_drafter`.

    Args:
        drafter: with its options: others are measured and kept apart.
        target: that it drafts for.
        params: sampling options; those that shape the distribution matter. None is greedy.
        progress: told after each proposal that is measured; not called for a kept cost.
        refresh: measure although a kept cost would do.
        effort: how long to measure.
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
    delayed = (run_delay_s() - delay_s) / seconds
    if delayed <= _DELAYED:
        lost = store.save(key, asdict(cost))
    else:
        lost = (
            f"the costs of {key.what} are not kept, for other programs ran while they were measured "
            f"({delayed:.0%} of that time was spent waiting for a core)"
        )
    warnings = (warning, lost)
    return Measured(cost, False, seconds, store.path(key), tuple(each for each in warnings if each is not None))


class StepCosts:
    """What the steps of a target cost on this machine, found out when it is first asked for.

    V is as given, or the curve that an earlier benchmark kept, or a short one: about a second for a small model, and
    kept too, but apart, so that it never stands in for a longer measurement. Where V is measured now, so is what
    drafting costs: both are of one moment.

    Args:
        target: must not run elsewhere while something is measured.
        forwards: V, where the caller has it.
        refresh: measure although kept costs would do.
        store: where costs are kept; None is the user's cache folder.
        progress: told after each measurement.

    Attributes:
        target: as given.
        measuring_s: seconds that measuring took so far; 0 where all costs were kept.
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
        self._forwards = forwards
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
        if self._forwards is None and not self._refresh:
            self._forwards = self._store.load(self._target_key, TargetCost)[0]
        if self._forwards is None:
            found = target_cost(
                self.target,
                effort=_SHORT_TARGET,
                store=self._short,
                progress=self._progress,
                refresh=self._refresh,
            )
            self._forwards = self._noted(found)
            self._refresh = self._refresh or not found.kept
        return self._forwards

    def drafting(self, drafter: Drafter, params: SamplingParams) -> DraftCost:
        """Seconds of a drafter's proposals for requests with such options; it has drafted once when this returns.

        Raises:
            CompositionError: the drafter does not fit the target.
            DrafterError: the drafter failed.
        """
        self.forwards()  # first, for it says whether kept costs will do
        key = drafter, (params.probs_key, params.seeded)
        if key not in self._drafting:
            found = drafter_cost(
                drafter,
                self.target,
                params=params,
                effort=_SHORT_DRAFTER,
                store=self._short,
                progress=self._progress,
                refresh=self._refresh,
            )
            if found.kept:
                rehearse(drafter, self.target, params)
            self._drafting[key] = self._noted(found)
        return self._drafting[key]

    def _noted(self, found: Measured[Cost]) -> Cost:
        self.measuring_s += found.measuring_s
        self.warnings += found.warnings
        return found.value

    def check(self) -> CurveCheck | None:
        """A listener for `Engine.listeners`: where steps part from V, it is measured again at its next use.

        None on a device, see `judge`.
        """
        if self.target.device.type != "cpu":
            return None
        return CurveCheck(self.forwards(), self.judge)

    def judge(self, ratio: float) -> None:
        """Take note that the target's steps take `ratio` times what kept curves say; see `CostStore.judge`.

        Not on a device, where forwards are only queued and the host does not see what they take.
        """
        for store in (self._store, self._short) if self.target.device.type == "cpu" else ():
            store.judge(self._target_key, ratio, parts(ratio))

    @cached_property
    def _target_key(self) -> CostKey:
        return target_key(self.target)


class CurveCheck:
    """Listens to `Engine.listeners` and tells how forwards stand to V, lest a disturbed minute decide for ever.

    Args:
        forwards: V(rows, contexts), in seconds.
        tell: given the median of measured / V after every 50 settled steps without a part of a prompt.
    """

    def __init__(self, forwards: Callable[[int, Sequence[int]], float], tell: Callable[[float], None]) -> None:
        self._forwards = forwards
        self._tell = tell
        self._ratios: list[float] = []

    def __call__(self, step: StepRecord) -> None:
        """A step was made."""
        expected_s = self._forwards(step.rows, step.contexts) if step.settled and not step.prefill else 0.0
        if expected_s <= 0.0:
            return
        self._ratios.append(step.target_s / expected_s)
        if len(self._ratios) == STEPS:
            ratio = median(self._ratios)
            self._ratios.clear()
            self._tell(ratio)


def parts(ratio: float) -> bool:
    """Whether what steps take and what the curve says are too far apart: by more than 15 %, either way."""
    return not 1.0 / (1.0 + _PARTED) <= ratio <= 1.0 + _PARTED
