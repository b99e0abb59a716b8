"""Medians, paired ratios, shares of time, prediction and bandwidth against worked values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import pytest

from support.bench_runs import circumstances
from support.records import step_record
from support.tiny_models import packed
from truedraft.core.budget import NO_DRAFT, Budget, Decision
from truedraft.core.stats import Counters, DraftShare, RequestStep, StepRecord
from truedraft.core.theory import DraftCost, DraftPoint, TargetCost
from truedraft.engine.policy.decisions import Decisions
from truedraft.measure import Footprint, footprint_of
from truedraft.measure.bench import report, summary
from truedraft.measure.bench.costs import MachineCosts, Memory, reads_alike, shown_points
from truedraft.measure.bench.runs import (
    Breakdown,
    CurveCosts,
    Failure,
    Results,
    Row,
    SystemOutput,
    break_down,
    known_share,
    shares,
    time_without_core,
)
from truedraft.measure.bench.suite import Suite
from truedraft.testing import MarkovModel

NAMES = ("plain", "draft", "peer, slow", "peer, fast")
BEST = {"peer": ("peer, slow", "peer, fast")}


def row(name: str, prompt: str, total_s: float, run: int = 0, tokens: tuple[int, ...] = (1, 2, 3, 4, 5)) -> Row:
    """Five tokens, the first after 0.5 s; "draft" emits the other four in two calls, of 1.5 times V(1) each."""
    ours = not name.startswith("peer")
    calls = 2 if name == "draft" else 4
    drafts = calls == 2
    counters = Counters(
        target_calls=calls, emitted_tokens=4, prefill_tokens=1, draft_tokens=6 * drafts, accepted_tokens=4 - calls,
        accepted_per_position=[2, 0, 0] * drafts, tried_per_position=[2, 2, 0] * drafts,
    )  # fmt: skip
    breakdown = Breakdown(
        steps=calls, requests=calls, decode_s=total_s - 0.5, forward_curve_s=calls * (0.15 if drafts else 0.1),
        plain_curve_s=calls * 0.1, drafting_curve_s=0.02 * drafts,
    )  # fmt: skip
    outcome = SystemOutput(
        (tokens,), (0.5,), 0.5, calls, 6 * drafts, 100, calls, 4 / calls, counters=counters if ours else None
    )
    return Row(name, (prompt,), run, 0, total_s, 2.0 * total_s, outcome, breakdown if ours else None)


def rows() -> list[Row]:
    seconds = {"plain": (2.5, 4.5), "draft": (1.5, 1.5), "peer, slow": (5.0, 5.0), "peer, fast": (4.0, 5.0)}
    return [row(name, prompt, each[i]) for name, each in seconds.items() for i, prompt in enumerate("ab")]


def summaries() -> list[summary.Summary]:
    memory = Memory(1000.0, Footprint(100, 1), Footprint(10, 0))
    return summary.summarise(rows(), NAMES, ("plain", "draft"), {"draft": memory})


def test_speed_and_ratios_are_paired_by_prompt() -> None:
    plain, draft, *_ = summaries()
    assert plain.tokens_per_s.median == pytest.approx((5 / 2.5 + 5 / 4.5) / 2)
    assert draft.tokens_per_s.median == pytest.approx(5 / 1.5)
    assert draft.speedup == summary.Ratio.of([2.5 / 1.5, 4.5 / 1.5])
    assert draft.speedup is not None and draft.speedup.mean == pytest.approx(5**0.5)
    assert draft.decode_speedup is not None and draft.decode_speedup.mean == pytest.approx((2.0 * 4.0) ** 0.5)
    assert plain.speedup is not None and plain.speedup.mean == pytest.approx(1.0)
    assert draft.first_token_s == summary.Spread(0.5, 0.5, 0.5)
    assert draft.cpu_s_per_1000_tokens == pytest.approx(2 * 3.0 / 10 * 1000)
    runs = [row("plain", "a", each, run) for run, each in enumerate((1.0, 2.0, 50.0))]
    (found,) = summary.summarise(runs, NAMES, ("plain",), {})  # runs of a prompt count by their median
    assert found.tokens_per_s.median == pytest.approx(2.5) and found.groups == 1 and found.tokens == 5


def test_counts_prediction_and_bandwidth() -> None:
    plain, draft, peer, _ = summaries()
    assert draft.target_calls == 4 and draft.mean_acceptance_length == 2.0
    assert draft.acceptance_per_position == (1.0, 0.0)  # the third was never reached
    assert draft.predicted_speedup == pytest.approx(2.0 * 0.1 / (0.15 + 0.01))
    assert draft.measured_over_predicted == pytest.approx(8**0.5 / 1.25)
    assert plain.predicted_speedup == pytest.approx(1.0)
    assert draft.shares is not None and draft.shares.target == pytest.approx(0.6 / 2.0)
    assert draft.mbu == pytest.approx(2 * (2 * 100 + 100 + 6 * 10) / 2.0 / 1000.0)
    assert plain.mbu is None and peer.predicted_speedup is None and peer.acceptance_per_position == ()
    assert peer.mean_acceptance_length == 1.0 and peer.target_calls == 8


def test_measured_is_held_against_predicted_prompt_by_prompt() -> None:
    """Acceptance that varies must not look like a prediction that fell short, or was surpassed."""
    slow, fast = row("draft", "a", 1.5), row("draft", "b", 1.5)
    assert slow.breakdown is not None and fast.output.counters is not None
    counters = dataclasses.replace(fast.output.counters, target_calls=1)
    fast = dataclasses.replace(fast, output=dataclasses.replace(fast.output, counters=counters))
    # As fast as predicted: 1.25 and 2.5 times plain decoding.
    plain = [row("plain", "a", 0.5 + 1.25), row("plain", "b", 0.5 + 2.5)]
    draft = summary.summarise([*plain, slow, fast], NAMES, ("plain", "draft"), {})[1]
    assert draft.decode_speedup is not None
    assert draft.predicted_speedup == pytest.approx(draft.decode_speedup.mean) == pytest.approx(3.125**0.5)
    assert draft.measured_over_predicted == pytest.approx(1.0)
    alone = summary.summarise([*plain[:1], slow, fast], NAMES, ("plain", "draft"), {})[1]
    assert alone.measured_over_predicted == pytest.approx(1.0)  # of the prompt that both answered


def test_answers_without_tokens_have_no_ratio() -> None:
    empty = row("draft", "b", 1.5, tokens=())
    draft = summary.summarise([*rows()[:3], empty], NAMES, ("plain", "draft"), {})[1]
    assert draft.speedup == summary.Ratio.of([2.5 / 1.5]) and draft.tokens_per_s.low < draft.tokens_per_s.median
    assert draft.empty_answers == ("b",)


def test_identity_looks_at_all_runs() -> None:
    odd = [*rows(), row("draft", "b", 1.5, 1, (1, 2, 3, 4, 9))]
    draft = summary.summarise(odd, NAMES, ("plain", "draft"), {})[1]
    assert (draft.identical_groups, draft.groups) == (1, 2)
    assert summary.differing_answers(odd, ("plain", "draft")) == [("draft", "b", (1, 2, 3, 4, 5), (1, 2, 3, 4, 9))]
    assert summaries()[1].identical_groups == 2


def test_without_plain_rows_there_is_no_ratio() -> None:
    draft = summary.summarise([row("draft", "a", 1.0)], NAMES, ("plain", "draft"), {})[0]
    assert draft.speedup is None and draft.measured_over_predicted is None and draft.compared_groups == 0
    assert report.bench_record([draft], circumstances(), [], Results(interrupted=True))["identical"] is None


def test_what_an_interrupted_run_did_not_compare_is_not_different() -> None:
    found = summary.summarise([*rows()[:1], *rows()[2:4]], NAMES, ("plain", "draft"), {})
    assert (found[1].groups, found[1].compared_groups, found[1].identical_groups) == (2, 1, 1)
    assert report.speed_table(found, must_agree=True).rows[1][-1] == "1 of 1"
    assert report.bench_record(found, circumstances(), [], Results(interrupted=True))["identical"] is True


def test_the_best_of_several_settings_is_shown() -> None:
    found, notes = summary.shown(summaries(), BEST)
    assert [each.name for each in found] == ["plain", "draft", "peer"]
    assert found[2].tokens_per_s.median == pytest.approx((5 / 4 + 5 / 5) / 2)
    assert notes == ["peer is the best of 2 settings, in tokens/s: slow 1.0; fast 1.1"]


def test_tables() -> None:
    found, _ = summary.shown(summaries(), BEST)
    speed = report.speed_table(found, must_agree=True)
    assert speed.headings[-1] == "identical" and speed.rows[1][0] == "draft"
    assert speed.rows[1][1:3] == ("3.33 (3.33-3.33)", "2.24") and speed.rows[1][-1] == "2 of 2"
    assert report.speed_table(found, must_agree=False).headings[-1] != "identical"
    time = report.time_table(found)
    assert time.rows[1][1:4] == ("1.25", "2.83", "2.26")
    assert time.rows[0][1] == "-" and time.rows[2][4:] == ("-",) * 5
    accepted = report.acceptance_table(found)
    assert accepted.headings == ("", "accepted\nat 1", "\nat 2") and accepted.rows == (("draft", "1.00", "0.00"),)
    assert all(len(each) == len(table.headings) for table in (speed, time, accepted) for each in table.rows)


def test_decisions_of_all_runs_in_table_record_and_report() -> None:
    """Drafts of 4 that brought 3 tokens in 2 s where a plain step takes 1; two runs of them; 16 plain steps."""
    draft, none = Decision("draft", Budget(4), expected_tokens=2.0), Decision("draft", NO_DRAFT, reason="plain")
    drafted = RequestStep(0, 9, 5, False, 4, 4, 4, 2, 3, decision=draft)
    plain = RequestStep(0, 9, 1, False, emitted=1, decision=none)
    steps = [StepRecord((drafted,), 0.0, 0.0, 0.0, 2.0), StepRecord((plain,), 0.0, 0.0, 0.0, 1.0)] * 8
    runs = [dataclasses.replace(row("draft", "a", 1.5, run), decisions=Decisions.of(steps)) for run in range(2)]
    (found,) = summary.summarise(runs, NAMES, ("plain", "draft"), {})
    assert found.decisions is not None and found.decisions.steps == 32
    table = report.decisions_table(found.decisions)
    assert table.rows == (
        ("draft", "16", "0.50", "4.00", "0.50", "2.00", "3.00", "0.67", "as set"),
        ("plain", "16", "0.50", "0.00", "-", "-", "1.00", "0.33", "no draft pays"),
    )
    assert all(len(each) == len(table.headings) for each in table.rows)
    record = report.bench_record([found], circumstances(), [], Results())["systems"][0]["decisions"]
    assert record["speedup"]["factor"] == pytest.approx(4 / 3) and record["speedup"]["by_plain_steps"] is True
    text = report.markdown([found], circumstances(), [], [], [], [(found, "decisions-draft")])
    assert "### draft" in text and "| draft | 16 | 0.50 | 4.00 |" in text and "](decisions-draft.svg)" in text
    assert "estimated speed-up over plain decoding: 1.33 (95 % interval " in text
    assert report.decides(found) and not report.decides(summaries()[0])
    asked_nobody = StepRecord((dataclasses.replace(plain, decision=None),), 0.0, 0.0, 0.0, 1.0)
    assert not report.decides(dataclasses.replace(found, decisions=Decisions.of([asked_nobody])))


def test_peers_draw_other_random_numbers() -> None:
    seeded = dataclasses.replace(circumstances(), sampling={"temperature": 0.8, "seed": 1})
    rows_of = {each[0]: each[-1] for each in report.all_tables(summaries(), seeded)[0].rows}
    assert (rows_of["draft"], rows_of["peer, slow"]) == ("2 of 2", "-")
    systems = report.bench_record(summaries(), seeded, [], Results())["systems"]
    assert [each["identical"] for each in systems] == [True, True, None, None]


def test_tokens_that_come_with_the_prefill_are_not_decoded() -> None:
    one = row("peer, fast", "a", 2.5)
    several = dataclasses.replace(one, output=dataclasses.replace(one.output, first_tokens=3))
    assert (one.decode_tokens_per_s, several.decode_tokens_per_s) == (pytest.approx(4 / 2.0), pytest.approx(2 / 2.0))


def test_time_without_a_core() -> None:
    """Rows have twice as much CPU time as wall time: two threads."""
    assert time_without_core(rows()) == 0.0 and time_without_core([]) == 0.0
    idle = [dataclasses.replace(each, cpu_s=0.25 * each.total_s) for each in rows()]
    assert time_without_core(idle) == pytest.approx(0.75)


def test_each_table_says_what_a_padded_target_is() -> None:
    padded = report.all_tables(summaries(), circumstances())
    assert [table.headings[0] for table in padded] == ["cost of a 500 M model,\ntext of a 16 M model"] * 3
    own = report.all_tables(summaries()[:1], dataclasses.replace(circumstances(), note=None))
    assert [table.headings[0] for table in own] == ["", ""]  # plain decoding drafts nothing


def test_answers_of_no_token_are_told() -> None:
    plain = dataclasses.replace(summaries()[1], empty_answers=("a", "b", "c", "d"))
    assert summary.empty_answers([plain]) == ["draft: 4 answers ended before their first token (prompt a, b, c, ...)"]
    assert report.bench_record([plain], circumstances(), [], Results())["systems"][0]["empty_answers"] == [
        "a",
        "b",
        "c",
        "d",
    ]
    assert summary.empty_answers(summaries()) == []


def test_steps_that_were_not_settled_are_told() -> None:
    slow = [
        dataclasses.replace(each, breakdown=dataclasses.replace(each.breakdown, unsettled=3, unsettled_s=0.25))
        for each in rows()
        if each.system == "draft" and each.breakdown is not None
    ]
    told = summary.summarise([*(each for each in rows() if each.system != "draft"), *slow], NAMES, NAMES[:2], {})
    (sentence,) = summary.unsettled_steps(told)
    assert sentence.startswith("draft: forwards of new shapes were made ready in 6 steps, which took 0.50 s; ")
    record = report.bench_record(told, circumstances(), [], Results())["systems"][1]
    assert (record["unsettled_steps"], record["unsettled_s"]) == (6, 0.5)
    assert summary.unsettled_steps(summaries()) == []


def test_record() -> None:
    results = Results(failures=[Failure("", ("b",), "oh"), Failure("draft", ("a", "c"), "no")])
    record = report.bench_record(summaries(), circumstances(), [{"rows": 1, "context": 128, "seconds": 0.1}], results)
    again = json.loads(json.dumps(record, allow_nan=False))
    assert again.keys() == record.keys() and again["systems"] == record["systems"]
    assert record["tokens_per_s"] == pytest.approx(5 / 1.5) and record["speedup"] == pytest.approx(5**0.5)
    assert record["identical"] is True and record["failures"] == ["prompt b: oh", "draft, prompt a, c: no"]
    for key in ("machine", "dtype", "threads", "batch", "sampling", "prompt_set", "fast_paths", "pad_to", "note"):
        assert key in record
    assert all(each["note"] == record["note"] for each in record["systems"]) and record["differences"] == []
    assert record["systems"][1]["shares"]["host"] == pytest.approx(1 - 0.3 - 0.02)
    loose = dataclasses.replace(circumstances(), must_agree=False)
    assert report.bench_record(summaries(), loose, [], Results())["identical"] is None
    assert report.bench_record([], circumstances(), [], Results(interrupted=True))["tokens_per_s"] is None


def test_report() -> None:
    text = report.markdown(summaries(), circumstances(), ["speed", "cost"], ["a remark"])
    assert "padded to 500M: cost of a 500 M model, text of a 16 M model; bfloat16" in text
    assert "| draft | 3.33 (3.33-3.33) | 2.24 | 0.500 s | 4 | 2.00 |" in text
    assert "](speed.svg)" in text and "](acceptance.svg)" not in text and "- a remark" in text
    assert "read bandwidth: 40.0 GB/s" in text and "1,000 MB" in text
    assert "| cost of a 500 M model, text of a 16 M model | tokens/s |" in text and "| accepted at 1 | at 2 |" in text
    assert "measured right before this run" in text and "2 threads in use" in text and "2 prompts of heldout" in text
    kept = report.markdown([], dataclasses.replace(circumstances(), costs_kept=True, threads=1, prompts=1), [], [])
    assert "kept from an earlier run" in kept and "1 thread in use" in kept and "1 prompt of heldout" in kept
    assert "| tokens/call |" in text and "| decode x plain |" in text and "| measured/predicted |" in text


def test_read_size_of_a_model() -> None:
    assert reads_alike(packed("llama")) and not reads_alike(packed("mixtral"))
    size = footprint_of(packed("llama"))
    module = packed("llama").module
    config = module.config
    assert size.weights == packed("llama").weight_bytes > 0
    width = config.hidden_size // config.num_attention_heads
    assert size.cached_token == 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * width


PREFILL = step_record(20, 0, prefill=True, target_s=0.9, verify_s=0.05, total_s=1.0)
STEP = step_record(5, 20, 4, draft_s=0.4, target_s=1.1, verify_s=0.1, total_s=1.7)


class FlatCosts(CurveCosts):
    """A forward costs 1 s and 0.01 s a row; a drafted node 0.1 s."""

    def __init__(self) -> None:
        pass

    def forward_s(self, rows: int, contexts: Sequence[int]) -> float:
        return 1.0 + 0.01 * rows

    def drafting_s(self, step: StepRecord) -> float:
        return 0.1 * step.nodes


def test_sums_leave_the_prefill_out() -> None:
    found = break_down([PREFILL, STEP, STEP], total_s=5.0, costs=FlatCosts())
    assert (found.steps, found.requests, found.rows, found.nodes) == (2, 2, 10, 8)
    assert found.decode_s == pytest.approx(4.0)  # what lies between the steps is part of it
    assert found.target_s == pytest.approx(2.2) and found.verify_s == pytest.approx(0.2)
    assert found.forward_curve_s == pytest.approx(2.10)
    assert found.plain_curve_s == pytest.approx(2.02)
    assert found.drafting_curve_s == pytest.approx(0.8)
    parts = shares(found)
    assert parts is not None and parts.target is not None and parts.draft is not None and parts.host is not None
    assert parts.target == pytest.approx(0.525) and parts.draft == pytest.approx(0.2)
    assert parts.host == pytest.approx(0.275)  # step time - V - draft cost
    assert parts.verification == pytest.approx(0.05) and parts.timed_target == pytest.approx(0.55)


def test_steps_that_were_not_settled_are_left_out_of_the_sums() -> None:
    """Two of them in 6 s, beside two that were, and a prompt's part, whose seconds are of prompts whatever it was."""
    recording = dataclasses.replace(STEP, total_s=3.0, target_s=2.9, settled=False)
    steps = [dataclasses.replace(PREFILL, settled=False), recording, STEP, recording, STEP]
    found = break_down(steps, total_s=11.0, costs=FlatCosts())
    assert (found.unsettled, found.unsettled_s) == (2, pytest.approx(6.0))
    assert dataclasses.replace(found, unsettled=0, unsettled_s=0.0) == break_down(
        [PREFILL, STEP, STEP], 5.0, FlatCosts()
    )


