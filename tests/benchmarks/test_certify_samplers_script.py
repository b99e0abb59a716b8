"""The script that records what came of published samplers: its lines, and what the recorded ones say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from truedraft.certify.samplers.worlds import sampler_worlds, suspects

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "certify_samplers.jsonl"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "certify_samplers.py"))


def test_power_is_counted_by_the_closed_form(script: dict[str, Any]) -> None:
    known = suspects()
    number = next(i for i, each in enumerate(known) if each.name == "keeps every drafted token")
    found = script["power"](sampler_worlds(), known, number)
    assert found["fault"] == "keeps every drafted token"
    assert 0.4 < found["total_variation"] < found["largest_total_variation"] <= 1.0
    assert 64 <= found["median_rows_to_1e3"] <= found["median_rows_to_1e6"] < 500


def test_a_sampler_is_recorded_with_its_library(script: dict[str, Any]) -> None:
    found = script["measured"]("medusa", 60.0, 1)
    assert found["sampler"] == "medusa" and found["status"] == "fails"
    assert set(found["versions"]) == {"truedraft", "torch"}
    json.dumps(found, allow_nan=False)


def test_recorded_lines_are_of_todays_faults_and_samplers(script: dict[str, Any]) -> None:
    records = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    power = [(each["fault"], each["detail"]) for each in records if each["kind"] == "power"]
    assert sorted(power) == sorted((each.name, each.detail) for each in suspects())
    samplers = {each["sampler"]: each for each in records if each["kind"] == "sampler"}
    assert set(samplers) == set(script["SAMPLERS"]) - {"sglang"}
    assert "transformers" in samplers["transformers"]["versions"]
    worlds = [world.name for world in sampler_worlds()]
    for record in samplers.values():
        assert [world["name"] for world in record["worlds"]] == worlds
