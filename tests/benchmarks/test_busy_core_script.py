"""The script behind `make bench-busy` measures what it says, in one quick round."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_one_round(tmp_path: Path) -> None:
    out = tmp_path / "busy.jsonl"
    options = ["--sizes", "own", "--rounds", "1", "--turn-s", "0.05", "--loads", "idle", "a loop", "--out", str(out)]
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "busy_core.py"), *options], check=True, capture_output=True
    )
    (system,) = json.loads(out.read_text())["systems"].values()
    assert system["idle"]["of_idle"] == 1.0
    assert system["a loop"]["of_idle"] == pytest.approx(system["a loop"]["per_s"] / system["idle"]["per_s"], abs=0.01)
    assert 0 < system["idle"]["step_s"] < 10


@pytest.mark.slow  # it takes both cores from all other tests
def test_auto_takes_turns_with_plain_decoding(tmp_path: Path) -> None:
    out = tmp_path / "busy.jsonl"
    loads = ["a loop on each core"]
    options = ["--auto", "--sizes", "own", "--rounds", "1", "--out", str(out), "--loads", *loads]
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "busy_core.py"), *options], check=True, capture_output=True
    )
    found = json.loads(out.read_text())
    assert list(found["systems"]) == ["own, threads 2, none", "own, threads 2, auto"]
    for load in loads:
        ratio = found["of_plain"][f"own, threads 2, auto, {load}"]
        low, high = ratio["interval"]
        assert 0 < low <= ratio["median"] <= high
