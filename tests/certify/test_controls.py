"""Negative controls: every fault is found on healthy stacks, and tests that are blind are told so."""

from __future__ import annotations

import pytest

from certify.planted_faults import markov
from truedraft import SamplingParams
from truedraft.certify import controls, coupled_controls, faults
from truedraft.certify.clock import Deadline
from truedraft.certify.findings import Finding, Part, Status
from truedraft.certify.stack import Stack
from truedraft.drafters import DraftModel, NoDrafter, PromptLookup
from truedraft.drafters.base import Drafter
from truedraft.verification import BlockVerification, Rule, SpeculativeSampling

TEXTS = [[1, 2, 3], [4], [5, 5, 0, 2, 1, 7], [3, 1]]
FOREVER = 600.0
WARM = SamplingParams(temperature=1.0)


def stack_of(drafter: Drafter, rule: Rule | None = None) -> Stack:
    return Stack(markov(0), drafter, rule if rule is not None else SpeculativeSampling())


def draft() -> Drafter:
    return DraftModel(markov(0, astray=1.0), num_speculative_tokens=3)


def shown(stack: Stack, params: SamplingParams = WARM, detectable: float = 0.03, tokens: int = 20_000) -> list[Finding]:
    return controls.control_findings(
        stack, TEXTS, params, FOREVER, lambda done: None, tokens=tokens, detectable=detectable
    )


@pytest.mark.parametrize(
    ("drafter", "rule", "params"),
    [
        (draft(), SpeculativeSampling(), WARM),
        (draft(), BlockVerification(), SamplingParams(temperature=0.7, top_p=0.95)),
        (DraftModel(markov(0), branching=(2, 2)), SpeculativeSampling(), WARM),  # never wrong: no room of its own
        (PromptLookup(), SpeculativeSampling(), WARM),
        (NoDrafter(), SpeculativeSampling(), WARM),
    ],
    ids=["draft", "block", "tree", "prompt lookup", "none"],
)
def test_every_fault_is_found(drafter: Drafter, rule: Rule, params: SamplingParams) -> None:
    findings = shown(stack_of(drafter, rule), params)
    assert [finding.name for finding in findings] == [control.name for control in controls.SAMPLED]
    for finding in findings:
        assert finding.part is Part.CONTROLS
        assert finding.status is Status.HOLDS, finding.summary
        assert finding.facts["total_variation"] >= 3 * finding.facts["smallest_detectable_tv"]
        assert finding.facts["adjusted_p_value"] < 1e-3


def test_a_fault_too_small_for_what_was_certified_does_not_count() -> None:
    """Where tests would have found 0.2 at best, no fault here is three times as large but for a drafted whole."""
    findings = shown(stack_of(draft()), detectable=0.2)
    failed = [finding for finding in findings if finding.status is Status.FAILS]
    assert len(failed) >= 3
    assert all("too small to count" in finding.summary for finding in failed)


def test_tests_that_find_nothing_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that is none: its formula says that it puts laws off, the code does not."""
    harmless = controls.Control("nothing is wrong", lambda stack: stack, faults.emitted_always)
    monkeypatch.setattr(controls, "SAMPLED", (harmless,))
    (finding,) = shown(stack_of(draft()), tokens=300)
    assert finding.status is Status.FAILS
    assert "NOT found" in finding.summary


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0, coupled=True)], ids=["T0", "coupled"]
)
def test_faults_of_greedy_and_coupled_answers_are_found(params: SamplingParams) -> None:
    for finding in coupled_controls.coupled_control_findings(stack_of(draft()), TEXTS, params, lambda done: None):
        assert finding.status is Status.HOLDS, finding.summary
        assert finding.facts["differing_answers"] > 0


def test_shared_noise_is_found_in_the_law() -> None:
    params = SamplingParams(temperature=1.0, coupled=True)
    limits = controls.Limits(Deadline(FOREVER), 20_000, 0.03, 0.0, 1e-3)
    finding = coupled_controls.shared_noise_finding(stack_of(draft()), TEXTS, params, limits)
    assert finding.status is Status.HOLDS, finding.summary
    assert finding.facts["total_variation"] > 0.09


def test_caches_are_healthy_again_after_a_control() -> None:
    """The fault is taken off a cache when it goes back to the pool."""
    target = markov(0)
    broken = faults.LosesLastAccepted(target)
    cache = broken.new_cache()
    assert "commit" in vars(cache)
    broken.release_cache(cache)
    assert "commit" not in vars(target.new_cache())
