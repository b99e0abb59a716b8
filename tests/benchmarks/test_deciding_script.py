"""The script behind `make bench-deciding`: its sets, when a cell is done, how it goes on, and its verdicts.

Systems and clocks are put in by hand; nothing here measures a speed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deciding
import deciding_cells as cells
import deciding_report as report
import deciding_rows as rows
import turns
from truedraft.errors import OptionError

ROOT = Path(__file__).parents[2]
TEXTS = [f"def function_{number}(argument):\n    return argument\n" * 3 for number in range(5)]


def prompt_sets() -> dict[str, list[Any]]:
    letters = lambda text: [ord(letter) % 97 for letter in text]  # noqa: E731
    return cells.prompt_sets(TEXTS, cells.PROSE.read_text(), letters, 97)


class Clock:
    """Moves only when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_six_sets_of_requests_of_one_length() -> None:
    prompts = prompt_sets()
    assert tuple(prompts) == cells.SETS == ("code", "repeat", "prose", "random", "hot", "mix")
    for name, asked in prompts.items():
        assert len(asked) == cells.REQUESTS
        assert all(each.params.ignore_eos and each.params.max_tokens == 64 and each.prompt for each in asked)
        if name != "mix":
            assert {(each.params.temperature, each.params.seed) for each in asked} == {(1.5 * (name == "hot"), None)}
    assert all(len({each.prompt for each in prompts[name]}) == cells.REQUESTS for name in ("random", "prose"))
    assert [each.domain for each in prompts["mix"][:6]] == [*cells.DOMAINS, "code"]
    assert prompts["mix"][6] == prompts["repeat"][1]
    assert prompt_sets() == prompts, "fixed for ever"
    text = "a" * 70 + "\n" + "b" * 20 + "\n" + "c\n"
    assert cells.repeated(text) == text + "\n" + "a" * 70 + "\n" + "b" * 20 + "\n"


@pytest.mark.parametrize(
    ("name", "few", "counts"),
    [
        ("code", False, {1: 8, 4: 4, 16: 2}),
        ("mix", False, {1: 10, 4: 5, 16: 2}),
        ("code", True, {1: 5, 4: 3, 8: 1, 16: 1}),
        ("mix", True, {1: 5, 4: 5, 16: 1}),
    ],
)
def test_groups_hold_a_batch_each_and_slow_models_answer_fewer(name: str, few: bool, counts: dict[int, int]) -> None:
    asked = prompt_sets()[name]
    for batch, count in counts.items():
        groups = cells.groups_of(name, asked, batch, few=few)
        assert [len(group) for group in groups] == [batch] * count
        assert [each for group in groups for each in group] == asked[: batch * count]


class Worker:
    """Answers groups, which are numbers, in a time that is noise around its own."""

    def __init__(self, name: str, clock: Clock, per_token_s: float, noise: float) -> None:
        self.name, self._clock, self._s, self._noise, self.asked = name, clock, per_token_s, noise, 0
        self._draw = np.random.default_rng(list(name.encode()))

    def answer(self, group: int) -> turns.Answered:
        self.asked += 1
        self._clock.now += self._s * 64 * (1 + group) * math.exp(self._noise * self._draw.standard_normal())
        return turns.Answered([[1] * 64], alike=[0])


def test_turns_end_when_the_interval_is_narrow() -> None:
    """The true ratio lies near the interval; the noise is seeded."""
    clock = Clock()
    fast, slow = Worker("fast", clock, 0.0100, 0.1), Worker("slow", clock, 0.0104, 0.1)
    ready, warm, *found = rows.contest([fast, slow], range(8), 1.10, clock)
    assert ready is warm is None
    (last,) = [each for each in found if each is not None and each["status"] != "missed"]
    assert last is found[-1] and last["status"] == "reached" and last["half_width"] <= 0.02
    assert (last["of"], last["over"]) == ("fast", "slow")
    assert last["low"] - 0.01 < 1.04 < last["high"] + 0.01
    assert len(found) == last["rounds"] and last["rounds"] * 8 == last["turns"] == len(last["ratios"])
    assert fast.asked == slow.asked == (last["rounds"] + 1) * 8, "the warm-up round does not count"
    assert last["seconds"] == pytest.approx(clock(), abs=0.1)
    assert (last["greedy_compared"], last["greedy_different"]) == (last["turns"], 0)


def test_a_cell_far_above_its_bar_need_not_be_as_narrow() -> None:
    far, near = turns.Estimate(2.0, 1.965, 2.035, 40), turns.Estimate(1.12, 1.085, 1.155, 40)
    assert rows.status_of(far, 5, 1.10) == "far above"
    assert rows.status_of(near, 5, 1.10) == rows.status_of(far, 5, 2.0) == "missed"
    assert rows.status_of(far, 4, 1.10) == "missed", "five rounds at least"
    assert rows.status_of(turns.Estimate(1.0, 0.981, 1.019, 40), 5, 1.10) == "reached"


