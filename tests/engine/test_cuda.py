"""The same code on a CUDA device. Skipped, visibly, where there is none."""

from __future__ import annotations

import pytest
import torch

from support.tiny_models import COUNT, FAMILIES, PROMPTS, reference, stock
from truedraft import Engine, SamplingParams
from truedraft.core.noise import gumbel_of
from truedraft.drafters import DraftModel, PromptLookup
from truedraft.models.huggingface import HuggingFaceModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on(device: str, family: str, dtype: torch.dtype = torch.float32) -> HuggingFaceModel:
    return HuggingFaceModel(stock(family, dtype=dtype).to(device), None, family)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_those_of_transformers(family: str) -> None:
    target = on("cuda", family)
    expected = [list(tokens) for tokens in reference(family)]
    prompts = [list(prompt) for prompt in PROMPTS]
    for drafter in (None, PromptLookup(), DraftModel(target, 3), DraftModel(target, branching=(3, 2, 1))):
        answers = Engine(target, drafter, controller="fixed").generate(prompts, SamplingParams(max_tokens=COUNT))
        assert [answer.token_ids for answer in answers] == expected


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}, {"temperature": 0.8, "seed": 5}])
def test_draft_and_target_may_live_on_different_devices(options: dict[str, float]) -> None:
    target = on("cuda", "llama")
    for draft in (on("cpu", "llama"), on("cuda", "llama")):
        answer = Engine(target, DraftModel(draft, 3), controller="fixed").generate(
            list(PROMPTS[0]), SamplingParams(max_tokens=40, **options)
        )
        assert answer.warnings == ()
        assert answer.stats.draft_acceptance_rate > 0.9


def test_noise_has_the_same_bits() -> None:
    ids = torch.arange(100_000)
    host, device = gumbel_of(12345, ids), gumbel_of(12345, ids.cuda()).cpu()
    # The integers are equal; the logarithm may differ in its last bit.
    assert torch.allclose(host, device, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_bfloat16_answers_do_not_depend_on_speculation(options: dict[str, float]) -> None:
    target = on("cuda", "llama", torch.bfloat16)
    params = SamplingParams(max_tokens=200, **options)
    prompts = [list(prompt) for prompt in PROMPTS]
    plain = [answer.token_ids for answer in Engine(target).generate(prompts, params)]
    for drafter in (DraftModel(target, 3), DraftModel(target, branching=(3, 2, 1))):
        assert [
            a.token_ids for a in Engine(target, drafter, max_batch=3, controller="fixed").generate(prompts, params)
        ] == plain
