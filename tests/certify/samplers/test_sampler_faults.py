"""Samplers with a known fault are found and named; sound ones raise no alarm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from certify.samplers.own_samplers import FAULTS, by_blocks, sampler, token_by_token
from truedraft.certify import Finding, Part, Report, Status
from truedraft.certify.samplers import DEPENDENT, UNKNOWN, Sampler, certify_sampler
from truedraft.certify.samplers.worlds import joint_of, sampler_worlds, suspects

LONG = 1e6  # seconds: rows end these runs, not time
FEW = sampler_worlds()[::4]
SOUND = {"token by token": token_by_token, "by blocks": by_blocks}


def certified(own: Sampler, rows: int = 200, seed: int = 0) -> Report:
    return certify_sampler(own, seconds=LONG, rows=rows, seed=seed)


def named(found: Report) -> Finding:
    """What is said of all worlds together."""
    return found.findings[0]


def planted_variation(fault: str, detail: str) -> float:
    """The total variation of a named fault, in closed form, averaged over worlds."""
    planted = next(each for each in suspects() if (each.name, each.detail) == (fault, detail))
    worlds = sampler_worlds()
    return sum(float((joint_of(planted, world) - world.joint).abs().sum()) / 2.0 for world in worlds) / len(worlds)


@pytest.mark.parametrize("runs", [10, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SOUND)
def test_sound_samplers_raise_no_alarm(name: str, runs: int) -> None:
    """An e-value of 1,000 comes up in one of a thousand sound ones, at most; seeds are fixed."""
    for seed in range(runs):
        found = certify_sampler(sampler(SOUND[name]), seconds=LONG, rows=40, worlds=FEW, seed=seed)
        assert len(found.facts["runs"]) == 1
        assert found.facts["runs"][0]["rows_to"] == {"1e3": None, "1e6": None}
        assert "fault" not in named(found).facts


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_sampler_is_lossless_where_enough_was_seen(name: str) -> None:
    found = certified(sampler(SOUND[name]), rows=30_000)
    assert named(found).status is Status.HOLDS
    assert found.facts["runs"][0]["log10_e"] < 0.0
    assert named(found).facts["smallest_detectable_tv"] <= 0.05
    assert len([each for each in found.findings if each.part is Part.WORLDS]) == 1 + len(sampler_worlds())
    if name == "by blocks":  # it keeps more, and that is no fault
        assert found.facts["accepted"] > found.facts["accepted_by_rule"] + 0.01
    else:
        assert found.facts["accepted"] == pytest.approx(found.facts["accepted_by_rule"], abs=0.005)


def test_half_precision_is_not_called_faulty() -> None:
    def rounds(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor) -> Tensor:
        return token_by_token(draft_tokens, draft_probs.bfloat16(), target_probs.bfloat16(), uniforms)

    found = certified(Sampler.of(rounds, "rounds"), rows=4_000)
    assert found.facts["runs"][0]["rows_to"]["1e3"] is None
    assert "fault" not in named(found).facts


@pytest.mark.parametrize(("fault", "detail"), FAULTS)
def test_a_fault_is_found_and_named(fault: str, detail: str) -> None:
    found = certified(FAULTS[fault, detail])
    assert named(found).status is Status.FAILS
    assert (named(found).facts["fault"], named(found).facts["detail"]) == (fault, detail)
    assert named(found).facts["log10_over_next"] > 1.0
    assert len(found.facts["runs"]) == 2
    for run in found.facts["runs"]:
        assert run["rows_to"]["1e3"] is not None and run["tokens_to"]["1e6"] is not None
        assert run["rows_to"]["1e3"] <= (run["rows_to"]["1e6"] or 0) <= run["rows"]
        assert run["tokens_to"]["1e3"] is not None
        if planted_variation(fault, detail) >= 0.06:
            assert run["tokens_to"]["1e3"] <= 3_000
        assert run["log10_e"] > 3.0


def test_few_rows_are_not_enough_evidence() -> None:
    found = certified(sampler(), rows=20)
    assert named(found).status is Status.NOT_ENOUGH
    assert named(found).facts["smallest_detectable_tv"] > 0.05


def test_a_deviation_that_does_not_repeat_is_none() -> None:
    """A sampler that is wrong in its first calls alone, which are enough: two in each world."""
    calls, first = 0, 2 * len(sampler_worlds())

    def recovers(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        wrong = {"accept": lambda p, q: torch.ones_like(p)} if calls <= first else {}
        return token_by_token(draft_tokens, draft_probs, target_probs, uniforms, **wrong)

    found = certified(Sampler.of(recovers, "recovers"))
    assert named(found).status is Status.NOT_ENOUGH
    assert [run["rows_to"]["1e6"] is not None for run in found.facts["runs"]] == [True, False]


def test_rows_that_share_their_noise_are_found() -> None:
    def one_row(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
        batch, k = draft_tokens.shape
        uniforms = torch.rand(1, 2 * k + 1, dtype=torch.float64).expand(batch, -1)
        return token_by_token(draft_tokens, draft_probs, target_probs, uniforms)

    def one_seed(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
        torch.manual_seed(0)
        uniforms = torch.rand(len(draft_tokens), 2 * draft_tokens.shape[1] + 1, dtype=torch.float64)
        return token_by_token(draft_tokens, draft_probs, target_probs, uniforms)

    for own, detail in ((one_row, "neighbouring rows"), (one_seed, "calls repeat")):
        found = certified(Sampler.of(own, own.__name__))
        assert named(found).status is Status.FAILS
        assert named(found).facts["fault"] == DEPENDENT
        assert detail in named(found).facts["detail"]


def test_what_is_no_known_fault_is_not_called_one() -> None:
    """Ids are turned round: the last for the first."""

    def reversed_ids(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor) -> Tensor:
        out = token_by_token(draft_tokens, draft_probs, target_probs, uniforms)
        return torch.where(out < 0, out, draft_probs.shape[-1] - 1 - out)

    found = certified(Sampler.of(reversed_ids, "reversed"))
    assert named(found).status is Status.FAILS
    assert named(found).facts["fault"] == UNKNOWN
    assert any("target probability 0" in note for note in named(found).facts["notes"])
    assert any("not drafted" in note for note in named(found).facts["notes"])


def test_going_on_behind_a_rejected_token_is_told() -> None:
    def keeps_the_rest(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor) -> Tensor:
        out = token_by_token(draft_tokens, draft_probs, target_probs, uniforms)
        lengths = (out >= 0).sum(-1, keepdim=True)
        places = torch.arange(out.shape[1])
        return torch.where(places < lengths, out, torch.nn.functional.pad(draft_tokens, (0, 1), value=-1))

    found = certified(Sampler.of(keeps_the_rest, "keeps the rest"))
    assert named(found).status is Status.FAILS
    assert any("go on behind a token that was not drafted" in note for note in named(found).facts["notes"])


def test_runs_are_a_function_of_their_seed() -> None:
    own = sampler()
    first, again, other = (certified(own, rows=20, seed=seed) for seed in (3, 3, 4))
    assert first.facts == again.facts and first.findings == again.findings
    assert not math.isclose(first.facts["runs"][0]["log10_e"], other.facts["runs"][0]["log10_e"])
