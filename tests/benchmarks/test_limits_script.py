"""The script behind `make bench-limits` and `make bench-gpu` measures what it says, in one quick round."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_one_round(tmp_path: Path) -> None:
    out = tmp_path / "limits.json"
    options = ["--sizes", "own:float32", "--rounds", "1", "--threads", "1", "--out", str(out)]
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "limits.py"), *options], check=True, capture_output=True)
    found = json.loads(out.read_text())
    (forward,) = found["forwards"]
    assert forward["model"] == "embedded:target"
    assert set(forward["forward_s"]) == {"1", "2", "4", "5", "8", "12", "16"}
    assert forward["B_s"] == pytest.approx(forward["weight_bytes"] / forward["bandwidth_bytes_per_s"])
    assert forward["mbu_of_one"] == pytest.approx(1 / forward["forward_in_B"]["1"])
    assert set(found["draft_step_s"]) == {"greedy", "temperature 1", "temperature 1, top-p 0.9"}
    times = (*found["draft_step_s"].values(), *found["sampling_s"].values(), *found["start_s"].values())
    assert all(0 < seconds < 60 for seconds in times)
