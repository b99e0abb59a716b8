"""Kept curves are held to what steps take: by made-up steps and clocks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from timed_doubles import Clock, TimedModel

from support.records import step_record
from truedraft import Engine
from truedraft.core.params import SamplingParams
from truedraft.core.theory import TargetCost
from truedraft.engine.policy import (
    CostStore,
    CurveCheck,
    Effort,
    Measured,
    StepCosts,
    parts,
    sizes,
    target_cost,
)
from truedraft.engine.policy.sizes import ratio_of_steps
from truedraft.measure.bench import OurEngine, Suite
from truedraft.measure.bench import costs as bench_costs
from truedraft.testing import MarkovModel

ONCE = Effort(budget_s=0.0, least_rounds=1, most_rounds=1)
V = TargetCost.fit({(rows, context): 0.01 * rows for rows in (1, 2, 4) for context in (10, 100)})
STEP = step_record(2, 20, 1, target_s=0.02, total_s=0.03)


def test_the_median_of_50_decoding_steps_is_told() -> None:
    told: list[float] = []
    check = CurveCheck(V, told.append)
    for number in range(200):
        slow = number % 5 == 0  # a neighbour now and then
        check(step_record(2, 20, prefill=True, target_s=9.0))
        check(dataclasses.replace(STEP, target_s=9.0, settled=False))
        check(dataclasses.replace(STEP, target_s=0.2 if slow else 0.03 if number >= 100 else 0.02))
    assert told == pytest.approx([1.0, 1.0, 1.5, 1.5])


def test_what_is_too_far_apart() -> None:
    assert [parts(ratio) for ratio in (0.5, 0.86, 0.88, 1.0, 1.14, 1.16, 3.0)] == [True, True] + [False] * 3 + [
        True
    ] * 2


class Kept:
    """A kept curve of a model, judged as time goes by."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.clock.now = 1e9
        self.store = CostStore(folder, self.clock)
        self.model = MarkovModel.random(5, 0, context_length=64)

    def use(self) -> Measured[TargetCost]:
        return target_cost(self.model, effort=ONCE, store=self.store)

    def steps_take(self, ratio: float, after_s: float) -> None:
        self.clock.now += after_s
        StepCosts(self.model, store=self.store).judge(ratio)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    found = Kept(tmp_path)
    found.use()
    return found


@pytest.mark.parametrize("ratio", [0.4, 1.3])
def test_a_curve_from_which_steps_parted_is_measured_again_and_it_is_said(kept: Kept, ratio: float) -> None:
    kept.steps_take(1.1, after_s=100)
    assert kept.use().kept
    kept.steps_take(ratio, after_s=100)
    again = kept.use()
    assert not again.kept
    assert again.warnings and f"steps took {ratio} times what they say" in again.warnings[0]
    assert kept.use().kept


def test_it_is_measured_at_most_once_a_minute(kept: Kept) -> None:
    kept.steps_take(2.0, after_s=59)
    assert kept.use().kept
    kept.steps_take(2.0, after_s=2)
    assert not kept.use().kept


def test_steps_that_always_part_do_not_have_it_measured_for_ever(kept: Kept) -> None:
    """A small model's forwards take longer in an engine, whose other work empties the caches, than by themselves."""
    kept.steps_take(1.4, after_s=100)
    assert not kept.use().kept
    kept.steps_take(1.5, after_s=100)
    assert kept.use().kept, "as before it was measured again"
    kept.steps_take(0.6, after_s=100)
    assert not kept.use().kept
    kept.steps_take(1.0, after_s=100)
    kept.steps_take(0.6, after_s=100)
    assert not kept.use().kept, "what was usual once no longer is"


def test_nothing_is_kept_and_nothing_is_judged(tmp_path: Path) -> None:
    store = CostStore(tmp_path / "none")
    StepCosts(MarkovModel.random(5, 0, context_length=64), store=store).judge(9.0)
    assert not store.folder.exists()


def test_steps_of_an_engine_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("truedraft.engine.step.time.perf_counter", clock)
    engine = Engine(TimedModel.of(clock, lambda rows, contexts: 0.013 * rows))
    assert ratio_of_steps(engine, V) == pytest.approx(1.3)
    assert engine.listeners == []
    small = Engine(MarkovModel.random(5, 0, context_length=40))
    assert ratio_of_steps(small, V) is None


@pytest.mark.parametrize(("ratio", "measured"), [(1.1, 1), (2.2, 2), (None, 1)])
def test_a_benchmark_measures_kept_curves_again_where_plain_steps_part(
    kept: Kept, ratio: float | None, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def curve(model: MarkovModel, *, progress: object, refresh: bool) -> Measured[TargetCost]:
        asked.append(refresh)
        return dataclasses.replace(kept.use(), value=V, kept=not refresh)

    monkeypatch.setattr(bench_costs, "target_cost", curve)
    monkeypatch.setattr(bench_costs, "read_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(sizes, "ratio_of_steps", lambda engine, forwards: ratio)
    suite = Suite(kept.model, lossless=True, ours=[OurEngine("plain", Engine(kept.model))])
    found = bench_costs.measure_costs(suite, SamplingParams(), lambda done, label: None)
    assert asked == [False, True][:measured]
    assert found.kept == (measured == 1)
    assert any("2.20 times" in warning for warning in found.warnings) == (measured == 2)
