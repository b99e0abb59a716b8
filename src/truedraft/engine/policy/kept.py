"""Costs of models and drafters on this machine, one JSON file each in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

from truedraft.core.params import SamplingParams
from truedraft.core.stats import StepRecord
from truedraft.core.theory import DraftCost, TargetCost
from truedraft.drafters.base import Drafter
from truedraft.engine.policy.measuring import (
    DrafterTimes,
    Effort,
    TargetTimes,
    Times,
    measure_drafter,
    measure_target,
    piecewise,
    rehearse,
)
from truedraft.errors import OptionError, TruedraftError
from truedraft.files import cache_folder, could_not_be_kept, written_whole
from truedraft.machine import run_delay_s, this_machine, versions
from truedraft.models.base import LanguageModel
from truedraft.models.threads import forward_threads
from truedraft.options import read_record
from truedraft.progress import Progress, unwatched

Value = TypeVar("Value")
Cost = TypeVar("Cost", DraftCost, TargetCost)

STEPS = 50
"""Steps in the median that a curve is checked by."""
LITTLE_DOUBT = 0.1
"""Doubt up to which a measurement is final; one in more doubt is used until there is a better one."""
_DOUBTED = 2.0  # doubt of a measurement that steps parted from
_FORMAT = 5  # earlier ones hold block drafters that ran module by module
_REST_S = 60.0
_ALIKE = 1.15
_PARTED = 0.15
_SHORT_TARGET, _SHORT_DRAFTER = Effort(1.0, 3, 25), Effort(0.5, 3, 40)
_SHORT = "short"
_NOT_OF_THE_MODEL = {"transformers_version", "dtype", "torch_dtype"}


@dataclass(frozen=True, slots=True)
class CostKey:
    """Identity of a kept cost."""

    what: str  # in words, for messages, as "forwards of embedded:target"
    place: Mapping[str, Any]  # names the file: another value here is another file
    state: Mapping[str, Any]  # must equal the state at the measurement; else the cost is stale

    @property
    def file_name(self) -> str:
        text = json.dumps([self.what, self.place], sort_keys=True, default=str)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


class CostStore:
    """Keeps and finds costs. Problems with a file are returned as a warning of one sentence, never raised."""

    def __init__(self, folder: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self.folder = cache_folder() / "costs" if folder is None else folder
        self.clock = clock

    def describe(self) -> str:
        """How many costs are kept, and where, in one line."""
        count = sum(1 for _ in self.folder.rglob("*.json"))  # those of short measurements, in a folder below, too
        kept = f"{count} kept in {self.folder}" if count else "none kept yet"
        return f"{kept}; measured at first use"

    def path(self, key: CostKey) -> Path:
        return self.folder / key.file_name

    def load(
        self, key: CostKey, kind: type[Value], most_doubt: float = LITTLE_DOUBT
    ) -> tuple[Value | None, str | None]:
        """The kept cost, None if there is none or its doubt (see `save`) is above `most_doubt`; and a warning."""
        kept, problem = self._read(key)
        if kept and problem is None and _doubt_of(kept) <= most_doubt:
            try:
                return read_record(kind, kept.get("cost")), None
            except OptionError as error:
                problem = f"in {self.path(key)} are damaged ({error})"
        elif problem is None and kept.get("doubted"):
            problem = f"are doubted (steps took {kept.get('parted')} times what they say)"
        return None, problem and f"the kept costs of {key.what} {problem}; they are measured again"

    def doubt(self, key: CostKey) -> float:
        kept, problem = self._read(key)
        return _doubt_of(kept) if kept and problem is None else 1.0

    def save(self, key: CostKey, cost: Mapping[str, Any], doubt: float = 0.0) -> str | None:
        """Keep a cost, unless one in less doubt is kept; returns a warning where it could not be written. The doubt is
        the share of its time in which other programs had the cores, or of its missing rounds.
        """
        if doubt > LITTLE_DOUBT and self.doubt(key) < doubt:
            return None
        before = self._read(key)[0].get("parted")
        record = {"format": _FORMAT, "what": key.what, "place": key.place, "state": key.state, "cost": cost}
        return self._write(key, record | {"measured_at": self.clock(), "parted": before, "doubt": round(doubt, 3)})

    def judge(self, key: CostKey, ratio: float, parted: bool) -> None:
        """Record the ratio of step times to a kept cost; if they `parted`, its doubt is above any other. Not within a
        minute after it was measured, nor where measuring again would not change the ratio.
        """
        kept, _ = self._read(key)
        before = kept.get("parted")
        if not parted:
            if before is not None:
                self._write(key, kept | {"parted": None, "doubted": False})
            return
        usual = isinstance(before, int | float) and before / _ALIKE <= ratio <= before * _ALIKE
        if kept and not usual and not kept.get("doubted") and self.clock() - kept.get("measured_at", 0.0) >= _REST_S:
            self._write(key, kept | {"parted": round(ratio, 2), "doubted": True})

    def _read(self, key: CostKey) -> tuple[dict[str, Any], str | None]:
        path = self.path(key)
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}, None
        except (OSError, ValueError) as error:
            return {}, f"in {path} cannot be read ({error})"
        kept = kept if isinstance(kept, dict) else {}
        if kept.get("format") != _FORMAT or not isinstance(kept.get("state"), dict):
            return kept, f"in {path} are of no known format"
        if changed := _changed(kept["state"], json.loads(json.dumps(key.state, default=str))):
            return kept, f"are stale ({changed})"
        return kept, None

    def _write(self, key: CostKey, record: Mapping[str, Any]) -> str | None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with written_whole(self.path(key)) as file:
                file.write(json.dumps(record, indent=1, default=str).encode())
        except OSError as error:
            return could_not_be_kept(self.folder, error.strerror or str(error))
        return None


def _doubt_of(kept: Mapping[str, Any]) -> float:
    if kept.get("doubted"):
        return _DOUBTED
    found = kept.get("doubt", 0.0)  # earlier versions kept nothing that was in doubt
    return float(found) if isinstance(found, int | float) else 1.0


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if old != new:
            if isinstance(old, dict) and isinstance(new, dict):
                return _changed(old, new)
            return f"{name} was {_short(old)}, now {_short(new)}"
    return ""


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def target_key(model: LanguageModel) -> CostKey:
    """Key of the cost of a target's forwards."""
    return CostKey(f"forwards of {model.name}", _place(model), {"model": model_identity(model), "versions": versions()})


