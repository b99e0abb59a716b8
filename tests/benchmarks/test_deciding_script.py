"""The script behind `make bench-deciding`: its sets, its turns, when a cell is done, how it goes on, and its verdicts.

Systems and clocks are put in by hand; nothing here measures a speed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
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


def letters(text: str) -> list[int]:
    return [ord(letter) % 97 for letter in text]


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[Any]]:
    return cells.prompt_sets(TEXTS, cells.PROSE.read_text(), letters, 97)


class Clock:
    """Moves only when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Worker:
    """Answers with the same tokens always, in a time that is noise around its own.

    Args:
        name: of it.
        clock: that it moves.
        per_token_s: of its own.
        noise: standard deviation of the logarithm.
    """

    def __init__(self, name: str, clock: Clock, per_token_s: float, noise: float = 0.0, token: int = 1) -> None:
        self.name, self._clock, self._s, self._noise, self._token = name, clock, per_token_s, noise, token
        self._draw = np.random.default_rng(list(name.encode()))
        self.asked: list[tuple[int, ...]] = []

    def answer(self, group: Sequence[Any]) -> Any:
        params = [asked.params for asked in group]
        self.asked += [tuple(each.prompt) for each in group]
        tokens = [[self._token] * each.max_tokens for each in params]
        slow = 1.0 + len(group[0].prompt) / 100  # groups differ, as prompts do
        self._clock.now += self._s * sum(map(len, tokens)) * slow * math.exp(self._noise * self._draw.standard_normal())
        return turns.Answered(tokens, alike=[number for number, each in enumerate(params) if each.greedy])


def test_six_sets_of_requests_of_one_length(prompts: dict[str, list[Any]]) -> None:
    assert tuple(prompts) == cells.SETS == ("code", "repeat", "prose", "random", "hot", "mix")
    for asked in prompts.values():
        assert len(asked) == cells.REQUESTS
        assert all(each.params.ignore_eos and each.params.max_tokens == 64 and each.prompt for each in asked)
    for name in ("code", "repeat", "prose", "random"):
        assert all(each.params.greedy for each in prompts[name])
    assert all(each.params.temperature == 1.5 and each.params.seed is None for each in prompts["hot"])
    assert len({each.prompt for each in prompts["random"]}) == cells.REQUESTS, "each prompt is drawn by itself"
    assert len({each.prompt for each in prompts["prose"]}) == cells.REQUESTS
    assert cells.prompt_sets(TEXTS, cells.PROSE.read_text(), letters, 97) == prompts, "fixed for ever"


def test_a_repeated_text_begins_again() -> None:
    text = "a" * 70 + "\n" + "b" * 20 + "\n" + "c\n"
    assert cells.repeated(text) == text + "\n" + "a" * 70 + "\n" + "b" * 20 + "\n"


def test_mix_takes_the_domains_in_turn(prompts: dict[str, list[Any]]) -> None:
    assert [each.domain for each in prompts["mix"][:6]] == [*cells.DOMAINS, "code"]
    assert prompts["mix"][6] == prompts["repeat"][1]
    assert [each.domain for group in cells.groups_of("mix", prompts["mix"], 1) for each in group] == 2 * [
        *cells.DOMAINS
    ]


@pytest.mark.parametrize(("name", "counts"), [("code", {1: 8, 4: 4, 16: 2}), ("mix", {1: 10, 4: 5, 16: 2})])
def test_groups_hold_a_batch_each(prompts: dict[str, list[Any]], name: str, counts: dict[int, int]) -> None:
    for batch, count in counts.items():
        groups = cells.groups_of(name, prompts[name], batch)
        assert [len(group) for group in groups] == [batch] * count
        assert [each for group in groups for each in group] == prompts[name][: batch * count]


def test_a_slow_model_answers_fewer_groups_in_a_round(prompts: dict[str, list[Any]]) -> None:
    for name, counts in (("code", {1: 5, 4: 3, 8: 1, 16: 1}), ("mix", {1: 5, 4: 5, 16: 1})):
        for batch, count in counts.items():
            assert len(cells.groups_of(name, prompts[name], batch, few=True)) == count
    (mixed,) = cells.groups_of("mix", prompts["mix"], 16, few=True)
    assert {each.domain for each in mixed} == set(cells.DOMAINS)


def take(prompts: dict[str, list[Any]], workers: Sequence[Worker], clock: Clock, most_s: float) -> Any:
    groups = cells.groups_of("code", prompts["code"], 1)
    pairs = [(workers[0].name, other.name) for other in workers[1:]]
    contest = turns.Contest(workers, groups, pairs, turns.Stop(1.10), clock)
    while not contest.visit(most_s):
        pass
    return contest.measured


