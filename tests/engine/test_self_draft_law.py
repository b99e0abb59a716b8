"""The distribution of answers that the target drafts for itself, as in `test_distribution_of_the_pipeline`.

With fewer answers a correct pipeline fails with probability below 1e-6; a target whose draft's own
distribution came through is caught, as is shown.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_distribution_of_the_pipeline import BATCH, FALSE_ALARM, counts_of, exact_dist, p_value
from transformers import LlamaConfig

from support.backends import native_backend
from support.broken_rules import AcceptsAlways
from support.tiny_models import build
from truedraft import Engine
from truedraft.drafters import from_spec
from truedraft.models.backends.native.build import built
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.verification import Rule, SpeculativeSampling

pytestmark = pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)
ANSWERS, FEWER = 47 * BATCH, 16 * BATCH


@pytest.fixture(scope="module")
def target() -> HuggingFaceModel:
    """Three tokens, two layers, of sizes that the native forward is for."""
    sizes = {"vocab_size": 3, "hidden_size": 16, "intermediate_size": 32, "head_dim": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 32}
    config = LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return HuggingFaceModel(build(config, 5, spread=0.25), None, "three tokens", native_backend)


@pytest.fixture(scope="module")
def dist(target: HuggingFaceModel) -> np.ndarray:
    return exact_dist(target).numpy()


def chance(target: HuggingFaceModel, word: str, rule: Rule, dist: np.ndarray, answers: int) -> float:
    drafter = from_spec(f"{word},num_speculative_tokens=3", target)
    return p_value(counts_of(Engine(target, drafter, rule, max_batch=BATCH + 3, controller="fixed"), answers), dist)


@pytest.mark.parametrize("word", [pytest.param("self:int8", marks=pytest.mark.slow), "self:int4"])
def test_sampled_answers_follow_the_target(target: HuggingFaceModel, dist: np.ndarray, word: str) -> None:
    assert (dist > 0.001).sum() >= 12
    assert chance(target, word, SpeculativeSampling(), dist, ANSWERS) > FALSE_ALARM


def test_a_drafts_own_distribution_would_be_caught(target: HuggingFaceModel, dist: np.ndarray) -> None:
    assert chance(target, "self:int4", AcceptsAlways(), dist, FEWER) < FALSE_ALARM
