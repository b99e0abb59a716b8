"""Whole certificates: issued for correct stacks, refused for broken ones, measured for lossy ones."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace

import pytest

from certify.planted_faults import TEXTS, ForgetsTheLast, chain, gives_up, healthy, markov
from support.faulty_parts import keeps_rejected, raising
from support.virtual_time import VirtualTime
from truedraft import SamplingParams
from truedraft.certify import certify, faults
from truedraft.certify import checks as common
from truedraft.certify.checks import Context, Finding, Part, Stack, Status
from truedraft.certify.e_process import ENOUGH
from truedraft.certify.equality import EqualityInFloat32
from truedraft.certify.report import Report
from truedraft.drafters import DraftModel, Portfolio, PromptLookup
from truedraft.errors import OptionError
from truedraft.verification import SpeculativeSampling
from truedraft.verification.specs import rule_from_spec

WARM = SamplingParams(max_tokens=24, temperature=1.0)
SECONDS = 12.0
"""About 2,500 tokens are needed for faults to be large enough beside what is found."""


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """A hundred steps of an engine take a second, on every machine."""
    return VirtualTime(monkeypatch, 0.01)


@pytest.mark.parametrize(
    "params", [WARM, replace(WARM, temperature=0.0), replace(WARM, seed=1)], ids=["sampled", "greedy", "seeded"]
)
def test_a_correct_stack_is_certified(params: SamplingParams) -> None:
    told: dict[Part, list[float]] = defaultdict(list)
    told_of = lambda part, done: told[part].append(done)  # noqa: E731
    certificate = certify(healthy(), TEXTS, params, batch=3, seconds=SECONDS, tell=told_of)
    assert certificate.issued, certificate.verdict
    assert certificate.verdict.startswith("CERTIFIED")
    parts = {finding.part for finding in certificate.findings}
    always = {Part.EXACT, Part.EQUALITY, Part.CONTROLS, Part.INVARIANCE, Part.DRAFT_STATE}
    assert parts == (always if params.greedy else always | {Part.STATISTICAL})
    assert all(told[part][-1] == pytest.approx(1.0) for part in parts)
    record = certificate.as_dict()
    assert record["certified"] is True
    assert record["failures"] == []
    page = certificate.page({"model": "markov", "sampling": {"top_p": 1}})
    assert page.count("| holds |") == sum(f.status is Status.HOLDS for f in certificate.findings)
    assert "| sampling | top_p 1 |" in page
    assert any("as far as was tested" in line for line in certificate.notes)


def test_a_broken_target_gets_no_certificate_and_names_what_failed() -> None:
    """In little time: controls, which do not find their faults behind such a target, go on to the end of theirs."""
    stack = healthy().but(target=keeps_rejected(markov(0)))
    certificate = certify(stack, TEXTS, replace(WARM, max_tokens=12), batch=2, seconds=1.0)
    assert not certificate.issued
    assert any(finding.part is Part.EQUALITY for finding in certificate.failures)
    assert certificate.verdict.startswith("NO CERTIFICATE")
    assert certificate.as_dict()["failures"]


def test_a_stale_draft_is_certified_and_told() -> None:
    """A stale draft cache changes no distribution: it costs acceptance, and is reported as that."""
    stack = healthy().but(drafter=ForgetsTheLast(markov(0, astray=0.2)))
    certificate = certify(stack, TEXTS, replace(WARM, temperature=0.0), seconds=SECONDS)
    assert certificate.issued, certificate.verdict
    (state,) = [finding for finding in certificate.findings if finding.part is Part.DRAFT_STATE]
    assert state.status is Status.MEASURED
    assert state.facts["stale"] is True


def test_a_lossy_rule_is_measured_instead() -> None:
    stack = healthy().but(rule=rule_from_spec("speculative,lenience=0.5"))
    certificate = certify(stack, TEXTS, WARM, seconds=4.0)
    assert not certificate.issued
    assert not certificate.failures, certificate.verdict
    assert "lossy" in certificate.verdict
    assert any(finding.part is Part.DIVERGENCE for finding in certificate.findings)


def test_bad_input_is_one_sentence() -> None:
    for texts, options, words in (
        ([], {}, "at least one prompt"),
        ([[]], {}, "prompt 0 has 0 tokens"),
        ([[1] * 64], {}, "prompt 0 has 64 tokens"),
        (TEXTS, {"batch": 0}, "batch must be 1 or more, got 0"),
        (TEXTS, {"seconds": 0.0}, "above 0, got 0.0"),
    ):
        with pytest.raises(OptionError, match=words):
            certify(healthy(), texts, WARM, **options)
    with pytest.raises(OptionError, match="lossy"):
        certify(healthy().but(rule=rule_from_spec("typical")), TEXTS, replace(WARM, seed=1))
    with pytest.raises(OptionError, match="leave out penalties"):
        certify(healthy(), TEXTS, replace(WARM, presence_penalty=0.5))


@pytest.mark.plants_failures
@pytest.mark.filterwarnings("ignore:drafter:RuntimeWarning")
@pytest.mark.parametrize(
    ("temperature", "rule", "parts"),
    [
        (0.0, "speculative", {Part.EQUALITY}),
        (1.0, "speculative", {Part.EQUALITY, Part.STATISTICAL}),
        (1.0, "speculative,lenience=0.5", {Part.DIVERGENCE}),
    ],
)
def test_a_drafter_that_gives_up_is_never_certified(temperature: float, rule: str, parts: set[Part]) -> None:
    """Whatever part meets it says so, with the drafter's name; no part ends the certificate."""
    stack = healthy().but(drafter=gives_up(), rule=rule_from_spec(rule))
    told: list[str] = []
    certificate = certify(stack, TEXTS, replace(WARM, temperature=temperature), seconds=SECONDS, announce=told.append)
    assert not certificate.issued
    for part in parts:
        told = [finding.summary for finding in certificate.failures if finding.part is part]
        assert any("prompt-lookup" in summary and "out of order" in summary for summary in told)
    assert any(finding.part is Part.INVARIANCE for finding in certificate.findings)


