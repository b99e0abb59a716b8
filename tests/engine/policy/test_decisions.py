"""What was decided and what it brought, from step records: counts, seconds, a speed-up with its interval."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence

import pytest

from support.answers import fixed
from truedraft import SamplingParams
from truedraft.core.budget import NO_DRAFT, Budget, Decision
from truedraft.core.stats import DraftTime, RequestStep, StepRecord
from truedraft.drafters import Portfolio
from truedraft.engine.policy.decisions import Decisions, Tally, what_was_decided, why
from truedraft.testing import MarkovModel, ScriptedDrafter

FOUR = Budget(4)
DRAFT = Decision("draft", FOUR, reason="pays", expected_tokens=3.0, speedup=2.0)
PLAIN = Decision("draft", NO_DRAFT, reason="plain", expected_tokens=1.0, speedup=1.0)
PROBE = Decision("lookup", FOUR, reason="probe", expected_tokens=2.0, speedup=1.0)


def step(
    decision: Decision | None, nodes: int = 0, emitted: int = 1, request: int = 0, context: int = 64
) -> RequestStep:
    return RequestStep(request, context, 1 + nodes, False, nodes, nodes, nodes, emitted - 1, emitted, decision=decision)


def record(*steps: RequestStep, total_s: float, draft_s: float = 0.0, decide_s: float = 0.0) -> StepRecord:
    asked = [each for each in steps if each.decision is not None and not each.decision.is_zero]
    name = asked[0].decision.parts[0].drafter if asked and asked[0].decision is not None else ""
    drafting = (DraftTime(name, len(asked), 4, 4, 0, draft_s),) if asked else ()
    return StepRecord(steps, draft_s, 0.0, 0.0, total_s, decide_s, drafting)


def curve(rows: int, contexts: Sequence[int]) -> float:
    """A tenth more for each further row."""
    return 0.9 + 0.1 * rows


@pytest.mark.parametrize(
    ("decision", "what", "reason"),
    [
        (DRAFT, "draft", "pays"),
        (PLAIN, "plain", "plain"),
        (PROBE, "probe", "probe"),
        (Decision("draft", NO_DRAFT, reason="probe"), "probe", "probe"),
        (None, "plain", "not asked"),
        (DRAFT.cut(0), "plain", "end"),
        (Decision("a", FOUR, (Decision("b", FOUR), Decision("c", NO_DRAFT))), "a+b", ""),
    ],
)
def test_what_was_decided_and_why(decision: Decision | None, what: str, reason: str) -> None:
    assert (what_was_decided(step(decision)), why(decision)) == (what, reason)


def test_counts_by_decision() -> None:
    """Two drafts of 4 that brought 3 and 1 tokens in 10 and 6 s, a plain step of 2 s, a probe of 4 s, a prompt."""
    decisions = Decisions.of(
        [
            StepRecord((RequestStep(0, 0, 9, True, emitted=1),), 0.0, 0.0, 0.0, 99.0),
            record(step(DRAFT, 4, 3), total_s=10.0, draft_s=2.0),
            record(step(DRAFT, 4, 1), total_s=6.0, draft_s=1.0),
            record(step(PLAIN), total_s=2.0),
            record(step(PROBE, 3, 2), total_s=4.0, draft_s=1.0),
        ]
    )
    assert list(decisions.ordered) == ["draft", "plain", "probe"]
    draft, plain, probe = decisions.ordered.values()
    assert draft == Tally(2, 8, 2, 4, 6.0, 2, 16.0, {"pays": 2})
    assert (draft.drafted_per_step, draft.acceptance, draft.expected_per_step, draft.emitted_per_step) == (
        4,
        0.25,
        3,
        2,
    )
    assert (plain.steps, plain.acceptance, plain.emitted_per_step) == (1, None, 1.0)
    assert (probe.drafted, probe.accepted, probe.seconds) == (3, 1, 4.0)
    assert (decisions.steps, decisions.drafted, decisions.seconds) == (4, 11, 22.0)
    assert decisions.share(draft) == 0.5 and decisions.time_share(draft) == pytest.approx(16 / 22)


def test_steps_that_were_not_settled_are_counted_without_their_seconds() -> None:
    """A draft in 3.1 s and a plain step in 2 s, each once more while a forward was recorded, in 50 s."""
    settled = [record(step(DRAFT, 4, 3), total_s=3.1, draft_s=0.2, decide_s=0.1), record(step(PLAIN), total_s=2.0)]
    slow = [dataclasses.replace(each, total_s=50.0, settled=False) for each in settled]
    decisions, alone = Decisions.of(settled * 20 + slow * 20, curve), Decisions.of(settled * 20, curve)
    assert decisions.tallies["draft"].emitted == 120 and decisions.tallies["draft"].steps == 40
    assert decisions.seconds == pytest.approx(alone.seconds) == pytest.approx(20 * 5.1)
    assert sum(stretch.steps for stretch in decisions.stretches) == 80
    speedup, settled_alone = decisions.estimate(), alone.estimate()
    assert speedup is not None and settled_alone is not None
    assert speedup.factor == pytest.approx(settled_alone.factor) and speedup.by_plain_steps


def test_seconds_of_a_step_go_to_those_that_it_was_for() -> None:
    """Of 10 s the drafter took 4, for one of two requests; the other 6 are of both. What stops an answer is emitted."""
    ended = step(PLAIN, request=1)
    ended.emitted, ended.stop_tokens = 0, 1
    decisions = Decisions.of([record(step(DRAFT, 4, 2), ended, total_s=10.0, draft_s=4.0)])
    assert decisions.tallies["draft"].seconds == 7.0 and decisions.tallies["plain"].seconds == 3.0
    assert decisions.tallies["plain"].emitted == 1
    (stretch,) = decisions.stretches
    assert stretch.decisions == {"draft": 1, "plain": 1} and stretch.emitted == 3 and stretch.requests == 2


def test_no_tokens_are_expected_where_a_draft_was_cut_to_nothing() -> None:
    decisions = Decisions.of([record(step(DRAFT.cut(0)), total_s=1.0)])
    assert decisions.tallies["plain"].expected_per_step is None


def test_speedup_by_the_curve() -> None:
    """A step of 5 rows costs 1.4 by the curve, took twice that and 0.2 for its draft, and brought 3 tokens."""
    decisions = Decisions.of([record(step(DRAFT, 4, 3), total_s=3.1, draft_s=0.2, decide_s=0.1)] * 40, curve)
    speedup = decisions.speedup()
    assert speedup is not None and not speedup.by_plain_steps
    assert speedup.factor == pytest.approx(3 * 2.0 / 3.1)
    assert speedup.low == pytest.approx(speedup.factor) and speedup.high == pytest.approx(speedup.factor)
    assert "by the cost curve" in speedup.describe() and f"{3 * 2.0 / 3.1:.2f}" in speedup.describe()


def test_speedup_by_plain_steps_of_the_run() -> None:
    """They took 3 s where the curve says 1, so each token would have; drafts took 4 s for 2 tokens."""
    steps = [record(step(PLAIN), total_s=3.5, decide_s=0.5), record(step(DRAFT, 4, 2), total_s=4.0)] * 16
    for forward_s in (curve, None):
        speedup = Decisions.of(steps, forward_s).speedup()
        assert speedup is not None and speedup.by_plain_steps
        assert speedup.factor == pytest.approx(3 * 3.0 / 7.5)
        assert speedup.low is not None and speedup.low <= speedup.factor <= (speedup.high or 0.0)


def test_speedup_of_requests_together() -> None:
    """Two requests, 5 tokens: a plain step of both brings two and has 2 rows, the steps here 10."""
    steps = [record(step(DRAFT, 4, 3), step(DRAFT, 4, 2, request=1), total_s=1.8)] * 3
    speedup = Decisions.of(steps, curve).speedup()
    assert speedup is not None and speedup.factor == pytest.approx(2.5 * 1.1 / 1.9)
    assert speedup.low is None and speedup.describe().count("too few steps for an interval") == 1


def test_what_is_kept_of_the_curve_is_bounded() -> None:
    decisions = Decisions(curve)
    for number in range(10_000):
        decisions(record(step(PLAIN, context=64 * number), total_s=1.0))
    assert len(decisions._curve_s) <= 4096
    assert sum(each.curve_s for each in decisions.stretches) == pytest.approx(10_000)


def test_no_speedup_without_drafts_steps_or_costs() -> None:
    assert Decisions.of([record(step(None), total_s=1.0)] * 40, curve).speedup() is None
    assert Decisions(curve).speedup() is None
    assert Decisions.of([record(step(DRAFT, 4, 2), total_s=1.0)] * 40).speedup() is None


def simulated(seed: int) -> Decisions:
    """150 steps, each alike its neighbours: runs of about five steps in which drafts are good, or bad. Truth: 2."""
    draws = random.Random(seed)
    decisions, good = Decisions(lambda rows, contexts: 1.0), True
    for _ in range(150):
        good = good if draws.random() < 0.8 else not good
        decisions(record(step(DRAFT, 4, 4 if good else 1), total_s=1.25, draft_s=0.25))
    return decisions


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Fixed seeds, so no false alarm. Steps drawn one by one, not in blocks, would cover 137 of 200."""
    found = [simulated(seed).speedup() for seed in range(200)]
    covered = sum(each is not None and (each.low or 9) <= 2.5 / 1.25 <= (each.high or 0) for each in found)
    assert 170 <= covered <= 200


