"""The script behind `make certify`, and what its last run wrote."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from common import heldout_ids
from support.embedded_models import shared_model

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "certify_embedded.py"
RESULTS = ROOT / "benchmarks" / "results" / "certificates.jsonl"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_every_pair_has_its_cells(script: dict[str, Any]) -> None:
    """Every drafter with every rule, at temperature 0, 0.7 and 1, without and with seeds, batch 1 and 8."""
    cells = list(script["cells"]())
    assert len({cell.key for cell in cells}) == len(cells)
    for drafter in script["DRAFTERS"]:
        own = {(rule, c.temperature, c.seeded, c.batch) for c in cells if c.drafter == drafter for rule in c.rules}
        for rule in script["LOSSLESS"]:
            for batch in (1, 8):
                modes = {(t, seeded) for r, t, seeded, b in own if (r, b) == (rule, batch)}
                assert modes == {(0.0, False), (0.7, False), (0.7, True), (1.0, False), (1.0, True)}
        for rule in script["LOSSY"]:
            assert {t for r, t, *_ in own if r == rule} == {0.0, 1.0}


def test_the_short_round_has_every_drafter_greedy_and_at_temperature_1(script: dict[str, Any]) -> None:
    cells = list(script["short_cells"]())
    drafters = (*script["DRAFTERS"], *script["PORTFOLIOS"])
    assert [(c.drafter, c.temperature) for c in cells] == [(d, t) for d in drafters for t in (0.0, 1.0)]
    assert len({cell.key for cell in cells}) == len(cells) == 16
    assert all(not cell.seeded and len(cell.rules) == 1 for cell in cells)


def test_portfolios_are_exercised_in_turn_and_auto_also_as_it_is_served(script: dict[str, Any]) -> None:
    cells = list(script["portfolio_cells"]())
    assert {cell.drafter for cell in cells} == {"auto", "portfolio(draft;prompt-lookup)"}
    assert {(c.drafter, c.temperature) for c in cells if c.controller == "goodput"} == {("auto", 0.0), ("auto", 1.0)}
    assert set(cells) <= set(script["cells"]())


def test_the_short_round_leaves_the_kept_certificates_alone() -> None:
    rules = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^certify-short:.*\n((?:\t.*\n)+)", rules, re.MULTILINE)
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
    script: dict[str, Any], records: list[dict[str, Any]], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certificates are put in by hand: a failed one outweighs one that lacks evidence."""
    made = iter([{"failures": [], "undecided": [], "verdict": "so", "took_s": 1.0} | record for record in records])
    space = script["main"].__globals__
    monkeypatch.setitem(space, "_certified", lambda *_: next(made))
    monkeypatch.setitem(space, "load_model", lambda _: None)
    monkeypatch.setitem(space, "heldout_ids", lambda *_: [])
    monkeypatch.setattr(sys, "argv", ["", "--short", "--limit", str(len(records)), "--out", str(tmp_path / "kept")])
    assert space["main"]() == status
    assert len((tmp_path / "kept").read_text().splitlines()) == len(records)


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


def test_one_cell_is_made_and_a_second_run_goes_on_behind_it(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a few prompts; a greedy certificate is over when all of them are compared."""
    out, space = tmp_path / "certificates.jsonl", script["main"].__globals__
    options = ["--minutes", "10", "--limit", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["", *options])
    monkeypatch.setitem(space, "load_model", shared_model)
    monkeypatch.setitem(space, "heldout_ids", lambda target, length: heldout_ids(target, length)[:6])
    assert script["main"]() == 0
    (record,) = map(json.loads, out.read_text().splitlines())
    assert record["failures"] == record["undecided"] == [] and record["certified"] is True
    assert record["temperature"] == 0.0
    assert record["controls_found"] == record["controls"] == 2
    assert f"1 of 1: {record['verdict']}; {record['cell']}; " in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["", *options, "--every", "1000"])
    monkeypatch.setitem(space, "load_model", lambda _: pytest.fail("there is nothing to do"))
    assert script["main"]() == 0
    assert len(out.read_text().splitlines()) == 1
