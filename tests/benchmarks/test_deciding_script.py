"""The script behind `make bench-deciding`: its sets, when a cell is done, how it goes on, and its verdicts.

Systems and clocks are put in by hand; nothing here measures a speed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import deciding
import deciding_report as report
import deciding_sets as sets
from contest import one_round
from truedraft.errors import ModelError
from truedraft.measure.bench import Row, SystemOutput

ROOT = Path(__file__).parents[2]
TEXTS = [f"def function_{number}(argument):\n    return argument\n" * 3 for number in range(5)]
EVERY = [report.cell_name(size, batch, name) for size in report.SIZES for batch in report.BATCHES for name in sets.SETS]


def prompt_sets() -> dict[str, list[tuple[int, ...]]]:
    letters = lambda text: [ord(letter) % 97 for letter in text]  # noqa: E731
    return sets.prompt_sets(TEXTS, sets.PROSE.read_text(), letters, 97)


def test_six_sets_of_prompts() -> None:
    prompts = prompt_sets()
    assert tuple(prompts) == sets.SETS == ("code", "repeat", "prose", "random", "hot", "mix")
    assert all(len(asked) == sets.REQUESTS and all(asked) for asked in prompts.values())
    assert all(len(set(prompts[name])) == sets.REQUESTS for name in ("random", "prose"))
    assert prompts["mix"][:5] == [*(prompts[name][0] for name in sets.SETS[:4]), prompts["code"][1]]
    assert prompt_sets() == prompts, "fixed for ever"
    text = "a" * 70 + "\n" + "b" * 20 + "\n" + "c\n"
    assert sets.repeated(text) == text + "\n" + "a" * 70 + "\n" + "b" * 20 + "\n"


@pytest.mark.parametrize(("few", "counts"), [(False, {1: 8, 4: 4, 16: 2}), (True, {1: 4, 4: 3, 16: 1})])
def test_groups_hold_a_batch_each_and_slow_models_answer_fewer(few: bool, counts: dict[int, int]) -> None:
    asked = prompt_sets()["hot"]
    for batch, count in counts.items():
        groups = sets.groups_of("hot", asked, batch, few=few)
        assert [len(group.prompts) for group in groups] == [batch] * count
        assert [each for group in groups for each in group.prompts] == asked[: batch * count]
        assert {(group.params.temperature, group.params.max_tokens) for group in groups} == {(1.5, 64)}
    assert sets.groups_of("mix", asked, 1)[0].params.greedy


def turns(number: int, seconds: dict[str, float], *, answers: dict[str, int] | None = None) -> list[Row]:
    """A round of one answer of ten tokens by each system, in so many seconds."""
    rows = []
    for name, total in seconds.items():
        output = SystemOutput((((answers or {}).get(name, 1),) * 10,), (0.0,), 0.0, 1, 0, 0, None, None)
        rows.append(Row(name, ("0",), number, 0, total * (1.0 + 0.001 * number), 0.0, output))
    return rows


SECONDS = {"plain": 1.0, "a": 0.8, "b": 1.1, report.DEFAULT: 0.5, report.DRAFTED: 0.6, report.HEURISTIC: 0.9}


def test_a_cell_tells_the_ratios_of_its_turns() -> None:
    rows = [row for number in (1, 2) for row in turns(number, SECONDS, answers={"b": 7})]
    found = deciding.result("code", rows)
    ratios = [found[name]["ratio"] for name in report.RATIOS]
    assert ratios == pytest.approx([2.0, 1.6, 1.5]) and found["decoding"]["ratio"] == pytest.approx(2.0)
    assert found["best_fixed"] == "a" and found["speedups"] == {"a": pytest.approx(1.25), "b": pytest.approx(0.9091)}
    assert (found["compared"], found["different"]) == (10, 2)
    assert deciding.result("hot", rows)["compared"] == deciding.result("hot", rows)["different"] == 0
    slower = deciding.result("code", turns(1, {"plain": 1.0, "a": 1.1, report.DEFAULT: 1.25}))
    assert slower["best_fixed"] == "plain" and slower["best"]["ratio"] == 0.8 and "heuristic" not in slower


def test_rounds_end_when_ratios_are_known_or_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now, visits = [0.0], []

    def visited(systems: str, groups: Sequence[str], number: int) -> list[Row]:
        now[0] += 1.0
        visits.append((systems, number))
        far = 1.0 + (number % 2) * (systems == "wild")
        return turns(number, {"plain": 1.0, "a": 1.0, report.DEFAULT: far})

    lab = SimpleNamespace(size="own", sets={"calm": [], "wild": []}, systems=lambda batch: next(names))
    monkeypatch.setattr(deciding, "one_round", visited)
    monkeypatch.setattr(deciding, "groups_of", lambda *_, few: [[]])
    monkeypatch.setattr(deciding, "time", SimpleNamespace(monotonic=lambda: now[0]))
    names = iter(["calm", "wild"])
    rows = deciding.Lab.rounds(lab, 1, ["calm", "wild"], 16.0)  # type: ignore[arg-type]
    assert visits[:6] == [("calm", 0), ("wild", 0), ("calm", 1), ("wild", 1), ("calm", 2), ("wild", 2)]
    assert {name: max(row.run for row in own) for name, own in rows.items()} == {"calm": 5, "wild": 11}
    assert min(row.run for row in rows["calm"]) == 1, "the warm-up round does not count"


class Lab:
    """Takes half a cell's share for each set."""

    opened: ClassVar[list[str]] = []
    now: ClassVar[float] = 0.0

    def __init__(self, size: str) -> None:
        self.size = size
        self.opened.append(size)

    def rounds(self, batch: int, names: Sequence[str], seconds: float) -> dict[str, list[Row]]:
        if (self.size, batch) == ("110M", 4):
            raise ModelError("it is broken")
        Lab.now += seconds / 2
        return {name: [row for number in (1, 2) for row in turns(number, SECONDS)] for name in names}