def test_a_sweep_looks_closer_around_the_best() -> None:
    draft, lookup = list(rows.GRID)[:2]
    first = rows.coarse(heads=False)
    assert first == [f"{draft}2", f"{draft}6", f"{lookup}4"]
    assert rows.finer(dict(zip(first, (1.3, 1.2, 1.0), strict=True)), 1) == [f"{draft}{n}" for n in (1, 3, 4)]
    assert rows.finer(dict(zip(first, (1.1, 1.2, 1.9), strict=True)), 2) == [
        f"{lookup}2",
        f"{lookup}8",
        *(f"{draft}{n}" for n in (3, 4, 8)),
    ]
    assert len(rows.coarse(heads=True)) == 5
    assert rows.best({f"{draft}2": 0.99, f"{lookup}4": 0.8}) == "none"
    assert rows.best({f"{draft}2": 1.01, f"{lookup}4": 0.8}) == f"{draft}2"


def test_the_table_has_its_cells_and_fits_into_two_sittings() -> None:
    found = cells.all_cells()
    assert len({cell.name for cell in found}) == len(found)
    assert sum(cell.row == "a" for cell in found) == 54 == 6 * 3 * 3
    places = {cell.name: place for place, cell in enumerate(found)}
    assert all(places[cell.needs.name] < places[cell.name] for cell in found if cell.needs is not None)
    assert {cell.row for cell in found} == set(cells.ROWS)
    sizes = [cell.size for cell in found]
    assert sizes == sorted(sizes, key=cells.SIZES.index), "each model is loaded once"
    assert sum(cell.share_s for cell in found) < 2 * 80 * 60


def sit(
    kept: Any, minutes: float, only: Sequence[str] = (), broken: str = "nothing"
) -> tuple[list[str], list[str], int]:
    """Names of the cells by visit, what was said, how many failed; cells take three visits, half their share."""
    clock, visits, said = Clock(), list[str](), list[str]()

    def begin(cell: Any, before: Any) -> Iterator[dict[str, Any] | None]:
        assert (before is None) == (cell.needs is None)
        if broken in cell.name:
            raise OptionError("it is broken")
        yield None
        for _ in range(3):
            clock.now += cell.share_s / 6
            visits.append(cell.name)
            yield {"ratio": 1.0, "half_width": 0.02, "low": 0.98, "high": 1.02, "status": "reached", "best": "none"}

    failed = deciding.sit(kept, kept.left(cells.all_cells(), only), begin, minutes * 60.0, clock, said.append)
    assert clock() <= minutes * 60.0
    return visits, said, failed


def test_cells_of_a_parcel_are_visited_in_turns(tmp_path: Path) -> None:
    kept = cells.Kept(tmp_path / "deciding.jsonl", "v")
    visits, said, _ = sit(kept, 80, only=["a | own | "])
    names = [f"a | own | {name} | batch 1" for name in cells.SETS]
    assert visits[:18] == names * 3 and said[0] == f"1 done: {names[0]}: 1.000 +- 0.020 (reached), 8 s"
    assert kept.records[0] == {
        "key": "v", "cell": names[0], "row": "a", "size": "own", "set": "code", "batch": 1, "ratio": 1.0,
        "half_width": 0.02, "low": 0.98, "high": 1.02, "status": "reached", "best": "none", "share_s": 15.0,
        "took_s": 7.5, "sitting": 0,
    }  # fmt: skip


def test_a_second_sitting_goes_on_behind_the_first(tmp_path: Path) -> None:
    file = tmp_path / "deciding.jsonl"
    every = {cell.name for cell in cells.all_cells()}
    _, said, _ = sit(cells.Kept(file, "v1"), 40)
    first = [json.loads(line)["cell"] for line in file.read_text().splitlines()]
    assert said[-1] == f"the time is over; {len(every) - len(first)} cells are left for the next sitting"
    second, _, skipped = sit(cells.Kept(file, "v1"), 80)
    assert set(first) | set(second) == every and not set(first) & set(second) and not skipped
    assert not sit(cells.Kept(file, "v1"), 80)[0]
    other = sit(cells.Kept(file, "v2"), 80, only=["| code |"])[0]
    assert set(other) == {name for name in every if "| code |" in name}, "another version is measured anew"
    assert cells.last_key(file) == "v2"
    assert set(cells.Kept(file, "v1").cells) == every


def test_a_cell_is_begun_if_there_is_time_for_its_share(tmp_path: Path) -> None:
    only = ["a | 500M | code | batch 4"]
    kept, share = cells.Kept(tmp_path / "deciding.jsonl", "v"), cells.Cell("a", "500M", "code", 4).share_s
    assert not sit(kept, 0.99 * share / 60, only)[0]
    assert len(sit(kept, share / 60, only)[0]) == 3 and only[0] in cells.Kept(kept.path, "v").cells


