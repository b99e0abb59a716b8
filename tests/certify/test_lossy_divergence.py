"""Measured divergence of lossy rules: intervals that hold the truth, and a bound from outside that stays below it."""

from __future__ import annotations

import random

import pytest

from certify.planted_faults import TEXTS, markov
from support.virtual_time import VirtualTime
from truedraft import SamplingParams
from truedraft.certify.checks import Context, Stack, Status
from truedraft.certify.statistics import LossyDivergence
from truedraft.core.intervals import ratio_of_totals
from truedraft.drafters import DraftModel, PromptLookup
from truedraft.verification.specs import rule_from_spec


@pytest.fixture(autouse=True)
def _hundred_steps_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    VirtualTime(monkeypatch, step_s=0.01)


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    """95 % of intervals over 12 answers hold 0.5; over 800 the share is within 4 standard deviations, 3 %."""
    chance, held = random.Random(2), 0
    for _ in range(800):
        tokens = [chance.randint(10, 30) for _ in range(12)]
        sums = [sum(chance.random() for _ in range(many)) for many in tokens]
        interval = ratio_of_totals(sums, tokens)
        held += interval.low <= 0.5 <= interval.high
    assert held / 800 > 0.92


@pytest.mark.parametrize("spec", ["speculative,lenience=0.3", "typical"])
def test_lossy_rules_are_measured(spec: str) -> None:
    stack = Stack(markov(0), DraftModel(markov(0, astray=1.5)), rule_from_spec(spec))
    if spec == "typical":
        stack = stack.but(drafter=PromptLookup())
    params = SamplingParams(temperature=1.0)
    inside, outside = LossyDivergence().run(Context(stack, TEXTS, params, 4, 2.0))
    assert inside.status is outside.status is Status.MEASURED
    low, high = inside.facts["total_variation_ci95"]
    assert 0.0 <= low < inside.facts["total_variation"] < high
    assert outside.facts["least_total_variation"] <= high
    if spec != "typical":
        assert outside.facts["least_total_variation"] > 0.0


def test_at_temperature_zero_there_is_no_distribution_to_test_from_outside() -> None:
    stack = Stack(markov(0), PromptLookup(), rule_from_spec("typical"))
    (inside,) = LossyDivergence().run(Context(stack, TEXTS, SamplingParams(), 2, 0.5))
    assert inside.status is Status.MEASURED
