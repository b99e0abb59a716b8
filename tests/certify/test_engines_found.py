"""Engines with planted faults are found by asking them, and named; sound ones raise no alarm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.faulty_engines import SOUND, Planted, beginnings, embedded_models, named
from support.faulty_peer import FaultyPeer
from truedraft.certify import Report
from truedraft.certify.engines import ALARM, certify_engine

TOKENS = 1200
RUNS = 50
LONG = 3600.0
"""No test depends on time."""


AT_ONCE = {
    "temperature twice": "temperature applied twice",
    "greedy above 0": "greedy above temperature 0",
    "top-p keeps one too many": "top-p off by one token",
    "top-p drops the crossing one": "top-p off by one token",
    "q judged at temperature 1": "judged at another temperature",
    "n-gram candidates always accepted": "keeps every drafted token",
}
"""The class that a report names, by the planted fault."""


def report_on(planted: Planted, seed: int = 0, tokens: int = TOKENS) -> Report:
    models = embedded_models()
    return certify_engine(
        FaultyPeer(planted),
        models.target,
        beginnings(),
        replace(planted.params, seed=seed, stop=(), max_tokens=128),
        rounded=embedded_models("bfloat16").target,
        drafts={"draft": models.draft},
        tokens=tokens,
        seconds=LONG,
    )


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_fault_is_found_and_named(name: str) -> None:
    """Some check of tokens reached evidence of 1,000 within so many of them, and the class is named."""
    report = report_on(named(name))
    levels = [each.facts["tokens_until"][f"{ALARM:g}"] for each in report.failures if "tokens_until" in each.facts]
    assert any(tokens is not None and tokens <= TOKENS for tokens in levels)
    assert report.evidence >= ALARM
    assert AT_ONCE[name] in report.faults


def test_a_state_that_lost_a_token_is_found_by_greedy_answers() -> None:
    failed = {each.name: each for each in report_on(named("stale state loses an accepted token"), tokens=100).failures}
    assert failed["greedy tokens at their own prefixes"].facts["log10_evidence"] >= 3.0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_sound_engines_raise_no_alarm() -> None:
    """Each of 50 may raise one with probability 1 / 1,000 in each of a few parts: none does by these seeds."""
    alarms = []
    for run in range(RUNS):
        sound = SOUND[run % len(SOUND)]
        report = report_on(sound, seed=1000 * run, tokens=600)
        alarms += [(sound.name, run, finding.name) for finding in report.failures]
    assert not alarms
