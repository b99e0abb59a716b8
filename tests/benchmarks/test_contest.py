"""Turns: who goes first, what is compared, intervals against the textbook; and `make bench-busy`, which takes them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

import contest
from truedraft import SamplingParams
from truedraft.errors import ModelError
from truedraft.measure.bench import Group, Row, System, SystemOutput

GROUPS = [Group(tuple(text), tuple((ord(each),) for each in text), SamplingParams()) for text in ("xyz", "xy")]


class Worker(System):
    """Says its token twice for each prompt, in a time of its own, a quarter of it for the first tokens."""

    def __init__(self, name: str, clock: list[float], seconds: float, warnings: tuple[str, ...] = ()) -> None:
        self.name, self._clock, self._s, self._warnings = name, clock, seconds, warnings

    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> SystemOutput:
        self._clock[0] += self._s
        self._clock.append(ord(self.name))
        answers = ((1, 1),) * len(prompts)
        return SystemOutput(answers, (0.0,), self._s / 4, 1, 0, 0, None, None, warnings=self._warnings)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    fake = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: 0.0)
    monkeypatch.setattr("truedraft.measure.bench.runs.time", fake)
    return now


def test_systems_take_turns_and_their_speeds_are_compared(clock: list[float]) -> None:
    workers = [Worker("a", clock, 1.0), Worker("b", clock, 2.0), Worker("c", clock, 4.0)]
    rows = [row for number in range(2) for row in contest.one_round(workers, GROUPS, number)]
    assert "".join(map(chr, map(int, clock[1:]))) == "abcbca" + "bcacab"
    assert contest.log_ratios(rows, "a", "b") == pytest.approx([np.log(2)] * 2)
    assert contest.log_ratios(rows, "c", "a", decoding=True) == pytest.approx([-np.log(4)] * 2)
    with pytest.raises(ModelError, match="undrafted"):
        contest.one_round([Worker("a", clock, 1.0, ("went on undrafted",))], GROUPS, 0)


def made(logs: Sequence[Sequence[float]]) -> list[Row]:
    """Rows of two systems, the logarithm of whose ratio is given for each round and group."""
    rows = []
    for number, values in enumerate(logs):
        for place, value in enumerate(values):
            for name, seconds in (("a", 1.0), ("b", float(np.exp(value)))):
                output = SystemOutput(((1,),), (0.0,), 0.0, 1, 0, 0, None, None)
                rows.append(Row(name, (str(place),), number, 0, seconds, 0.0, output))
    return rows


def test_one_round_has_no_interval() -> None:
    for median in (False, True):
        found = contest.estimate(made([[np.log(2.0)]]), "a", "b", median=median)
        assert found.pop("ratio") == pytest.approx(2.0)
        assert found == {"low": None, "high": None, "half_width": None, "rounds": 1}


def test_the_interval_of_a_median_covers_what_it_says() -> None:
    """200 draws of 30 values; 95 % of the intervals hold the median, give or take three standard errors."""
    draw, covered = np.random.default_rng(5), 0
    for _ in range(200):
        found = contest.estimate(made(draw.laplace(0.0, 0.1, size=(30, 1))), "a", "b", median=True)
        covered += found["low"] <= 1.0 <= found["high"]
    assert abs(covered / 200 - 0.95) < 0.047
    rows = made([[1.0], [2.0], [9.0]])
    assert contest.estimate(rows, "a", "b", median=True)["ratio"] == pytest.approx(np.exp(2.0), abs=1e-4)


def test_the_interval_of_a_ratio_covers_what_it_says() -> None:
    """400 draws of 6 rounds over 8 groups, where rounds differ by the machine and groups by what they hold.

    95 % of the intervals hold the true ratio, give or take three standard errors; the seed is fixed.
    """
    draw, covered = np.random.default_rng(3), 0
    for _ in range(400):
        of_group = draw.normal(0.0, 0.3, size=8)
        of_group -= of_group.mean() - np.log(1.2)
        logs = of_group + draw.normal(0.0, 0.05, size=(6, 8)) + draw.normal(0.0, 0.03, size=(6, 1))
        found = contest.estimate(made(logs), "a", "b")
        covered += found["low"] <= 1.2 <= found["high"]
        assert found["half_width"] < 0.15, "groups that differ are no noise"
    assert 0.95 - 0.033 < covered / 400 < 0.95 + 0.033
    found = contest.estimate(made([[0.1], [0.2], [0.4]]), "a", "b")
    low, high = stats.t.interval(0.95, 2, 0.7 / 3, stats.sem([0.1, 0.2, 0.4]))
    assert (found["low"], found["high"]) == pytest.approx((np.exp(low), np.exp(high)), abs=1e-4)


@pytest.mark.slow  # it takes both cores from all other tests
def test_the_default_takes_turns_with_plain_decoding(tmp_path: Path) -> None:
    script, out = Path(contest.__file__).with_name("busy_core.py"), tmp_path / "busy.jsonl"
    options = ["--rounds", "2", "--out", str(out), "--loads", "idle", "a loop on each core"]
    subprocess.run([sys.executable, str(script), *options], check=True, capture_output=True)
    found = json.loads(out.read_text())
    assert list(found["systems"]) == ["plain", "auto"]
    for system in found["systems"].values():
        assert len(system["a loop on each core"]["turns"]) == 2
    for load in ("idle", "a loop on each core"):
        ratio = found["of_plain"][load]
        assert 0 < ratio["low"] <= ratio["ratio"] <= ratio["high"]
