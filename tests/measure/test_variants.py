"""Variants one behind another, and what no variant is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from truedraft import load_model
from truedraft.measure import doctor
from truedraft.measure.doctor import Prompt, Replayed, _answered, _seen_at_once, replay
from truedraft.measure.variants import case_of, examined

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
