"""The same code on a CUDA device. Skipped, visibly, where there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.answers import fixed
from support.eagle_reference import random_eagle
from support.head_models import random_heads, random_redrafter
from support.layer_heads import as_transformers_runs_it, random_head
from support.tiny_models import CONTEXT, COUNT, FAMILIES, PROMPTS, VOCAB, reference, stock
from truedraft import Engine, SamplingParams
from truedraft.core.noise import gumbel_of
from truedraft.drafters import DFlash, Drafter, DraftModel, DSpark, Eagle3, Medusa, PromptLookup, Redrafter
from truedraft.kinds.block.module import BlockConfig, DFlashHead, DSparkHead
from truedraft.kinds.dflash2.drafter import DFlash2
from truedraft.kinds.dflash2.module import DFlash2Config, DFlash2Head
from truedraft.kinds.eagle.module import Eagle3Config
from truedraft.models.backends.graphs import GraphBackend
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import fastest_backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on(device: str, family: str, dtype: torch.dtype = torch.float32) -> HuggingFaceModel:
    return HuggingFaceModel(stock(family, dtype=dtype).to(device), None, family)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_those_of_transformers(family: str) -> None:
    target = on("cuda", family)
    expected = [list(tokens) for tokens in reference(family)]
    prompts = [list(prompt) for prompt in PROMPTS]
    for drafter in (None, PromptLookup(), DraftModel(target, 3), DraftModel(target, branching=(3, 2, 1))):
        answers = fixed(target, drafter).generate(prompts, SamplingParams(max_tokens=COUNT))
        assert [answer.token_ids for answer in answers] == expected


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}, {"temperature": 0.8, "seed": 5}])
def test_draft_and_target_may_live_on_different_devices(options: dict[str, float]) -> None:
    target = on("cuda", "llama")
    for draft in (on("cpu", "llama"), on("cuda", "llama")):
        answer = fixed(target, DraftModel(draft, 3)).generate(
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
        answers = fixed(target, drafter, max_batch=3).generate(prompts, params)
        assert [answer.token_ids for answer in answers] == plain


def _heads(kind: str, target: HuggingFaceModel) -> Drafter:
    sizes: dict[str, Any] = {
        "block": 4, "mask_id": 96, "depth": 2, "heads": 4, "kv_heads": 2, "head": 16, "inner": 64,
        "most_positions": CONTEXT,
    }  # fmt: skip
    block, flash2 = BlockConfig(48, VOCAB, (0, 1), **sizes), DFlash2Config(48, VOCAB, (0, 1), **sizes, rank=8)
    spark = replace(block, from_anchor=True, markov=8, block=3)
    made: dict[str, Callable[[], Drafter]] = {
        "medusa": lambda: Medusa(random_heads(target), nodes=7),
        "redrafter": lambda: Redrafter(random_redrafter(target), nodes=7),
        "eagle": lambda: Eagle3(
            random_eagle(
                Eagle3Config(48, VOCAB, (0, 1), heads=4, kv_heads=2, head=16, inner=64, reach=3, most_positions=CONTEXT)
            ),
            nodes=7,
        ),
        "dflash": lambda: DFlash(random_head(DFlashHead, block), nodes=7),
        "dflash2": lambda: DFlash2(random_head(DFlash2Head, flash2), nodes=7),
        "dspark": lambda: DSpark(random_head(DSparkHead, spark), nodes=7),
    }
    return made[kind]()


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", ["medusa", "redrafter", "eagle", "dflash", "dflash2", "dspark"])
def test_heads_draft_beside_recorded_forwards(kind: str, options: dict[str, float]) -> None:
    """Also those that read layers: CUDA graphs show them."""
    module = as_transformers_runs_it().to("cuda")  # type: ignore[arg-type]
    target = HuggingFaceModel(module, None, "tiny", fastest_backend)
    assert isinstance(target._backend, GraphBackend)
    prompts, params = [list(prompt) for prompt in PROMPTS], SamplingParams(max_tokens=40, **options)
    plain = Engine(target).generate(prompts, params)
    answers = fixed(target, _heads(kind, target)).generate(prompts, params)
    assert [each.token_ids for each in answers] == [each.token_ids for each in plain]
    assert all(each.warnings == () and each.stats.draft_tokens > 0 for each in answers)
