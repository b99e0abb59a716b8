"""The script that measures drafting ahead runs, and writes what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from truedraft.embedded import embedded_folder
from truedraft.errors import ModelNotFoundError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "parallel_draft.py"


def test_a_row_says_what_async_brought(tmp_path: Path) -> None:
    try:
        embedded_folder("target")
    except ModelNotFoundError:
        pytest.skip("the embedded models are not in this checkout")
    out = tmp_path / "parallel_draft.json"
    words = ["--sizes", "own", "--ways", "greedy", "--prompts", "1", "--rounds", "1", "--out", str(out)]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    assert json.loads(done.stdout) == row and found["draft"] == "draft:embedded:draft,async=1"
    assert (row["size"], row["way"]) == ("own", "greedy") and 0.0 < row["ahead_hit_rate"] < 1.0
    assert row["speedup_of_async"] > 0.0 and row["process_cpu_share"] > row["ahead_cpu_share"] > 0.0
