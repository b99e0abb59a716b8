"""The scripts behind `make certify` and `make results-samplers`, and what their last runs wrote."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import certify_embedded as script
import certify_samplers
from common import RESULTS, heldout_ids
from support.embedded_models import shared_model
from truedraft.certify.samplers.worlds import sampler_worlds, suspects

ROOT = Path(__file__).parents[2]
CELLS = list(script.cells())


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def test_every_pair_has_its_cells() -> None:
    """Every drafter with every rule, at temperature 0, 0.7 and 1, without and with seeds, batch 1 and 8; portfolios in
    turn, and `auto` also as it is served."""
    assert len({cell.key for cell in CELLS}) == len(CELLS)
    for drafter in script.DRAFTERS:
        own = {(rule, c.temperature, c.seeded, c.batch) for c in CELLS if c.drafter == drafter for rule in c.rules}
        for rule in script.LOSSLESS:
            for batch in (1, 8):
                modes = {(t, seeded) for r, t, seeded, b in own if (r, b) == (rule, batch)}
                assert modes == {(0.0, False), (0.7, False), (0.7, True), (1.0, False), (1.0, True)}
        for rule in script.LOSSY:
            assert {t for r, t, *_ in own if r == rule} == {0.0, 1.0}
    portfolios = [cell for cell in CELLS if cell.drafter not in script.DRAFTERS]
    assert {cell.drafter for cell in portfolios} == {"auto", "portfolio(draft;prompt-lookup)"}
    served = {(cell.drafter, cell.temperature) for cell in portfolios if cell.controller == "goodput"}
    assert served == {("auto", 0.0), ("auto", 1.0)}


def test_the_short_round_has_every_drafter_and_leaves_the_kept_certificates_alone() -> None:
    cells = list(script.short_cells())
    drafters = (*script.DRAFTERS, *script.PORTFOLIOS)
    assert [(c.drafter, c.temperature) for c in cells] == [(d, t) for d in drafters for t in (0.0, 1.0)]
    assert len({cell.key for cell in cells}) == len(cells) == 16
    assert all(not cell.seeded and len(cell.rules) == 1 for cell in cells)
    recipe = re.search(r"^certify-short:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None and "--short" in recipe[1] and "--out out/" in recipe[1]
    assert "RESULTS" not in recipe[1] and "benchmarks/results" not in recipe[1]
    assert "out/" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize(
    ("records", "status"),
    [
        ([{}, {}], 0),
        ([{}, {"undecided": ["a check"]}], 3),
        ([{"failures": ["a check"]}, {"undecided": ["another"]}, {}], 1),
    ],
)
def test_the_exit_status_says_what_came_of_the_round(
    records: list[dict[str, Any]], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certificates are put in by hand: a failed one outweighs one that lacks evidence."""
    made = iter([{"failures": [], "undecided": [], "verdict": "so", "took_s": 1.0} | record for record in records])
    monkeypatch.setattr(script, "_certified", lambda *_: next(made))
    monkeypatch.setattr(script, "load_model", lambda _: None)
    monkeypatch.setattr(script, "heldout_ids", lambda *_: [])
    monkeypatch.setattr(sys, "argv", ["", "--short", "--limit", str(len(records)), "--out", str(tmp_path / "kept")])
    assert script.main() == status
    assert len((tmp_path / "kept").read_text().splitlines()) == len(records)


def test_the_kept_certificates_are_issued_or_measured() -> None:
    """Every cell whose drafter and rule go together: certified if lossless, measured with an interval if not."""
    found = {record["cell"]: record for record in recorded("certificates.jsonl")}
    refused = {
        cell.key
        for cell in CELLS
        if cell.rules == ("block",) and ("branching" in cell.drafter or "sampled" in cell.drafter)
    }
    assert set(found) == {cell.key for cell in CELLS} - refused
    for record in found.values():
        assert record["certified"] is record["lossless"], record["verdict"]
        assert not record["failures"], record["verdict"]
        if not record["lossless"]:
            low, high = record["divergence"]["total_variation_ci95"]
            assert low <= record["divergence"]["total_variation"] <= high
        elif record["temperature"] > 0.0:
            assert record["tokens"]["smallest_detectable_tv"] < 0.1


@pytest.mark.slow
def test_one_cell_is_made_and_a_second_run_goes_on_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a few prompts; a greedy certificate is over when all of them are compared."""
    out = tmp_path / "certificates.jsonl"
    options = ["--minutes", "10", "--limit", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["", *options])
    monkeypatch.setattr(script, "load_model", shared_model)
    monkeypatch.setattr(script, "heldout_ids", lambda target, length: heldout_ids(target, length)[:6])
    assert script.main() == 0
    (record,) = map(json.loads, out.read_text().splitlines())
    assert record["failures"] == record["undecided"] == [] and record["certified"] is True
    assert record["temperature"] == 0.0
    assert record["controls_found"] == record["controls"] == 2
    assert f"1 of 1: {record['verdict']}; {record['cell']}; " in capsys.readouterr().err
    monkeypatch.setattr(script, "cells", lambda: iter(CELLS[:1]))
    monkeypatch.setattr(script, "load_model", lambda _: pytest.fail("there is nothing to do"))
    assert script.main() == 0
    assert len(out.read_text().splitlines()) == 1


# --------------------------------------------------------------------------------------------------- published samplers


def test_power_is_counted_by_the_closed_form() -> None:
    known = suspects()
    number = next(i for i, each in enumerate(known) if each.name == "keeps every drafted token")
    found = certify_samplers.power(sampler_worlds(), known, number)
    assert found["fault"] == "keeps every drafted token"
    assert 0.4 < found["total_variation"] < found["largest_total_variation"] <= 1.0
    assert 64 <= found["median_rows_to_1e3"] <= found["median_rows_to_1e6"] < 500


def test_a_sampler_is_recorded_with_its_library() -> None:
    found = certify_samplers.measured("medusa", 60.0, 1)
    assert found["sampler"] == "medusa" and found["status"] == "fails"
    assert set(found["versions"]) == {"truedraft", "torch"}
    json.dumps(found, allow_nan=False)


def test_recorded_lines_are_of_todays_faults_and_samplers() -> None:
    records = recorded("certify_samplers.jsonl")
    power = [(each["fault"], each["detail"]) for each in records if each["kind"] == "power"]
    assert sorted(power) == sorted((each.name, each.detail) for each in suspects())
    samplers = {each["sampler"]: each for each in records if each["kind"] == "sampler"}
    assert set(samplers) == set(certify_samplers.SAMPLERS) - {"sglang"}
    assert "transformers" in samplers["transformers"]["versions"]
    worlds = [world.name for world in sampler_worlds()]
    for record in samplers.values():
        assert [world["name"] for world in record["worlds"]] == worlds