def test_a_sitting_goes_on_where_the_last_one_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deciding.jsonl"
    out.write_text(json.dumps({"cell": EVERY[0], "key": "v"}) + "\n")  # of another form
    monkeypatch.setattr(deciding, "Lab", Lab)
    monkeypatch.setattr(deciding, "time", SimpleNamespace(monotonic=lambda: Lab.now))

    def run(*words: str) -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, "argv", ["deciding.py", "--out", str(out), "--threads", "1", *words])
        status = deciding.main()
        cells = [line["cell"] for line in map(json.loads, out.read_text().splitlines()[1:]) if "cell" in line]
        return status, cells, capsys.readouterr().err

    status, cells, said = run("--key", "v", "--minutes", "21")
    assert (status, cells, Lab.opened) == (1, [*EVERY[:24], *EVERY[30:36]], ["own", "110M"])
    assert "110M, batch 4: skipped, it is broken" in said
    assert "the time is over; 18 cells are left for the next sitting" in said
    status, cells, said = run("--key", "v", "--minutes", "200")
    assert status == 1 and len(cells) == 48 and Lab.opened[2:] == ["110M", "500M"]
    assert run("--key", "v", "--only", "own | ")[:2] == (0, cells) and len(Lab.opened) == 4, "nothing is left"
    assert run("--key", "w", "--only", "own | code")[1][48:] == [name for name in EVERY[:18] if "code" in name]
    last = out.read_text()
    monkeypatch.setattr(sys, "argv", ["deciding.py", "--out", str(out), "--report"])
    assert deciding.main() == 0 and out.read_text() == last
    assert capsys.readouterr().out.startswith("3 of 54 cells measured in 1 sittings")


def test_the_table_fits_into_two_sittings() -> None:
    assert sum(deciding.SHARES_S[size] * len(report.BATCHES) * len(sets.SETS) for size in report.SIZES) < 165 * 60


def test_bars_hold_fail_or_stay_open() -> None:
    found = {"ratio": 1.06, "low": 1.05, "high": 1.07, "half_width": 0.01}
    cell = {"default": found, "best": found, "heuristic": found, "speedups": {"a": 0.9}, "compared": 2, "different": 0}
    places = [dict(zip(("cell", "size", "set"), (name, *name.split(" | ")), strict=False)) for name in EVERY]
    records = [{**cell, **place, "batch": int(place["cell"].rpartition(" ")[2])} for place in places]
    sitting = {"machine": {"cpu": "a processor"}, "threads": 2, "dtype": "bfloat16"}

    def verdicts(*cells: dict[str, Any]) -> list[str]:
        told = report.markdown([sitting, *cells])
        assert "in 1 sittings on: a processor, 2 threads" in told
        return [line.split(" | ")[2] for line in told.splitlines()[4:11]]

    assert verdicts(*records) == ["holds"] * 7
    low = {**found, "ratio": 0.965, "high": 0.985}
    assert verdicts(records[0] | {"default": low}) == ["**fails**", "open", "**fails**", "open", "open", "open", "open"]
    lower = {**found, "ratio": 0.975, "high": 0.979}
    gains = {"default": lower, "speedups": {"a": 1.1}, "best": low | {"ratio": 0.94}}
    assert verdicts(records[0] | gains)[:4] == ["open", "**fails**", "open", "**fails**"]
    off = {"heuristic": {**found, "ratio": 0.97}, "different": 1}
    assert verdicts(records[5] | off)[4:] == ["**fails**"] * 3 and "open" in verdicts(records[4] | off)[4]
    assert "| code | 1.060 ± 0.010 | - |" in report.markdown([sitting, records[0]])


def test_one_cell_is_measured_by_real_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr(sets, "NEW_TOKENS", 6)
    monkeypatch.setattr(deciding, "one_round", lambda systems, groups, number: one_round(systems, groups[:1], number))
    lab = deciding.Lab("own")
    rows = lab.rounds(1, ["mix"], 0.0)["mix"]
    found = deciding.result("mix", rows)
    assert {*report.RATIOS, "decoding"} <= {*found} and {*found["speedups"]} == {*deciding.FIXED}
    assert found["compared"] == 6 and found["different"] == 0


def test_make_has_the_command() -> None:
    rules = (ROOT / "Makefile").read_text()
    assert re.search(r"^bench-deciding:.*\n(?:\t.*\n)*\t.*benchmarks/deciding\.py", rules, re.MULTILINE)
    assert "bench-deciding" in next(line for line in rules.splitlines() if line.startswith(".PHONY"))
