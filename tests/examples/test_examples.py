"""The examples run, small, and write the line of results that docs/processes.md is made of."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SMALL = {
    "langevin": ["--steps", "40"],
    "metropolis": ["--steps", "60"],
    "diffusion": ["--steps", "40", "--seconds", "0.5", "--width", "64"],
    "image_tokens": ["--seconds", "1", "--images", "1", "--certify", "1"],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "image_tokens" else ()) for name in SMALL]
)
def test_an_example_runs_and_its_certificate_holds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name != "langevin":
        pytest.importorskip("sklearn")
    out, drawn = tmp_path / "results.jsonl", tmp_path / "drawn.png"
    words = [*SMALL[name], "--turns", "1", "--window", "3", "--out", str(out), "--picture", str(drawn)]
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    record = json.loads(out.read_text())
    assert record["example"] == name and record["certificate"]["holds"] and drawn.stat().st_size
    assert not record["certificate"].get("failed")
    assert record["ways"]["plain"]["sequential_calls"] == record["steps"]
    assert all(own["speedup"]["median"] > 0 for own in record["ways"].values())
    assert "plain" in capsys.readouterr().out
