"""Small random models of several families, the same weights each time, and what transformers makes of them.

Weights are drawn far wider than models are initialised, so that greedy answers wander: an answer that repeats one
token would hide a broken cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from truedraft.drafters import Drafter, DraftModel, PromptLookup
from truedraft.errors import UnsupportedModelError
from truedraft.models.backends.encoder_decoder import EncoderDecoderBackend
from truedraft.models.base import LanguageModel
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import run_alone

VOCAB = 97
CONTEXT = 256
WINDOW = 8

_NO_SPECIAL_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL: dict[str, Any] = _NO_SPECIAL_IDS | {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2, "intermediate_size": 64}
VECTORS: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
"""Sizes of whole vectors, which the native forward takes."""
_COMMON = SMALL | {"max_position_embeddings": CONTEXT}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "intermediate_size": 64, "num_key_value_heads": 2}


def llama(**sizes: Any) -> LlamaConfig:
    """A Llama of some sizes, of which those that are not given are small."""
    return LlamaConfig(**GROUPED | {"intermediate_size": 96, "max_position_embeddings": CONTEXT} | sizes)


def qwen3() -> PretrainedConfig:
    return Qwen3Config(**_COMMON, num_key_value_heads=2, intermediate_size=96, head_dim=16)


def gemma3() -> PretrainedConfig:
    return Gemma3TextConfig(
        **_COMMON | {"num_hidden_layers": 3},
        num_key_value_heads=2,
        intermediate_size=96,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=False,  # tied, a wide random model repeats its last token for ever
    )


def gpt2() -> PretrainedConfig:
    return GPT2Config(vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=4, n_positions=CONTEXT, **_NO_SPECIAL_IDS)


def gpt_neox() -> PretrainedConfig:
    return GPTNeoXConfig(**_COMMON, intermediate_size=96)


def mistral() -> PretrainedConfig:
    return MistralConfig(**_COMMON, num_key_value_heads=2, intermediate_size=96, sliding_window=WINDOW)


def mixtral() -> PretrainedConfig:
    return MixtralConfig(**_COMMON, **_EXPERTS, num_local_experts=4)


def qwen3_moe() -> PretrainedConfig:
    return Qwen3MoeConfig(**_COMMON, **_EXPERTS, num_experts=4, moe_intermediate_size=32, head_dim=16)


@dataclass(frozen=True)
class Family:
    """How to make a small model of a family, with a seed whose answers have no near tie (see `greedy_with_lead`)."""

    config: Callable[[], PretrainedConfig]
    seed: int = 0
    spread: float = 0.25


FAMILIES = {
    "llama": Family(llama, seed=2),
    "qwen3": Family(qwen3),
    "gemma3": Family(gemma3),
    "gpt2": Family(gpt2, seed=1, spread=0.4),
    "gpt_neox": Family(gpt_neox, seed=2, spread=0.4),
    "mistral": Family(mistral),
    "mixtral": Family(mixtral, seed=4),
    "qwen3_moe": Family(qwen3_moe, spread=0.4),
}
PROMPTS: tuple[tuple[int, ...], ...] = (
    (5, 9, 11, 3, 60, 2, 11, 3),
    tuple((7 * i * i + 3 * i + 1) % VOCAB for i in range(37)),
    (42,),
    tuple((13 * i + 5) % VOCAB for i in range(19)),
)
"""Ragged: 8, 37, 1 and 19 tokens."""
COUNT = 128
"""Tokens of a reference answer."""


def stock(family: str, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The family's model as transformers runs it; the same weights at each call."""
    return build(FAMILIES[family].config(), FAMILIES[family].seed, FAMILIES[family].spread, dtype)


def build(
    config: PretrainedConfig,
    seed: int,
    spread: float = 0.25,
    dtype: torch.dtype = torch.float32,
    *,
    encodes: bool = False,
) -> PreTrainedModel:
    """A model with random weights; vectors (norms, biases) are moved away from 0 and 1 too."""
    config.initializer_range = spread
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM
        model = kind.from_config(config, attn_implementation="eager")
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.data += 0.1 * torch.randn_like(weight)
    return model.to(dtype).eval()


def packed(family: str, *, dtype: torch.dtype = torch.float32) -> HuggingFaceModel:
    """The family's model behind our contract."""
    return HuggingFaceModel(stock(family, dtype=dtype), None, family)


def encoder_decoder(model: PreTrainedModel, name: str) -> HuggingFaceModel:
    """An encoder-decoder as `load_model` makes it, checked."""
    return run_alone(model, None, name, UnsupportedModelError("asked so"), EncoderDecoderBackend)


def with_noise(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """A model with noise added to its weights, in units of their spread: a draft that often, not always, agrees."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for weight in model.parameters():
            weight.data += noise * weight.std(unbiased=False) * torch.randn_like(weight)
    return model


def noisy_stock(family: str, noise: float) -> PreTrainedModel:
    """The family's model with noise added to its weights, as transformers runs it."""
    return with_noise(stock(family), noise)


def noisy(family: str, noise: float) -> HuggingFaceModel:
    """A draft that often, not always, agrees with the family's model: its weights with noise added."""
    return HuggingFaceModel(noisy_stock(family, noise), None, f"{family}+noise")


@torch.inference_mode()
def stock_greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers' own generation answers."""
    ids = torch.tensor([list(prompt)])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


@cache
def reference_with_lead(family: str, count: int = COUNT) -> tuple[tuple[tuple[int, ...], ...], float]:
    """Transformers' greedy answers to PROMPTS, and the smallest lead of a chosen token over the next."""
    answers, lead = greedy_with_lead(stock(family), count)
    return tuple(map(tuple, answers)), lead


def reference(family: str, count: int = COUNT) -> tuple[tuple[int, ...], ...]:
    """Transformers' greedy answers to PROMPTS."""
    return reference_with_lead(family, count)[0]


@torch.inference_mode()
def stock_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Logits `[tokens, vocab]` of one text alone, without a cache."""
    logits: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def greedy_with_lead(model: PreTrainedModel, count: int = COUNT) -> tuple[list[list[int]], float]:
    """Transformers' greedy answers to PROMPTS, and the smallest lead of a chosen token over the next.

    Rounding of float32 moves logits by about 1e-5, so below 1e-3 a divergence may be a near tie, not a fault.
    """
    answers, lead = [stock_greedy(model, prompt, count) for prompt in PROMPTS], torch.inf
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        top = stock_logits(model, [*prompt, *answer])[len(prompt) - 1 : -1].topk(2, dim=-1).values
        lead = min(lead, float((top[:, 0] - top[:, 1]).min()))
    return answers, lead


DRAFTED = ("none", "prompt-lookup", "chain", "tree")


def drafter_of(word: str, draft: LanguageModel) -> Drafter | None:
    """One of DRAFTED. Siblings at two depths are the smallest tree whose wrong paths differ from the right ones."""
    if word == "prompt-lookup":
        return PromptLookup(min_ngram=1)
    sizes: dict[str, Any] = {"chain": {"num_speculative_tokens": 4}, "tree": {"branching": (2, 2)}}
    return DraftModel(draft, **sizes[word]) if word in sizes else None