def test_turns_end_when_the_interval_is_narrow(prompts: dict[str, list[Any]]) -> None:
    """The true ratio lies near the interval; the noise is seeded."""
    clock = Clock()
    fast, slow = Worker("fast", clock, 0.0100, 0.1), Worker("slow", clock, 0.0104, 0.1)
    measured = take(prompts, [fast, slow], clock, 10_000.0)
    found = turns.estimate(measured.turns, "fast", "slow")
    assert measured.status == "reached" and found.half_width <= turns.Stop().half_width
    assert found.low - 0.01 < 1.04 < found.high + 0.01
    assert measured.rounds * 8 == len(measured.turns) == found.turns, "the warm-up round does not count"
    assert len(fast.asked) == len(slow.asked) == (measured.rounds + 1) * 8
    assert measured.seconds == pytest.approx(clock())
    inverse = turns.estimate(measured.turns, "slow", "fast")
    assert inverse.ratio == pytest.approx(1 / found.ratio)


def test_a_cell_that_stays_noisy_is_missed(prompts: dict[str, list[Any]]) -> None:
    clock = Clock()
    measured = take(prompts, [Worker("one", clock, 0.01, 0.5), Worker("two", clock, 0.01, 0.5)], clock, 100.0)
    assert measured.status == "missed"
    assert 100.0 <= measured.seconds < 200.0


def test_a_cell_far_above_its_bar_need_not_be_as_narrow() -> None:
    stop = turns.Stop(1.10)
    far, near = turns.Estimate(2.0, 1.965, 2.035, 40), turns.Estimate(1.12, 1.085, 1.155, 40)
    assert stop.status([far], 5, 1.0, 100.0) == "far above"
    assert stop.status([near], 5, 1.0, 100.0) is None
    assert stop.status([far, near], 5, 1.0, 100.0) is None, "each of several must be known"
    assert stop.status([far], 4, 1.0, 100.0) is None, "five rounds at least"
    assert turns.Stop(sure_above=2.0).status([far], 5, 1.0, 100.0) is None
    assert stop.status([near], 5, 100.0, 100.0) == "missed"
    assert stop.status([near], 1, 100.0, 100.0) is None, "one round has no interval"


def test_who_goes_first_changes_within_a_round_and_between_rounds(prompts: dict[str, list[Any]]) -> None:
    clock, order = Clock(), []

    class Seen(Worker):
        def answer(self, group: Sequence[Any]) -> Any:
            order.append(self.name)
            return super().answer(group)

    systems = [Seen(name, clock, 0.01) for name in "ab"]
    groups = cells.groups_of("code", prompts["code"], 4)
    for number in range(2):
        turns.one_round(systems, groups, number, clock)
    assert "".join(order) == "abbaabba" + "baabbaab"


def test_the_interval_covers_what_it_says() -> None:
    """400 draws of 6 rounds over 8 groups, where rounds differ by the machine and groups by what they hold.

    95 % of the intervals hold the true ratio, give or take three standard errors; the seed is fixed.
    """
    draw, covered = np.random.default_rng(3), 0
    for _ in range(400):
        of_group = draw.normal(0.0, 0.3, size=8)
        of_group -= of_group.mean() - math.log(1.2)
        logs = of_group + draw.normal(0.0, 0.05, size=(6, 8)) + draw.normal(0.0, 0.03, size=(6, 1))
        made = [
            turns.Turn(number, {"a": 1.0, "b": math.exp(value)}, {"a": 1.0, "b": 1.0})
            for number, values in enumerate(logs)
            for value in values
        ]
        found = turns.estimate(made, "a", "b")
        covered += found.low <= 1.2 <= found.high
        assert found.half_width < 0.15, "groups that differ are no noise"
    assert 0.95 - 0.033 < covered / 400 < 0.95 + 0.033


