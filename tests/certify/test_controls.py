"""Negative controls: every fault is found on healthy stacks, and tests that are blind are told so."""

from __future__ import annotations

import pytest

from certify.planted_faults import HARMLESS, TEXTS, chain, healthy, markov, said_of_tokens
from support.virtual_time import VirtualTime
from truedraft import SamplingParams
from truedraft.certify import controls, faults
from truedraft.certify.checks import Context, Finding, Part, Stack, Status
from truedraft.certify.controls import ComparedControls, SampledControls
from truedraft.drafters import DraftModel, NoDrafter, PromptLookup
from truedraft.drafters.base import Drafter
from truedraft.verification import BlockVerification, Rule, SpeculativeSampling

FOREVER = 600.0
WARM = SamplingParams(temperature=1.0)


def shown(stack: Stack, params: SamplingParams = WARM, **said: float) -> list[Finding]:
    context = Context(stack, TEXTS, params, seconds=FOREVER, earlier=[said_of_tokens(**said)])  # type: ignore[arg-type]
    return SampledControls().run(context)


@pytest.mark.parametrize(
    ("drafter", "rule", "params"),
    [
        (chain(), SpeculativeSampling(), WARM),
        (chain(), BlockVerification(), SamplingParams(temperature=0.7, top_p=0.95)),
        (DraftModel(markov(0), branching=(2, 2)), SpeculativeSampling(), WARM),  # never wrong: no room of its own
        (PromptLookup(), SpeculativeSampling(), WARM),
        (NoDrafter(), SpeculativeSampling(), WARM),
    ],
    ids=["draft", "block", "tree", "prompt lookup", "none"],
)
def test_every_fault_is_found(drafter: Drafter, rule: Rule, params: SamplingParams) -> None:
    findings = shown(healthy().but(drafter=drafter, rule=rule), params)
    assert [finding.name for finding in findings] == [control.name for control in controls.SAMPLED]
    for finding in findings:
        assert finding.part is Part.CONTROLS
        assert finding.status is Status.HOLDS, finding.summary
        assert finding.facts["total_variation"] >= 3 * finding.facts["smallest_detectable_tv"]
        assert finding.facts["adjusted_p_value"] < 1e-3


def test_a_fault_too_small_for_what_was_certified_does_not_count() -> None:
    """Where tests would have found 0.2 at best, no fault here is three times as large but for a drafted whole."""
    findings = shown(healthy(), detectable=0.2)
    undecided = [finding for finding in findings if finding.status is not Status.HOLDS]
    assert len(undecided) >= 3
    assert all("too small to count" in finding.summary for finding in undecided)
    assert {finding.status for finding in undecided} == {Status.NOT_ENOUGH}


def test_no_time_for_a_fault_that_is_none_is_not_enough_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    time = VirtualTime(monkeypatch, step_s=1.0)
    (finding,) = SampledControls([HARMLESS]).run(
        Context(healthy(), TEXTS, WARM, seconds=20.0, earlier=[said_of_tokens(1_000_000)])
    )
    assert finding.status is Status.NOT_ENOUGH
    assert "not found in the time there was" in finding.summary
    assert time.seconds <= 300.0, "four times the time, the batch under way, and a batch to choose where to look"


def test_without_tests_of_answers_there_is_nothing_to_show_a_fault_to() -> None:
    (finding,) = SampledControls().run(Context(healthy(), TEXTS, WARM))
    assert finding.status is Status.DOES_NOT_APPLY


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, seed=1)], ids=["T0", "seeded"])
def test_faults_of_greedy_and_seeded_answers_are_found(params: SamplingParams) -> None:
    for finding in ComparedControls().run(Context(healthy(), TEXTS, params)):
        assert finding.status is Status.HOLDS, finding.summary
        assert finding.facts["differing_answers"] > 0


def test_shared_noise_is_found_in_the_distribution() -> None:
    params = SamplingParams(temperature=1.0, seed=1)
    told: list[float] = []
    context = Context(healthy(), TEXTS, params, seconds=FOREVER, tell=told.append, earlier=[said_of_tokens()])
    (finding,) = SampledControls([faults.SHARED_BY_TOKENS]).run(context)
    assert finding.status is Status.HOLDS, finding.summary
    assert finding.facts["total_variation"] > 0.09
    assert told == sorted(told) and told[-1] == 1.0


def test_caches_are_healthy_again_after_a_control() -> None:
    """The fault is taken off a cache when it goes back to the pool."""
    target = markov(0)
    broken = faults.loses_last_accepted(target)
    cache = broken.new_cache()
    assert "commit" in vars(cache)
    broken.release_cache(cache)
    assert "commit" not in vars(target.new_cache())