def test_size_is_bounded_and_nothing_is_lost() -> None:
    decisions = Decisions(curve)
    for number in range(5000):
        decisions(record(step(DRAFT, number % 5, 1), total_s=1.0))
    assert len(decisions.stretches) <= 512
    assert sum(each.steps for each in decisions.stretches) == decisions.steps == 5000
    assert sum(each.drafted for each in decisions.stretches) == decisions.drafted == 10_000
    timeline = decisions.timeline(60)
    assert len(timeline) <= 60 and sum(each.steps for each in timeline) == 5000
    assert len(json.dumps(decisions.as_dict())) < 30_000


def test_sum_of_two_runs() -> None:
    first = Decisions.of([record(step(DRAFT, 4, 2), total_s=1.0)] * 3, curve)
    second = Decisions.of([record(step(PLAIN), total_s=1.0), record(step(DRAFT, 2, 1), total_s=1.0)], curve)
    both = first + second
    assert both.tallies["draft"].steps == 4 and both.tallies["draft"].drafted == 14
    assert both.tallies["plain"].reasons == {"plain": 1} and len(both.stretches) == 5
    both.tallies["draft"].reasons["pays"] = 99
    assert first.tallies["draft"].steps == 3 and first.tallies["draft"].reasons == {"pays": 3}
    assert Decisions().timeline(10) == [] and Decisions().as_dict()["decided"] == []


def test_listening_to_an_engine() -> None:
    """As many tokens as the answer's counters say, by the drafters that its controller chose."""
    target = MarkovModel.random(9, seed=1, context_length=200)
    drafter = Portfolio({"one": ScriptedDrafter(lambda tokens: [[1, 2]]), "two": ScriptedDrafter(lambda tokens: [[3]])})
    engine = fixed(target, drafter)
    decisions = Decisions()
    engine.listeners.append(decisions)
    answers = engine.generate([[1], [2, 3]], SamplingParams(max_tokens=20))
    tally = decisions.tallies["one"]
    assert tally.emitted + decisions.tallies.get("plain", Tally()).emitted == sum(
        a.stats.emitted_tokens for a in answers
    )
    assert tally.drafted == sum(a.stats.by_drafter["one"].draft_tokens for a in answers) > 0
    assert tally.accepted == sum(a.stats.by_drafter["one"].accepted_tokens for a in answers)
    assert decisions.steps == sum(a.stats.target_calls for a in answers)
