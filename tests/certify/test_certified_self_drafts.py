"""Certificates of drafts made of the target, and the distribution of what they help to write."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from support.backends import native_backend
from support.tiny_models import PROMPTS, VOCAB, build
from support.virtual_time import VirtualTime
from truedraft import SamplingParams
from truedraft.certify import Stack, certify
from truedraft.certify.certificate import checks_of
from truedraft.drafters import from_spec
from truedraft.models.backends.native.build import built
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.verification import SpeculativeSampling

pytestmark = pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)


@pytest.fixture(scope="module")
def target() -> HuggingFaceModel:
    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "head_dim": 32}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=128, bos_token_id=None, eos_token_id=None)
    return HuggingFaceModel(build(config, seed=3, spread=0.15), None, "tiny", native_backend)


GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, seed=1)


@pytest.mark.parametrize(
    ("word", "params"),
    [
        pytest.param("self:int8", GREEDY, id="int8, greedy"),
        pytest.param("self:int4", SAMPLED, id="int4, sampled", marks=pytest.mark.slow),
        pytest.param("self:int8", SEEDED, id="int8, seeded"),
        pytest.param("self:int4", GREEDY, id="int4, greedy", marks=pytest.mark.slow),
        pytest.param("self:int8", SAMPLED, id="int8, sampled", marks=pytest.mark.slow),
        pytest.param("self:int4", SEEDED, id="int4, seeded", marks=pytest.mark.slow),
    ],
)
def test_a_certificate_finds_no_fault(
    target: HuggingFaceModel, word: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampled one may lack evidence in so few steps; greedy and seeded answers are all compared."""
    VirtualTime(monkeypatch, step_s=0.002 if params.greedy else 0.01)
    stack = Stack(target, from_spec(f"{word},num_speculative_tokens=3", target), SpeculativeSampling())
    certificate = certify(stack, [list(prompt) for prompt in PROMPTS], params, batch=2, seconds=1.0)
    assert not certificate.failures, [finding.summary for finding in certificate.failures]
    assert {finding.part for finding in certificate.findings} == {check.part for check in checks_of(stack, params)}
    if params.greedy:
        assert certificate.issued
