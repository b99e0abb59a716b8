"""Models that keep nothing which could be taken back: the whole text at every step, answers as of transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, BertConfig, PretrainedConfig

from support.tiny_models import CONTEXT, PROMPTS, VOCAB, build, stock_greedy
from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters import Drafter, DraftModel, PromptLookup
from truedraft.errors import UnsupportedModelError
from truedraft.models.backends.whole_text import WholeTextBackend
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import run_alone

COUNT = 24
_IDS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SMALL: dict[str, Any] = _IDS | {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "rwkv": ("rwkv", _SMALL | {"context_length": CONTEXT}),
    "openai-gpt": ("openai-gpt", _IDS | {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}),
    "recurrent_gemma": ("recurrent_gemma", _SMALL | {
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "lru_width": 48,
        "attention_window_size": 16}),
}  # fmt: skip


def config(family: str) -> PretrainedConfig:
    kind, sizes = FAMILIES[family]
    made: PretrainedConfig = AutoConfig.for_model(kind, **sizes)
    return made


@cache
def loaded(family: str, noise: float = 0.0) -> HuggingFaceModel:
    model = build(config(family), seed=1, spread=0.4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for weight in model.parameters():
            weight.data += noise * weight.std(unbiased=False) * torch.randn_like(weight)
    return run_alone(model, None, family, UnsupportedModelError("asked so"), WholeTextBackend)


@pytest.mark.parametrize("drafted", ["none", "prompt-lookup", "chain", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str, drafted: str) -> None:
    drafters: dict[str, Drafter | None] = {
        "none": None,
        "prompt-lookup": PromptLookup(min_ngram=1),
        "chain": DraftModel(loaded(family, 0.05), 4),
        "tree": DraftModel(loaded(family, 0.05), branching=(3, 2, 1)),
    }
    model = build(config(family), seed=1, spread=0.4)
    expected = [stock_greedy(model, prompt, COUNT) for prompt in PROMPTS]
    engine = Engine(loaded(family), drafters[drafted], controller="fixed")
    answers = engine.generate([list(prompt) for prompt in PROMPTS], SamplingParams(max_tokens=COUNT))
    assert [answer.token_ids for answer in answers] == expected
    assert not any(answer.warnings for answer in answers) and not engine.check_idle()
    assert "whole text again" in str(loaded(family).note) and "asked so" in str(loaded(family).note)


def test_a_folder_of_such_a_model_loads(tmp_path: Any) -> None:
    build(config("openai-gpt"), seed=1).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32")
    assert "the whole text again" in str(model.note)
    assert Engine(model).generate([5, 6, 7], SamplingParams(max_tokens=4)).token_ids


def test_rows_that_see_later_tokens_are_refused() -> None:
    encoder = build(BertConfig(**_SMALL, num_attention_heads=4), seed=1, spread=0.4)
    with pytest.raises(UnsupportedModelError, match="asked so") as caught:
        run_alone(encoder, None, "bert", UnsupportedModelError("asked so"), WholeTextBackend)
    assert "later ones" in str(caught.value.__cause__)
