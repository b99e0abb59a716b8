"""The doctor: variants one behind another, what no variant is, and differences between two ways on the same prompts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from truedraft import load_model
from truedraft.core.intervals import sign_flips
from truedraft.core.theory import holm
from truedraft.measure import doctor
from truedraft.measure.doctor import LEAST_PROMPTS, Prompt, Replayed, _answered, _seen_at_once, replay, tokens_gained
from truedraft.measure.variants import case_of, examined, examined_words

TEXTS = [f"def f{number}(x):\n    return" for number in range(12)]


def test_prompts_are_written_otherwise_behind_other_vectors() -> None:
    target = load_model("embedded:target", dtype="bfloat16")
    _, case = case_of("embedded:redrafter", target)
    assert target.tokenizer is not None
    prompts = [Prompt(text, text, tuple(target.tokenizer.encode(text))) for text in TEXTS]
    case = _answered(case, prompts, 6, 0.0)
    made = {each.name: each.make for each in examined("redrafter").variants}
    raw = made["vector before the final norm"](case).better
    wide = made["float32"](raw).better
    for trace in (*wide.seen(), *made["first token (BOS) there or not"](wide).given.seen()):
        for step in trace.seen:
            assert step.hidden is not None and step.hidden.dtype is torch.float32
            torch.testing.assert_close(step.hidden, step.layers[-1].float(), rtol=0, atol=0)
    pair = made["first token (BOS) there or not"](wide)
    assert [len(each.traces) for each in pair] == [24, 24, 12]
    assert replay(pair.given).tokens_per_call.value >= 1.0


@pytest.mark.parametrize(("calls", "faults"), [(10, []), (13, ["other ids"])])
def test_a_weak_draft_is_not_said_to_read_other_ids(
    calls: int, faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its ids exchanged it loses little; where some of its tokens are accepted, its ids are right all the same."""
    target = load_model("embedded:target")
    _, case = case_of("draft:embedded:draft", target)
    monkeypatch.setattr(doctor, "_losses", lambda case, exchanged=None: np.full(12, 5.0 if exchanged is None else 5.4))
    replayed = Replayed(np.ones(12), np.full(12, 13.0), np.full(12, float(calls)), (0.1,))
    assert [each.name for each in _seen_at_once(case, replayed)] == faults


def test_flipped_signs_are_those_of_all_signs() -> None:
    """Ten differences have 1,024 signs, which can be summed one by one."""
    for seed in range(4):
        own = np.random.default_rng(seed).normal(0.4, 1.0, 10)
        sums = np.array([signs @ own for signs in itertools.product((-1, 1), repeat=10)])
        assert sign_flips(own) == pytest.approx((sums >= own.sum() - 1e-9).mean(), abs=0.015)
    assert sign_flips(np.zeros(10)) == 1.0
    assert sign_flips(np.ones(14)) < 0.001 and sign_flips(-np.ones(14)) > 0.999


def test_as_good_a_way_is_hardly_ever_called_better() -> None:
    """Of 16 variants that are as good, by skewed differences as those of few long runs, over many examinations."""
    noise = np.random.default_rng(1)
    alarms = 0
    for _ in range(60):
        own = noise.exponential(1.0, (16, 14)) * noise.integers(0, 2, (16, 14)) * noise.choice([-1, 1], (16, 14))
        alarms += min(holm([sign_flips(each) for each in own])) < 0.01
    assert alarms <= 3


def test_so_many_prompts_are_enough_for_all_variants_together() -> None:
    """A variant that is better on each of the fewest prompts is called so beside all others, and is not with fewer."""
    most = max(len(kind.variants) for kind in map(examined, examined_words()))
    enough, fewer = (holm([sign_flips(np.ones(count))] + [1.0] * (most - 1))[0] for count in (LEAST_PROMPTS, 10))
    assert enough < 0.01 < fewer


def test_a_difference_of_tokens_per_call() -> None:
    found = tokens_gained(*map(np.array, ([10.0, 20.0], [5.0, 5.0], [10.0, 10.0])))
    assert (
        found.value == pytest.approx(3.0 - 1.5) and found.low == pytest.approx(1.0) and found.high == pytest.approx(2.0)
    )
