"""Turns: who goes first, what is compared, intervals against the textbook; and `make bench-busy`, which takes them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import turns


class Worker:
    """Says its token twice for each letter of a group, in a time of its own."""

    def __init__(self, name: str, clock: list[float], seconds: float, token: int = 1) -> None:
        self.name, self._clock, self._s, self._token = name, clock, seconds, token

    def answer(self, group: str) -> turns.Answered:
        self._clock[0] += self._s
        self._clock.append(ord(self.name))
        return turns.Answered([[self._token] * 2 for _ in group], prefill_s=0.5, alike=range(len(group) - 1))


def test_systems_take_turns_and_answers_that_must_be_alike_are_compared() -> None:
    clock = [0.0]
    workers = [Worker("a", clock, 1.0), Worker("b", clock, 2.0, token=7), Worker("c", clock, 4.0)]
    found = [each for number in range(2) for each in turns.one_round(workers, ["xyz", "xy"], number, lambda: clock[0])]
    assert "".join(map(chr, map(int, clock[1:]))) == "abcbca" + "bcacab"
    assert [(each.round, each.compared, each.different) for each in found] == [
        (0, 4, 2),
        (0, 2, 1),
        (1, 4, 2),
        (1, 2, 1),
    ]
    assert found[0].per_token_s == {"a": 1 / 6, "b": 2 / 6, "c": 4 / 6}
    assert found[1].decode_s == {"a": 0.5 / 2, "b": 1.5 / 2, "c": 3.5 / 2}
    ratio = turns.estimate(found, "a", "b")
    assert (ratio.ratio, ratio.half_width, ratio.turns) == (pytest.approx(2.0), pytest.approx(0.0), 4)
    assert turns.estimate(found, "c", "a").ratio == pytest.approx(0.25)
    assert turns.estimate(found[1:2], "a", "b", decoding=True).ratio == pytest.approx(3.0)


def test_one_round_has_no_interval() -> None:
    for middle in (turns.middle_by_mean, turns.middle_by_median):
        assert middle([0.3]) == (0.3, -math.inf, math.inf)
    found = turns.estimate([turns.Turn(1, {"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 3.0})], "a", "b")
    assert found.as_dict() == {"ratio": 2.0, "low": None, "high": None, "half_width": None, "turns": 1}


def test_the_interval_of_a_median_covers_what_it_says() -> None:
    """400 draws of 30 values; 95 % of the intervals hold the median, give or take three standard errors."""
    draw, covered = np.random.default_rng(5), 0
    for _ in range(400):
        low, high = turns.median_interval(draw.standard_cauchy(30).tolist())
        covered += low <= 0.0 <= high
    assert abs(covered / 400 - 0.95) < 0.033
    assert turns.middle_by_median([1.0, 2.0, 90.0])[0] == 2.0


def test_the_interval_of_a_ratio_covers_what_it_says() -> None:
    """400 draws of 6 rounds over 8 groups, where rounds differ by the machine and groups by what they hold.

    95 % of the intervals hold the true ratio, give or take three standard errors; the seed is fixed.
    """
    draw, covered = np.random.default_rng(3), 0
    for _ in range(400):
        of_group = draw.normal(0.0, 0.3, size=8)
        of_group -= of_group.mean() - math.log(1.2)
        logs = of_group + draw.normal(0.0, 0.05, size=(6, 8)) + draw.normal(0.0, 0.03, size=(6, 1))
        made = [
            turns.Turn(number, {"a": 1.0, "b": math.exp(value)}, {"a": 1.0, "b": 1.0})
            for number, values in enumerate(logs)
            for value in values
        ]
        found = turns.estimate(made, "a", "b")
        covered += found.low <= 1.2 <= found.high
        assert found.half_width < 0.15, "groups that differ are no noise"
    assert 0.95 - 0.033 < covered / 400 < 0.95 + 0.033
    low, high = turns.middle_by_mean([1.0, 2.0, 4.0])[1:]
    assert (low, high) == pytest.approx(stats.t.interval(0.95, 2, 7 / 3, stats.sem([1.0, 2.0, 4.0])))


@pytest.mark.slow  # it takes both cores from all other tests
def test_the_default_takes_turns_with_plain_decoding(tmp_path: Path) -> None:
    script, out = Path(turns.__file__).with_name("busy_core.py"), tmp_path / "busy.jsonl"
    options = ["--rounds", "2", "--out", str(out), "--loads", "idle", "a loop on each core"]
    subprocess.run([sys.executable, str(script), *options], check=True, capture_output=True)
    found = json.loads(out.read_text())
    assert list(found["systems"]) == ["own, threads 2, none", "own, threads 2, auto"]
    for system in found["systems"].values():
        assert system["idle"]["of_idle"] == 1.0 and len(system["a loop on each core"]["turns"]) == 2
    for load in ("idle", "a loop on each core"):
        ratio = found["of_plain"][f"own, threads 2, auto, {load}"]
        assert 0 < ratio["low"] <= ratio["ratio"] <= ratio["high"]
