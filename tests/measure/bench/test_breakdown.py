"""Shares of time and prediction against worked values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from support.records import step_record
from truedraft.core.stats import DraftShare, RequestStep, StepRecord
from truedraft.core.theory import DraftCost, DraftPoint, TargetCost
from truedraft.measure.bench.costs import MachineCosts, shown_points
from truedraft.measure.bench.runs import Breakdown, CurveCosts, break_down, known_share, shares
from truedraft.measure.bench.suite import Suite
from truedraft.testing import MarkovModel

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