def drafter_key(drafter: Drafter, target: LanguageModel, params: SamplingParams) -> CostKey:
    """Key of the cost of a drafter's proposals: its limits, public options and models, and how tokens are sampled."""
    identity = _drafter(drafter) | {"law": list(params.probs_key), "coupled": params.seeded}
    sizes = {"vocab_size": target.vocab_size, "context_length": target.context_length}
    state = {"target": sizes, "versions": versions()}
    return CostKey(f"drafter {drafter.name} for {target.name}", _place(target) | {"drafter": identity}, state)


def _place(model: LanguageModel) -> dict[str, Any]:
    """Another value of one of these is another cost, not a newer one."""
    return {
        "machine": this_machine(model.device) | {"threads": forward_threads()},  # also within a step
        "model": model.name,
        "dtype": str(model.dtype),
        "kv_dtype": model.kv_dtype,
        "fast_paths": list(model.fast_paths),
    }


def model_identity(model: LanguageModel) -> dict[str, Any]:
    """A model's sizes and configuration; the values of its weights do not change its costs."""
    config = getattr(getattr(model, "module", None), "config", None)
    plain = None if config is None else json.dumps(_plain(config.to_dict()), sort_keys=True, default=str)
    return {
        "class": type(model).__qualname__,
        "parameters": model.parameters,
        "weight_bytes": model.weight_bytes,
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "config": None if plain is None else hashlib.sha256(plain.encode()).hexdigest()[:16],
    }


def _drafter(drafter: Drafter) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in sorted(getattr(drafter, "__dict__", {}).items()):
        if name.startswith("_") or name == "limits":
            continue
        if isinstance(value, LanguageModel):
            dtypes = {"dtype": str(value.dtype), "kv_dtype": value.kv_dtype}
            options[name] = model_identity(value) | {"name": value.name, **dtypes}
        elif isinstance(value, Drafter):
            options[name] = _drafter(value)
        elif value is None or isinstance(value, bool | int | float | str):
            options[name] = value
        elif isinstance(value, tuple | list) and all(isinstance(item, int | float | str) for item in value):
            options[name] = list(value)
    return {"class": type(drafter).__qualname__, "limits": asdict(drafter.limits), "options": options}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {str(name): _plain(each) for name, each in value.items()}
        return {name: each for name, each in kept.items() if name[:1] != "_" and name not in _NOT_OF_THE_MODEL}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True)