def test_without_curves_or_steps() -> None:
    found = shares(break_down([STEP], total_s=2.0, costs=None))
    assert found is not None and found.target is None and found.host is None
    assert found.timed_draft == pytest.approx(0.2)
    assert shares(break_down([PREFILL], total_s=1.5, costs=FlatCosts())) is None


def target_cost() -> TargetCost:
    return TargetCost.fit({(rows, context): rows * 1.0 + context * 0.01 for rows in (1, 2, 4) for context in (10, 100)})


def drafted(*requests: dict[str, int]) -> StepRecord:
    """A step in which each request's drafters proposed so many nodes."""
    steps = [
        RequestStep(i, 10, 1, False, shares=tuple(DraftShare(name, nodes, nodes) for name, nodes in each.items()))
        for i, each in enumerate(requests)
    ]
    return StepRecord(tuple(steps), 0.0, 0.0, 0.0, 0.0)


def test_curve_costs() -> None:
    draft = DraftCost((DraftPoint(1, 1, 0.5), DraftPoint(2, 2, 0.8)))
    costs = CurveCosts(target_cost(), {"draft": draft, "cheap": DraftCost((DraftPoint(1, 1, 0.1),))})
    assert costs.forward_s(1, (10,)) == pytest.approx(1.1)
    assert costs.drafting_s(drafted({"draft": 2})) == pytest.approx(0.8)
    assert costs.drafting_s(drafted({"draft": 2}, {"draft": 2})) == pytest.approx(0.8), "forwards are shared"
    assert costs.drafting_s(drafted({"draft": 2}, {"cheap": 1}, {})) == pytest.approx(0.9)
    assert costs.drafting_s(drafted({"draft": 1, "cheap": 1})) == pytest.approx(0.6)
    assert CurveCosts(target_cost()).drafting_s(drafted({"draft": 3})) == 0.0


