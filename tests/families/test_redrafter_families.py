"""ReDrafter on real architectures: greedy answers equal transformers' own, whatever the head drafts."""

from __future__ import annotations

from functools import cache

import pytest

from support.head_models import random_redrafter
from support.pairwise import by_turns
from support.tiny_models import FAMILIES, PROMPTS, packed, reference, stock
from truedraft import Engine, SamplingParams
from truedraft.core.stats import Counters
from truedraft.drafters import Redrafter
from truedraft.models.backends.base import BackendMaker
from truedraft.models.backends.stock import StockBackend
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import fastest_backend
from truedraft.models.padding import PaddedSize, pad_model

COUNT = 64
PARAMS = SamplingParams(max_tokens=COUNT)
SIZES = {"chain": (1, 3, 3), "beams": (6, 3, 12), "wide": (24, 2, 40)}  # beams, length, nodes

target = cache(packed)


def expected(family: str) -> list[tuple[int, ...]]:
    """Transformers' own greedy answers to PROMPTS."""
    return [answer[:COUNT] for answer in reference(family)]


def drafter_for(model: HuggingFaceModel, sizes: str, **options: int | bool) -> Redrafter:
    """A head of random weights: right by chance alone, the more often the more it drafts."""
    beams, length, nodes = SIZES[sizes]
    return Redrafter(random_redrafter(model, **options), beams=beams, length=length, nodes=nodes)


@pytest.mark.parametrize(("family", "sizes"), by_turns(FAMILIES, SIZES, always=["beams"]))
def test_greedy_equals_transformers(family: str, sizes: str) -> None:
    engine = Engine(target(family), drafter_for(target(family), sizes), controller="fixed")
    batch = engine.generate([list(prompt) for prompt in PROMPTS], PARAMS)
    assert [tuple(answer.token_ids) for answer in batch] == expected(family)
    assert not any(answer.warnings for answer in batch)
    if family == "llama":  # of all families' rows `test_packed_forward` says that they do not hang on their neighbours
        alone = engine.generate(list(PROMPTS[0]), PARAMS)
        assert alone.token_ids == batch[0].token_ids and not alone.warnings
        assert alone.stats == batch[0].stats, "what is drafted depends on the neighbours"
    total = sum((answer.stats for answer in batch), Counters())
    assert total.draft_tokens > len(PROMPTS) * COUNT
    assert sizes != "wide" or 0 < total.accepted_tokens < total.draft_tokens


@pytest.mark.parametrize(
    ("family", "options"), by_turns(["llama", "gemma3", "gpt2"], [{"rnn": False}, {"layers": 0}, {"tied": False}])
)
def test_every_kind_of_head_changes_no_answer(family: str, options: dict[str, int | bool]) -> None:
    if "rnn" in options:  # then the state is a sum of embeddings
        options = options | {"state": target(family).head_width}
    engine = Engine(target(family), drafter_for(target(family), "wide", **options), controller="fixed")
    answers = engine.generate([list(prompt) for prompt in PROMPTS], PARAMS)
    assert [tuple(answer.token_ids) for answer in answers] == expected(family)
    assert sum(answer.stats.accepted_tokens for answer in answers) > 0


@pytest.mark.parametrize(("padded", "backend"), by_turns([True, False], [fastest_backend, StockBackend]))
def test_padded_and_fast_targets_draft_alike(padded: bool, backend: BackendMaker) -> None:
    head = random_redrafter(target("llama"))
    module = pad_model(stock("llama"), PaddedSize("1M", layers=3, width=512, inner=512)) if padded else stock("llama")
    engine = Engine(
        HuggingFaceModel(module, None, "ours", backend),
        Redrafter(head, beams=24, length=2, nodes=40),
        controller="fixed",
    )
    answers = engine.generate([list(prompt) for prompt in PROMPTS], PARAMS)
    assert [tuple(answer.token_ids) for answer in answers] == expected("llama")
    assert sum(answer.stats.accepted_tokens for answer in answers) > 0
