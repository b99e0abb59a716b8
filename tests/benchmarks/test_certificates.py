"""The script behind `make certify`, and what its last run wrote."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from truedraft.embedded import embedded_folder
from truedraft.errors import ModelNotFoundError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "certify_embedded.py"
RESULTS = ROOT / "benchmarks" / "results" / "certificates.jsonl"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_every_pair_has_its_cells(script: dict[str, Any]) -> None:
    """Every drafter with every rule, at temperature 0, 0.7 and 1, plain and coupled, batch 1 and 8."""
    cells = list(script["cells"]())
    assert len({cell.key for cell in cells}) == len(cells)
    for drafter in script["DRAFTERS"]:
        own = {(rule, c.temperature, c.coupled, c.batch) for c in cells if c.drafter == drafter for rule in c.rules}
        for rule in script["LOSSLESS"]:
            for batch in (1, 8):
                modes = {(t, coupled) for r, t, coupled, b in own if (r, b) == (rule, batch)}
                assert modes == {(0.0, False), (0.7, False), (0.7, True), (1.0, False), (1.0, True)}
        for rule in script["LOSSY"]:
            assert {t for r, t, *_ in own if r == rule} == {0.0, 1.0}


def test_the_kept_certificates_are_issued_or_measured(script: dict[str, Any]) -> None:
    """Every cell whose drafter and rule go together: certified if lossless, measured with an interval if not."""
    found = {record["cell"]: record for record in map(json.loads, RESULTS.read_text().splitlines())}
    refused = {
        cell.key
        for cell in script["cells"]()
        if cell.rules == ("block",) and ("branching" in cell.drafter or "sampled" in cell.drafter)
    }
    assert set(found) == {cell.key for cell in script["cells"]()} - refused
    for record in found.values():
        assert record["certified"] is record["lossless"], record["verdict"]
        assert not record["failures"], record["verdict"]
        if not record["lossless"]:
            low, high = record["divergence"]["total_variation_ci95"]
            assert low <= record["divergence"]["total_variation"] <= high
        elif record["temperature"] > 0.0:
            assert record["tokens"]["smallest_detectable_tv"] < 0.1


def has_embedded_models() -> bool:
    try:
        embedded_folder("target")
    except ModelNotFoundError:
        return False
    return True


@pytest.mark.skipif(not has_embedded_models(), reason="the embedded models are not in this checkout")
def test_one_cell_is_made_and_a_second_run_goes_on_behind_it(tmp_path: Path) -> None:
    out = tmp_path / "certificates.jsonl"
    run = [sys.executable, str(SCRIPT), "--minutes", "0.05", "--limit", "1", "--out", str(out)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (record,) = map(json.loads, out.read_text().splitlines())
    assert record["certified"] is True
    assert record["temperature"] == 0.0
    assert record["controls_found"] == record["controls"] == 2
    assert "1 of 1: CERTIFIED" in done.stderr
    again = subprocess.run([*run, "--every", "1000"], capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 0
    assert len(out.read_text().splitlines()) == 1
