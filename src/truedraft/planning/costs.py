"""Costs of models and drafters on this machine: kept ones where they still hold, else measured now and kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from truedraft.core.sampling import SamplingParams
from truedraft.drafters.base import Drafter
from truedraft.models.base import LanguageModel
from truedraft.planning.curve_check import parts
from truedraft.planning.identity import drafter_identity, model_identity, versions
from truedraft.planning.machine import this_machine
from truedraft.planning.measure_drafter import measure_drafter
from truedraft.planning.measure_target import measure_target
from truedraft.planning.rounds import Effort, Progress
from truedraft.planning.store import CostKey, CostStore
from truedraft.theory import DraftCost, TargetCost


class _Cost(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


Cost = TypeVar("Cost", bound=_Cost)


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
    progress: Progress | None = None,
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
        _target_key(model),
        TargetCost.from_dict,
        lambda: measure_target(model, effort=effort, progress=progress),
        store or CostStore(),
        refresh,
    )


def drafter_cost(
    drafter: Drafter,
    target: LanguageModel,
    *,
    params: SamplingParams | None = None,
    progress: Progress | None = None,
    refresh: bool = False,
    effort: Effort | None = None,
    store: CostStore | None = None,
) -> Measured[DraftCost]:
    """What proposals of a drafter cost on this machine, in seconds; see `measure_drafter`.

    Args:
        drafter: with its options: others are measured and kept apart.
        target: that it drafts for.
        params: sampling options; those that shape the law matter. None is greedy.
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
        _drafter_key(drafter, target, params),
        DraftCost.from_dict,
        lambda: measure_drafter(drafter, target, params=params, effort=effort, progress=progress),
        store or CostStore(),
        refresh,
    )


def kept_target_cost(model: LanguageModel, store: CostStore | None = None) -> TargetCost | None:
    """What `target_cost` kept for a model on this machine; None where it would have to measure."""
    return (store or CostStore()).load(_target_key(model), TargetCost.from_dict)[0]


def judge_target_cost(model: LanguageModel, ratio: float, store: CostStore | None = None) -> None:
    """Take note that a model's steps take `ratio` times the kept V; see `CostStore.judge`."""
    (store or CostStore()).judge(_target_key(model), ratio, parts(ratio))


def _target_key(model: LanguageModel) -> CostKey:
    return CostKey(f"forwards of {model.name}", _place(model), {"model": model_identity(model), "versions": versions()})


def _drafter_key(drafter: Drafter, target: LanguageModel, params: SamplingParams) -> CostKey:
    place = _place(target) | {"drafter": drafter_identity(drafter, params)}
    sizes = {"vocab_size": target.vocab_size, "context_length": target.context_length}
    return CostKey(f"drafter {drafter.name} for {target.name}", place, {"target": sizes, "versions": versions()})


def _place(model: LanguageModel) -> dict[str, Any]:
    """Machine, threads, device, model, dtype and fast paths: another of these is another cost, not a newer one."""
    return {
        "machine": asdict(this_machine(model.device)),
        "model": model.name,
        "dtype": str(model.dtype),
        "fast_paths": list(model.fast_paths),
    }


def _kept_or_measured(
    key: CostKey, parse: Callable[[object], Cost], measure: Callable[[], Cost], store: CostStore, refresh: bool
) -> Measured[Cost]:
    found, warning = (None, None) if refresh else store.load(key, parse)
    if found is not None:
        return Measured(found, True, 0.0, store.path(key))
    started = time.perf_counter()
    cost = measure()
    seconds = time.perf_counter() - started
    warnings = (warning, store.save(key, cost.to_dict()))
    return Measured(cost, False, seconds, store.path(key), tuple(each for each in warnings if each is not None))
