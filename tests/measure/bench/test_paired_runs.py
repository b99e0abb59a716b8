"""Turns, pairing, interruption: with systems that only pretend, and with the engine on a table of distributions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from support.records import step_record
from truedraft import Engine
from truedraft.core.params import SamplingParams
from truedraft.drafters import PromptLookup
from truedraft.errors import ModelError
from truedraft.measure.bench import Group, OurEngine, Results, Row, grouped, run_all
from truedraft.measure.bench.runs import System, SystemOutput
from truedraft.testing import MarkovModel

GREEDY = SamplingParams(max_tokens=20)
PROMPTS = grouped([("a", [1, 2], GREEDY), ("b", [3], GREEDY), ("c", [4, 5, 6], GREEDY)], 1)


class Pretender(System):
    """Writes down when it was asked, and for how many tokens."""

    def __init__(self, name: str, log: list[tuple[str, int]], fails: str = "", stops_at: int = -1) -> None:
        self.name = name
        self.log = log
        self.fails = fails
        self.stops_at = stops_at

    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> SystemOutput:
        if len(self.log) == self.stops_at:
            raise KeyboardInterrupt
        self.log.append((self.name, params.max_tokens))
        if self.fails:
            raise ModelError(self.fails)
        return SystemOutput(tuple((1, 2, 3) for _ in prompts), (0.0,), 0.0, 2, 0, 5, 2, 1.0)


def run(systems: Sequence[System], groups: Sequence[Group] = PROMPTS, runs: int = 1) -> Results:
    kept: list[Row] = []
    seen: list[int] = []
    more = {"keep": kept.append, "progress": lambda done, _: seen.append(done)}
    results = run_all(systems, groups, runs=runs, context_length=22, **more)
    assert kept == results.rows and seen == sorted(seen)
    return results


def test_grouped() -> None:
    groups = grouped([("a", [1], GREEDY), ("b", [2, 3], GREEDY), ("c", [4], GREEDY)], 2)
    assert [group.names for group in groups] == [("a", "b"), ("c",)]
    assert groups[0].prompts == ((1,), (2, 3))


def test_turns_rotate_after_a_warm_up() -> None:
    log: list[tuple[str, int]] = []
    results = run([Pretender(name, log) for name in "ABC"], runs=2)
    assert log[:3] == [("A", 16), ("B", 16), ("C", 16)]  # the warm-up
    order = "".join(name for name, _ in log[3:])
    assert order == "ABCBCACAB" * 2
    assert [row.place for row in results.rows[:4]] == [0, 1, 2, 0]
    for name in "ABC":  # each goes first equally often
        assert sum(row.place == 0 for row in results.rows if row.system == name) == 2
    assert {row.run for row in results.rows} == {0, 1}


class Recording(Pretender):
    """A step of each of its first answers was not settled."""

    def __init__(self, name: str, log: list[tuple[str, int]], recordings: int) -> None:
        super().__init__(name, log)
        self.recordings = recordings

    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> SystemOutput:
        output = super().answer(prompts, params)
        self.recordings -= 1
        steps = [dataclasses.replace(step_record(total_s=0.1), settled=self.recordings < 0), step_record(total_s=0.1)]
        return dataclasses.replace(output, steps=steps)


@pytest.mark.parametrize(("recordings", "passes", "unsettled"), [(0, 0, 0), (1, 1, 0), (3, 2, 0), (99, 3, 3)])
def test_where_steps_were_not_settled_all_groups_warm_up(recordings: int, passes: int, unsettled: int) -> None:
    log: list[tuple[str, int]] = []
    results = run([Recording("A", log, recordings), Pretender("B", log)])
    whole = [("A", 20), ("A", 20), ("A", 19)]
    assert log[: 2 + 3 * passes] == [("A", 16), *whole * passes, ("B", 16)]
    assert len(log) == 2 + 3 * passes + 6
    assert sum(row.breakdown.unsettled for row in results.rows if row.breakdown is not None) == unsettled


def test_answers_end_where_the_context_does() -> None:
    log: list[tuple[str, int]] = []
    run([Pretender("A", log)], groups=[Group(("long",), (tuple(range(15)),), GREEDY), *PROMPTS])
    assert [most for _, most in log] == [7, 7, 20, 20, 19]


def test_ctrl_c_keeps_what_is_finished() -> None:
    log: list[tuple[str, int]] = []
    results = run([Pretender("A", log), Pretender("B", log, stops_at=7)])
    assert results.interrupted
    assert [row.system for row in results.rows] == ["A", "B", "B", "A", "A"]


def test_ctrl_c_in_the_warm_up() -> None:
    results = run([Pretender("A", [], stops_at=0)])
    assert results.interrupted and not results.rows


def test_a_failure_is_told_and_the_rest_goes_on() -> None:
    log: list[tuple[str, int]] = []
    results = run([Pretender("A", log, fails="it broke"), Pretender("B", log)])
    assert [each.describe() for each in results.failures] == [f"A, prompt {name}: it broke" for name in "abc"]
    assert [row.system for row in results.rows] == ["B"] * 3 and not results.interrupted


@pytest.mark.parametrize("batch", [1, 2])
def test_our_engine(batch: int) -> None:
    model = MarkovModel.random(8, seed=3)
    systems = [
        OurEngine("plain", Engine(model)),
        OurEngine("lookup", Engine(model, PromptLookup(min_ngram=1), controller="fixed")),
    ]
    results = run(systems, grouped([("a", [1, 2], GREEDY), ("b", [3, 1], GREEDY), ("c", [4, 5, 6], GREEDY)], batch))
    assert not results.failures
    alone = Engine(model).generate([3, 1], GREEDY).token_ids
    for row in results.rows:
        outcome, breakdown, counters = row.output, row.breakdown, row.output.counters
        assert counters is not None and breakdown is not None
        assert row.tokens == sum(map(len, outcome.token_ids)) > 10 * len(row.prompts)
        assert breakdown.requests == counters.target_calls == outcome.target_calls
        assert breakdown.nodes == counters.draft_tokens
        assert outcome.forwards == breakdown.steps and outcome.draft_forwards == 0
        assert 0 < outcome.prefill_s < row.total_s and row.decode_s == pytest.approx(breakdown.decode_s)
        assert row.cpu_s > 0 and row.tokens_per_s == pytest.approx(row.tokens / row.total_s)
        if "b" in row.prompts:
            assert list(outcome.token_ids[row.prompts.index("b")]) == alone
    assert any(row.breakdown is not None and row.breakdown.nodes for row in results.rows)


def test_our_engine_tells_of_a_prompt_that_fails() -> None:
    system = OurEngine("plain", Engine(MarkovModel.random(8, seed=3)))
    with pytest.raises(ModelError, match="token id 99 is outside"):
        system.answer([[1], [99]], GREEDY)
    assert system.engine.listeners == []