@pytest.mark.plants_failures
@pytest.mark.filterwarnings("ignore:drafter:RuntimeWarning")
@pytest.mark.parametrize(("temperature", "batch"), [(0.0, 1), pytest.param(0.0, 3, marks=pytest.mark.slow), (1.0, 3)])
def test_what_an_engine_got_over_keeps_a_certificate_from_being_issued(temperature: float, batch: int) -> None:
    """A drafter cannot draft for several requests at once, so the engine asks for each alone, and answers are right.

    Beside neighbours too, so at one request at a time as well.
    """
    stack = healthy().but(drafter=raising(chain(), propose=lambda batch, *_: len(batch) > 1))
    certificate = certify(stack, TEXTS, replace(WARM, temperature=temperature), batch=batch, seconds=SECONDS)
    assert not certificate.issued
    met = {Part.INVARIANCE} | ({Part.EQUALITY} if batch > 1 else set()) | ({Part.STATISTICAL} if temperature else set())
    for part in met:
        told = [finding.summary for finding in certificate.failures if finding.part is part]
        assert any("with drafter 'draft' a step or a proposal failed" in summary for summary in told), part
    for finding in certificate.findings:
        if "identical" in finding.facts:
            assert finding.facts["identical"] is True
            assert (finding.facts["recoveries"] > 0) == (finding.status is Status.FAILS)


@pytest.mark.parametrize(
    "params",
    [
        WARM,
        *(pytest.param(replace(WARM, **own), marks=pytest.mark.slow) for own in ({"temperature": 0.0}, {"seed": 1})),
    ],
)
def test_a_certificate_takes_at_most_four_times_its_time(params: SamplingParams, time: VirtualTime) -> None:
    """But for what has no clock: a batch to choose settings, some answers to count, comparisons of greedy faults."""
    time.step_s = 1.0
    certificate = certify(healthy(), TEXTS, params, batch=8, seconds=60.0)
    assert time.seconds < 4 * 60.0 + 200.0
    assert certificate.undecided and not certificate.failures and not certificate.issued
    assert certificate.verdict.startswith("NO CERTIFICATE: not enough evidence for ")
    assert certificate.as_dict()["undecided"] == [finding.name for finding in certificate.undecided]
    assert "| not enough |" in certificate.page({})


