"""The script that counts what rules cost and gain: it counts, goes on where it stopped, and its errors are right."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from truedraft.embedded import embedded_folder
from truedraft.errors import ModelNotFoundError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "rules.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_every_drafter_is_held_against_the_optimal_rule_and_block_against_chains(script: dict[str, Any]) -> None:
    pairs = script["comparisons"]()
    coupling = pairs["coupled against the optimal rule"]
    assert {old.drafter for _, old in coupling} == set(script["DRAFTERS"])
    assert all((new.judged, old.judged) == ("coupled", "speculative") for new, old in coupling)
    assert {(new.drafter, new.temperature) for new, _ in pairs["block"]} == {
        (f"draft,num_speculative_tokens={length}", t) for length in (4, 8) for t in (0.7, 1.0)
    }
    assert all(old.unheard and not new.unheard for new, old in pairs["heads that hear the noise"])


def test_errors_are_those_of_resampled_prompts(script: dict[str, Any]) -> None:
    """Against a bootstrap over prompts of 4,000 draws, whose own error is 1 %; the generator's seed is fixed."""
    generator = np.random.default_rng(1)
    calls = generator.integers(20, 60, size=40)
    counts = [(int(c * (1.5 + 0.3 * generator.random())), int(c)) for c in calls]
    ratio, parts = script["ratio_of"](counts)
    assert ratio == pytest.approx(sum(e for e, _ in counts) / sum(c for _, c in counts))
    drawn = np.array(counts)[generator.integers(0, 40, size=(4000, 40))].sum(axis=1)
    assert script["error_of"](parts) == pytest.approx((drawn[:, 0] / drawn[:, 1]).std(), rel=0.1)


def test_one_way_is_counted_once_and_kept(tmp_path: Path) -> None:
    try:
        embedded_folder("target")
    except ModelNotFoundError:
        pytest.skip("the embedded models are not in this checkout")
    out = tmp_path / "rules.json"
    options = ["--limit", "2", "--tokens", "6", "--rounds", "1", "--only", "prompt-lookup", "--no-fast-paths"]

    def run(*more: str) -> tuple[dict[str, Any], str]:
        command = [sys.executable, str(SCRIPT), *options, "--out", str(out), *more]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert json.loads(done.stdout.splitlines()[-1]) == json.loads(out.read_text())
        return json.loads(out.read_text()), done.stderr

    found, _ = run()
    assert len(found["ways"]) == 4, "two temperatures, coupled and not"
    for way in found["ways"]:
        assert way["emitted_tokens"] == 2 * 5, "the first token of each answer is the prompt's"
        assert way["mean_acceptance_length"] == way["emitted_tokens"] / way["target_calls"]
    assert [len(each) for each in found["comparisons"].values()] == [2, 0, 0]
    again, progress = run()
    assert again == found and "round" not in progress, "nothing was left to count"
    assert [way["rounds"] for way in run("--rounds", "2")[0]["ways"]] == [2] * 4