def test_one_cell_brings_what_it_needs_and_a_torn_line_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "deciding.jsonl"
    name, needed = "b | 110M | prose | batch 1", "sweep | 110M | prose | batch 1"
    assert sit(cells.Kept(file, "v"), 80, only=[name])[0] == [needed] * 3 + [name] * 3
    whole = file.read_text()
    file.write_text(whole[:-30])
    assert sit(cells.Kept(file, "v"), 80, only=[name])[0] == [name] * 3
    assert set(cells.Kept(file, "v").cells) == {name, needed}


def test_what_cannot_be_measured_is_said_and_left_open(tmp_path: Path) -> None:
    kept = cells.Kept(tmp_path / "deciding.jsonl", "v")
    _, said, skipped = sit(kept, 80, only=["own | code | batch 1"], broken="sweep |")
    assert skipped == 3, "the sweeps at batch 1 and 16, and row b, which needs one of them"
    assert "sweep | own | code | batch 1: skipped, it is broken" in said
    assert any(line.endswith("skipped, for sweep | own | code | batch 1 is not there") for line in said)
    assert not any(line.startswith("the time") for line in said)
    assert not any(name.startswith(("sweep", "b |")) for name in kept.cells)


def ratio(cell: Any, value: float, half: float = 0.01, **more: Any) -> dict[str, Any]:
    """A line of a cell as the script writes it."""
    place = {"cell": cell.name, "row": cell.row, "size": cell.size, "set": cell.set, "batch": cell.batch}
    found = {"ratio": value, "low": value - half, "high": value + half, "half_width": half, "turns": 24}
    kinds = {"status": "reached", "over": "plain", "ratios": [value] * 3, "speedups": {"x": 0.9}, "best": "none"}
    return place | found | kinds | {"decoding": found | {"ratio": value + 0.1}, "greedy_compared": 2} | more


def kept_with(tmp_path: Path, *records: dict[str, Any]) -> cells.Kept:
    kept = cells.Kept(tmp_path / "kept.jsonl", "v")
    for record in records:
        kept.add(record)
    return kept


def test_bars_hold_fail_or_stay_open(tmp_path: Path) -> None:
    values = {"a": 1.0, "sweep": 1.0, "b": 0.96, "c": 1.06}
    lines = [ratio(cell, values[cell.row]) for cell in cells.all_cells()]
    assert [bar.holds for bar in report.bars(kept_with(tmp_path, *lines))] == [True] * 7
    code = cells.Cell("a", "own", "code", 1)
    for value, half, verdicts in ((0.965, 0.02, (False, None)), (0.975, 0.004, (None, False))):
        kept_with(tmp_path).path.unlink()
        kept = kept_with(tmp_path, ratio(code, value, half))
        assert tuple(bar.holds for bar in report.bars(kept)[:2]) == verdicts, "one cell can fail an unfinished row"


def test_pooled_are_cells_in_which_nothing_swept_gains(tmp_path: Path) -> None:
    one, two = cells.Cell("a", "own", "code", 1), cells.Cell("a", "own", "prose", 1)
    swept = [
        ratio(cells.Cell("sweep", each.size, each.set, 1), 1.0, speedups={"x": value})
        for each, value in ((one, 1.01), (two, 0.99))
    ]
    default = [ratio(one, 0.9), ratio(two, 0.995)]
    assert report.cells_without_gain(default, swept) == default[1:]
    bar = report.bars(kept_with(tmp_path, *swept, *default))[2]
    assert bar.holds is None and bar.found.startswith("0.995 (0.995 to 0.995) over 3 turns of 1 cells")


def test_the_report_shows_every_row_and_marks_what_was_missed(tmp_path: Path) -> None:
    sitting = {"what": "sitting", "machine": {"cpu": "a processor"}, "threads": 2, "dtype": "bfloat16"}
    missed = {"a | own | code | batch 1": {"status": "missed", "greedy_different": 1}}
    lines = [ratio(cell, 1.234, **missed.get(cell.name, {})) for cell in cells.all_cells()]
    told = report.markdown(kept_with(tmp_path, sitting, *lines))
    assert all(f"**{row}: " in told for row in cells.ROWS)
    assert "1.234~ (1.224 to 1.244)" in told and "1 of them missed" in told and "a processor, 2 threads" in told
    assert "1.334~ (1.224" in told, "behind the prompts"
    assert "288 pairs compared, 1 different; a | own | code | batch 1: 1".replace("|", "/") in told
    table = [line for line in told.splitlines() if line.startswith("|")]
    assert all(line.count("|") > 2 for line in table)


def test_another_source_is_another_version(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("x = 1\n")
    before = deciding.version_key([file])
    assert deciding.version_key([file]) == before
    file.write_text("x = 2\n")
    assert deciding.version_key([file]) != before


def test_make_has_the_command() -> None:
    rules = (ROOT / "Makefile").read_text()
    assert re.search(r"^bench-deciding:.*\n(?:\t.*\n)*\t.*benchmarks/deciding\.py", rules, re.MULTILINE)
    assert "bench-deciding" in next(line for line in rules.splitlines() if line.startswith(".PHONY"))