def test_a_verdict_says_first_how_many_minutes_would_do() -> None:
    few = {"smallest_detectable_tv": 2 * ENOUGH}
    blind = Finding(Part.STATISTICAL, "tokens", Status.NOT_ENOUGH, "too few", few)
    unknown = Finding(Part.CONTROLS, "a fault", Status.NOT_ENOUGH, "no time")
    report = Report("Certificate", [blind, unknown], "greedy", seconds=90.0)  # half the size takes four times as long
    words = "not enough evidence for 2 of 2 checks, give about --minutes 6: tokens, control: a fault"
    assert report.verdict == f"NO CERTIFICATE: {words} (greedy)"
    assert "--minutes" not in Report("Certificate", [unknown], "greedy", seconds=90.0).verdict


def test_the_worst_stack_still_has_a_report() -> None:
    """Whatever numbers it comes to, JSON knows them."""
    broken = healthy().but(rule=faults.accepts_always(SpeculativeSampling()), drafter=PromptLookup(min_ngram=1))
    certificate = certify(broken, TEXTS, WARM, seconds=1.0)
    assert not certificate.issued
    json.dumps(certificate.as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("params", "step_s", "issued"),
    [
        pytest.param(WARM, 0.02, True, id="sampled"),
        pytest.param(replace(WARM, temperature=0.0), 0.2, False, id="greedy, slow"),
        pytest.param(replace(WARM, seed=1), 0.2, False, id="seeded, slow"),
    ],
)
def test_the_time_holds_and_says_before_what_it_can_show(
    time: VirtualTime, params: SamplingParams, step_s: float, issued: bool
) -> None:
    """Within a tenth, where a step takes so long that nearly nothing can be seen by then, too."""
    time.step_s = step_s
    said: list[str] = []
    report = certify(healthy(), TEXTS, params, batch=3, seconds=60.0, most_seconds=60.0, announce=said.append)
    assert report.seconds <= 66.0
    assert not report.failures
    (sentence,) = said
    assert " tokens a second are answered " in sentence and "in 1.0 minutes about " in sentence
    if params.greedy:
        return
    assert report.issued is issued
    assert ("which is enough for a verdict" in sentence) is issued
    if not issued:
        assert float(sentence.split("about --minutes ")[1]) > 2.0


@pytest.mark.slow
def test_members_of_a_portfolio_share_what_is_left_for_their_states(time: VirtualTime) -> None:
    time.step_s = 0.02
    stack = healthy().but(drafter=Portfolio([DraftModel(markov(0, astray=1.0), 3), PromptLookup()]))
    report = certify(stack, TEXTS, WARM, batch=3, seconds=60.0, most_seconds=60.0)
    states = [finding for finding in report.findings if finding.part is Part.DRAFT_STATE]
    assert len(states) == 2 and not any(finding.status is Status.NOT_ENOUGH for finding in states)
    assert report.issued, report.verdict


def test_a_model_that_loads_slowly_is_not_loaded_again_and_has_its_seconds_otherwise() -> None:
    def load() -> Stack:
        raise AssertionError("it was loaded")

    slow, quick = EqualityInFloat32(load, 30.0, 60.0), EqualityInFloat32(load, 15.0, 60.0)
    assert (slow.extra_s, quick.extra_s) == (0.0, 15.0)
    (finding,) = slow.run(Context(healthy(), TEXTS, WARM, seconds=3.0, ends=common.now() + 3.0))
    assert finding.status is Status.DOES_NOT_APPLY and "about --minutes 1.5" in finding.summary
