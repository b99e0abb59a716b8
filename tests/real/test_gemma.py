"""Gemma 3 270M: sliding windows, a vocabulary of 262,144, codes of several kinds in one file."""

from __future__ import annotations

import pytest

from support.real_models import GEMMA, assert_answers_as_transformers
from truedraft import Engine, SamplingParams, load_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not GEMMA.is_file(), reason=f"{GEMMA.name} is not here: make test-slow fetches it"),
]
TEXT = "The sky is blue because the molecules of the air scatter light of short wavelengths"


def test_its_weights_answer_as_transformers_reads_them() -> None:
    ids = load_model(GEMMA).tokenizer.encode(TEXT)  # type: ignore[union-attr]
    assert_answers_as_transformers(GEMMA, [ids], max_tokens=24, most_kl=0.02)


def test_drafts_change_nothing() -> None:
    model = load_model(GEMMA)
    plain, drafted = Engine(model), Engine(model, "prompt-lookup", controller="fixed")
    params = SamplingParams(max_tokens=48)
    found = drafted.generate(TEXT, params)
    assert found.token_ids == plain.generate(TEXT, params).token_ids
    assert found.stats.draft_tokens > 0
