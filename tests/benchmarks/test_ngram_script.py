"""The script that measures tables of n-grams: every way at every temperature, on text that was not counted."""

from __future__ import annotations

import json
import platform
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from truedraft.embedded import embedded_folder, heldout_prompts_file
from truedraft.errors import ModelNotFoundError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "ngram.py"

try:
    embedded_folder("target")
except ModelNotFoundError:
    pytest.skip("the embedded models are not in this checkout", allow_module_level=True)


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(autouse=True)
def pinned_library(script: dict[str, Any]) -> None:
    pinned = json.loads((ROOT / "recipes" / "stdlib" / "manifest.json").read_text())["python"]
    if platform.python_version() != pinned:
        pytest.skip(f"the recipe's text is the standard library of Python {pinned}")


def test_no_prompt_is_cut_from_a_file_that_is_counted(script: dict[str, Any]) -> None:
    counted = {source.path for source in script["load_sources"]() if not source.held_out}
    prompts = [json.loads(line)["file"] for line in heldout_prompts_file().read_text().splitlines()]
    assert prompts and not counted & set(prompts)


def test_every_way_is_measured(script: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "ngram.json"
    few = ["--prompts", "2", "--timed-prompts", "1", "--rounds", "1", "--tokens", "4", "--files", "5"]
    command = [sys.executable, str(SCRIPT), "--pad-to", "none", *few, "--out", str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(out.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == found
    cells = {
        f"{name}, {way}, temperature {at:g}"
        for name in ("bigram", "trigram")
        for way in script["WAYS"]
        for at in script["TEMPERATURES"]
    }
    assert set(found["acceptance"]) == set(found["speedup"]) == cells
    for each in found["acceptance"].values():
        assert each["mean_acceptance_length"] >= 1.0 and 0.0 <= each["draft_acceptance_rate"] <= 1.0
    for table in found["tables"].values():
        assert table["counted_tokens"] > 1000 and min(table["proposal_ms"].values()) > 0.0
