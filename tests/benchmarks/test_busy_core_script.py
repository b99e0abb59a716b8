"""The script behind `make bench-busy` measures what it says, in one quick round."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # it takes both cores from all other tests
def test_the_default_takes_turns_with_plain_decoding(tmp_path: Path) -> None:
    out = tmp_path / "busy.jsonl"
    options = ["--rounds", "2", "--out", str(out), "--loads", "idle", "a loop on each core"]
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "busy_core.py"), *options], check=True, capture_output=True
    )
    found = json.loads(out.read_text())
    assert list(found["systems"]) == ["own, threads 2, none", "own, threads 2, auto"]
    for system in found["systems"].values():
        assert system["idle"]["of_idle"] == 1.0 and len(system["a loop on each core"]["turns"]) == 2
    for load in ("idle", "a loop on each core"):
        ratio = found["of_plain"][f"own, threads 2, auto, {load}"]
        assert 0 < ratio["low"] <= ratio["ratio"] <= ratio["high"]