def test_shown_points_stay_within_the_context() -> None:
    points = shown_points(target_cost(), context_length=700)
    assert {point["context"] for point in points} == {128, 512}
    assert [point["rows"] for point in points if point["context"] == 128] == [1, 2, 4, 8, 16, 32, 64]
    assert points[0]["seconds"] == pytest.approx(target_cost()(1, (128,)))
    few = shown_points(target_cost(), context_length=32)
    assert {point["context"] for point in few} == {16} and max(point["rows"] for point in few) < 16


def test_no_bandwidth_means_no_memory_figures() -> None:
    suite = Suite(MarkovModel.random(8, seed=0), lossless=True, ours=[])
    assert MachineCosts(bandwidth=None).memory(suite) == {}
    assert MachineCosts(bandwidth=1e9).memory(suite) == {}  # a table of distributions reads no weights


def test_shares_that_no_run_can_have_had_are_not_known() -> None:
    """As bench once showed: a curve of a disturbed minute, and a bandwidth of another."""
    assert [known_share(share) for share in (None, 0.0, 0.5, 1.0, 1.004)] == [None, 0.0, 0.5, 1.0, 1.004]
    assert [known_share(share) for share in (1.01, 1.95)] == [None, None]
    run = {"steps": 4, "decode_s": 1.0, "verify_s": 0.01, "target_s": 0.8, "draft_s": 0.1, "plain_curve_s": 1.0}
    disturbed = shares(Breakdown(**run, forward_curve_s=1.5, drafting_curve_s=0.12))
    assert disturbed is not None and (disturbed.target, disturbed.draft, disturbed.host) == (None, None, None)
    assert disturbed.timed_target == 0.8 and disturbed.verification == 0.01, "what was timed is still told"
    rounded = shares(Breakdown(**run, forward_curve_s=0.9, drafting_curve_s=0.103))
    assert rounded is not None and rounded.host == 0.0
