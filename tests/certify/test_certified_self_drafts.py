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


@pytest.mark.parametrize("word", ["self:int8", "self:int4"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=24, temperature=0.8),
        SamplingParams(max_tokens=24, temperature=0.8, seed=1),
    ],
    ids=["greedy", "sampled", "seeded"],
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