class Measured(Generic[Cost]):
    """A cost and its origin."""

    value: Cost
    kept: bool  # whether it was measured earlier and found in the cache folder
    measuring_s: float  # seconds of measuring now; 0 if it was kept
    path: Path
    warnings: tuple[str, ...] = ()  # about the file or the measurement, one sentence each


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
        store: where costs are kept; None is the user's cache folder.

    Raises:
        ModelError: the model failed.
    """
    measure = partial(measure_target, model, effort=effort, progress=progress)
    return _kept_or_measured(target_key(model), TargetCost, measure, store or CostStore(), refresh)


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
    """Cost of a drafter's proposals on this machine, in seconds; see `measure_drafter`, and `target_cost`.

    Args:
        params: sampling options; None is greedy.

    Raises:
        CompositionError: the drafter does not fit the target.
        DrafterError: the drafter failed.
    """
    params = params or SamplingParams()
    measure = partial(measure_drafter, drafter, target, params=params, effort=effort, progress=progress)
    return _kept_or_measured(drafter_key(drafter, target, params), DraftCost, measure, store or CostStore(), refresh)


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


class Growing(Generic[Cost]):
    """A cost that is measured in pieces: known after its first round, improved by later ones, then kept.

    `take` is called with the first cost and with the final one; `known`: whether there is a cost already, which a worse
    one does not replace. `name` is the drafter's, None for the target.
    """

    def __init__(
        self,
        name: str | None,
        key: CostKey,
        store: CostStore,
        times: Times[Any, Cost],
        effort: Effort,
        take: Callable[[Cost], None],
        known: bool,
    ) -> None:
        self.name, self.known = name, known
        self._key, self._store, self._least = key, store, effort.least_rounds
        self._times: Times[Any, Cost] = times
        self._take: Callable[[Cost], None] = take
        self._spent_s = self._delay_s = 0.0
        self._pieces = piecewise(times.keys, times.measure, effort, clock=lambda: self._spent_s)

    def go_on(self) -> bool:
        """Measure one more point; returns whether there is more. TruedraftError if the model or the drafter failed."""
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
        self._times.release()


class StepCosts:
    """Costs of a target's steps on this machine, found on first use.

    V is the given curve, or a kept one, or a short measurement, kept separately so that it never replaces a longer one.
    Where V is measured now, drafting costs are too, so that both are of the same moment.

    Attributes:
        measuring_s: seconds of measuring so far; 0 where all costs were kept.
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
            found = target_cost(self.target, effort=_SHORT_TARGET, **self._measuring)
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
        if not self._has_drafting(drafter, params):
            found = drafter_cost(drafter, self.target, params=params, effort=_SHORT_DRAFTER, **self._measuring)
            self._drafting[_of(drafter, params)] = self._noted(found)
        return self._drafting[_of(drafter, params)]

    @property
    def _measuring(self) -> dict[str, Any]:
        return {"store": self._short, "progress": self._progress, "refresh": self._refresh}

    def _has_forwards(self, most_doubt: float = 1.0) -> bool:
        for store, doubt in ((self._store, LITTLE_DOUBT), (self._short, most_doubt), (self._store, most_doubt)):
            if self._forwards is None and not self._refresh:
                self._forwards = store.load(self._target_key, TargetCost, doubt)[0]
        return self._forwards is not None

    def _has_drafting(self, drafter: Drafter, params: SamplingParams) -> bool:
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
        """Costs still to be measured, V first; no other method may be used while one is unknown. `failed` gets the
        names of drafters that failed.
        """
        found: list[Growing[Any]] = []
        known, at = self._has_forwards(_DOUBTED), self._target_key  # a factor is corrected meanwhile
        if not known or (not self._given and min(self._store.doubt(at), self._short.doubt(at)) > LITTLE_DOUBT):
            times = TargetTimes(self.target)
            take = partial(setattr, self, "_forwards")
            found.append(Growing(None, at, self._short, times, _SHORT_TARGET, take, known))
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
                of_it, keep = DrafterTimes(drafter, self.target, params), self._drafting.__setitem__
                place = partial(keep, _of(drafter, params))
                found.append(Growing(name, at, self._short, of_it, _SHORT_DRAFTER, place, known))
        return found

    def _noted(self, found: Measured[Cost]) -> Cost:
        self.measuring_s += found.measuring_s
        self.warnings += found.warnings
        return found.value

    def check(self) -> CurveCheck | None:
        """A listener for `Engine.listeners` that has V measured again where steps deviate; None on a device."""
        return CurveCheck(self.forwards(), self.judge) if self.target.device.type == "cpu" else None

    def judge(self, ratio: float) -> None:
        """Record that the target's steps take `ratio` times what kept curves say; not on a device."""
        for store in (self._store, self._short) if self.target.device.type == "cpu" else ():
            store.judge(self._target_key, ratio, parts(ratio))

    @cached_property
    def _target_key(self) -> CostKey:
        return target_key(self.target)


def _of(drafter: Drafter, params: SamplingParams) -> tuple[Drafter, object]:
    return drafter, (params.probs_key, params.seeded)


class CurveCheck:
    """A listener that reports the median of measured / V after every 50 settled steps without a part of a prompt."""

    def __init__(self, forwards: Callable[[int, Sequence[int]], float], report: Callable[[float], None]) -> None:
        self._forwards = forwards
        self._report = report
        self._ratios: list[float] = []

    def __call__(self, step: StepRecord) -> None:
        expected_s = self._forwards(step.rows, step.contexts) if step.settled and not step.prefill else 0.0
        if expected_s <= 0.0:
            return
        self._ratios.append(step.target_s / expected_s)
        if len(self._ratios) == STEPS:
            ratio = median(self._ratios)
            self._ratios.clear()
            self._report(ratio)


def parts(ratio: float) -> bool:
    """Whether step times and the curve differ by more than 15 %, in either direction."""
    return not 1.0 / (1.0 + _PARTED) <= ratio <= 1.0 + _PARTED