def test_one_round_has_no_interval() -> None:
    found = turns.estimate([turns.Turn(1, {"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 3.0})], "a", "b")
    assert found.as_dict() == {"ratio": 2.0, "low": None, "high": None, "half_width": None, "turns": 1}


def test_greedy_answers_that_differ_are_counted(prompts: dict[str, list[Any]]) -> None:
    clock = Clock()
    workers = [Worker("a", clock, 0.01), Worker("b", clock, 0.01, token=2), Worker("c", clock, 0.01)]
    groups = cells.groups_of("mix", prompts["mix"], 1)
    found = turns.one_round(workers, groups, 0, clock)
    assert sum(turn.compared for turn in found) == 8 * 2, "two of the ten are sampled; two others are held against a"
    assert sum(turn.different for turn in found) == 8


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


class FakeCell:
    """A cell that is being measured: three visits, of a sixth of its share each."""

    def __init__(self, cell: Any, clock: Clock, visits: list[str]) -> None:
        self._cell, self._clock, self._visits, self._left = cell, clock, visits, 3

    def visit(self, most_s: float) -> bool:
        assert most_s >= self._cell.share_s
        self._clock.now += self._cell.share_s / 6
        self._visits.append(self._cell.name)
        self._left -= 1
        return not self._left

    def record(self) -> dict[str, Any]:
        assert not self._left
        return {"ratio": 1.0, "half_width": 0.02, "low": 0.98, "high": 1.02, "status": "reached", "best": "none"}


def sit(
    kept: Any, minutes: float, only: Sequence[str] = (), broken: str = "nothing"
) -> tuple[list[str], list[str], int]:
    """Names of the cells by visit, what was said, and how many failed."""
    clock = Clock()
    visits: list[str] = []
    said: list[str] = []

    def begin(cell: Any, before: Any) -> FakeCell:
        assert (before is None) == (cell.needs is None)
        if broken in cell.name:
            raise OptionError("it is broken")
        return FakeCell(cell, clock, visits)

    failed = deciding.sit(kept, kept.left(cells.all_cells(), only), begin, minutes * 60.0, clock, said.append)
    assert clock() <= minutes * 60.0
    return visits, said, failed


def test_cells_of_a_parcel_are_visited_in_turns(tmp_path: Path) -> None:
    visits, _, _ = sit(cells.Kept(tmp_path / "deciding.jsonl", "v"), 80, only=["a | own | "])
    names = [f"a | own | {name} | batch 1" for name in cells.SETS]
    assert visits[:18] == names * 3


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


def test_a_cell_that_was_not_finished_is_measured_anew(tmp_path: Path) -> None:
    file = tmp_path / "deciding.jsonl"
    only = ["a | 500M | code | batch 4"]
    kept = cells.Kept(file, "v")
    share = cells.Cell("a", "500M", "code", 4).share_s
    assert not sit(kept, 0.99 * share / 60, only)[0], "there is no time for its share"
    clock_s = share / 60
    assert len(sit(kept, clock_s, only)[0]) == 3 and only[0] in cells.Kept(file, "v").cells


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
    assert not any(line.startswith("the time") for line in said)
    assert not any(name.startswith(("sweep", "b |")) for name in kept.cells)


def ratio(cell: Any, value: float, half: float = 0.01, **more: Any) -> dict[str, Any]:
    """A line of a cell as the script writes it."""
    place = {"cell": cell.name, "row": cell.row, "size": cell.size, "set": cell.set, "batch": cell.batch}
    found = {"ratio": value, "low": value - half, "high": value + half, "half_width": half, "turns": 24}
    kinds = {"status": "reached", "over": "plain", "words": "none", "ratios": [value] * 3, "speedups": {"x": 0.9}}
    kinds |= {"decoding": found | {"ratio": value + 0.1}}
    return place | found | kinds | {"best": "none", "predicted": 1.0, "measured": value} | more


def bars_of(tmp_path: Path, **values: float) -> dict[str, Any]:
    """Bars of a table in which all cells of a row have one value; those of rows that are not named are not measured."""
    kept = cells.Kept(tmp_path / "bars.jsonl", "v")
    for cell in cells.all_cells():
        if cell.row in values:
            kept.add(ratio(cell, values[cell.row]))
    return {bar.words: bar.holds for bar in report.bars(kept)}


def test_bars_hold_fail_or_stay_open(tmp_path: Path) -> None:
    found = bars_of(tmp_path, a=1.0, sweep=1.0, b=0.96, c=1.06)
    assert [found[words] for words in found if words.startswith("a:")] == [True, True, True]
    assert [found[words] for words in found if words.startswith("b:")] == [True]
    assert [found[words] for words in found if words.startswith("c:")] == [True, True]


@pytest.mark.parametrize(("value", "half", "verdicts"), [(0.965, 0.02, (False, None)), (0.975, 0.004, (None, False))])
def test_one_cell_can_fail_a_row_that_is_not_finished(
    value: float, half: float, verdicts: tuple[bool | None, ...], tmp_path: Path
) -> None:
    kept = cells.Kept(tmp_path / "bars.jsonl", "v")
    kept.add(ratio(cells.Cell("a", "own", "code", 1), value, half))
    assert tuple(bar.holds for bar in report.bars(kept)[:2]) == verdicts


def test_pooled_are_cells_in_which_nothing_swept_gains() -> None:
    one, two = cells.Cell("a", "own", "code", 1), cells.Cell("a", "own", "prose", 1)
    swept = [
        ratio(cells.Cell("sweep", each.size, each.set, 1), 1.0, speedups={"x": value})
        for each, value in ((one, 1.01), (two, 0.99))
    ]
    assert report.cells_without_gain([ratio(one, 1.0), ratio(two, 0.99)], swept) == [ratio(two, 0.99)]


def test_the_report_shows_every_row_and_marks_what_was_missed(tmp_path: Path) -> None:
    kept = cells.Kept(tmp_path / "report.jsonl", "v")
    kept.add({"what": "sitting", "machine": {"cpu": "a processor"}, "threads": 2, "dtype": "bfloat16"})
    for cell in cells.all_cells():
        record = ratio(cell, 1.234, status="missed" if cell.name == "a | own | code | batch 1" else "reached")
        kept.add(record)
    told = report.markdown(kept)
    assert all(f"**{row}: " in told for row in cells.ROWS)
    assert "1.234~ (1.224 to 1.244)" in told and "1 of them missed" in told and "a processor, 2 threads" in told
    assert "1.334~ (1.224" in told, "behind the prompts"
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
