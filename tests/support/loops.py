"""Sizes of decoders that loops over fused layers run, forwards of every shape, and how far results may be apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from support.tiny_models import GROUPED, WINDOW, build
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.models import HuggingFaceModel, Segment
from truedraft.models.cache import RequestCache

SMALL = GROUPED | {
    "hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 96, "max_position_embeddings": 512
}  # fmt: skip


def rope(kind: str, **options: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "grouped heads": lambda: LlamaConfig(**SMALL),
    "a key head for each": lambda: LlamaConfig(**SMALL | {"num_key_value_heads": 4}),
    "one key head": lambda: LlamaConfig(**SMALL | {"num_key_value_heads": 1}),
    "one head": lambda: LlamaConfig(**SMALL | {"num_key_value_heads": 1, "num_attention_heads": 1}),
    "biases": lambda: LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "wide heads": lambda: LlamaConfig(**SMALL, head_dim=64),
    "odd sizes": lambda: LlamaConfig(**SMALL | {"hidden_size": 44, "intermediate_size": 90}, head_dim=14),
    "tied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gelu": lambda: LlamaConfig(**SMALL, hidden_act="gelu"),
    "gelu by tanh": lambda: LlamaConfig(**SMALL, hidden_act="gelu_pytorch_tanh"),
    "relu": lambda: LlamaConfig(**SMALL, hidden_act="relu"),
    "no activation": lambda: LlamaConfig(**SMALL, hidden_act="linear"),
    "rope llama3": lambda: LlamaConfig(
        **SMALL,
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "rope linear": lambda: LlamaConfig(**SMALL, **rope("linear", factor=4.0)),
    "rope yarn": lambda: LlamaConfig(**SMALL, **rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=None),
    "mistral with a window": lambda: MistralConfig(**SMALL, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "qwen2 with a window from the second layer on": lambda: Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=64),
    "qwen3, tied, with biases": lambda: Qwen3Config(
        **SMALL, head_dim=32, attention_bias=True, tie_word_embeddings=True
    ),
    "phi3, with a window": lambda: Phi3Config(**SMALL, sliding_window=WINDOW),
    "phi3, part of a head rotated": lambda: Phi3Config(
        **SMALL, head_dim=64, **rope("default", partial_rotary_factor=0.5)
    ),
    "glm": lambda: GlmConfig(**SMALL, head_dim=64, attention_bias=True, **rope("default", partial_rotary_factor=0.5)),
    "glm4": lambda: Glm4Config(**SMALL, head_dim=64, **rope("default", partial_rotary_factor=0.5)),
    "gemma3": lambda: Gemma3TextConfig(
        **SMALL,
        head_dim=32,
        query_pre_attn_scalar=20,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
TREE = TreeShape((-1, 0, 0, 1, 2, 2, 4))
"""A root token and below it 6 nodes with the leaves 3, 5 and 6; the path 0, 2, 4, 6 skips two of them."""
LARGE_TREE = TreeShape((-1, 0, 0, *range(1, 69)))
"""71 nodes: two branches in turns, more than one number of 64 bits tells about."""


def weights(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model with its random weights, wide enough for attention to be far from even."""
    return build(CONFIGS[name](), seed=0, spread=0.15, dtype=dtype)


def run_forwards(model: HuggingFaceModel, layers: Sequence[int] = ()) -> tuple[Tensor, ...]:
    """All rows of prefills, chains and trees, mixed and alone, by levels; pages that change hands and become more.

    Returns:
        Logits `[rows, vocab]`, vectors before the head and what some layers give, `[rows, width]`; float64, on the CPU.
    """
    generator = torch.Generator().manual_seed(5)
    outputs: list[tuple[Tensor, ...]] = []

    def drawn(count: int) -> Tensor:
        return torch.randint(model.vocab_size, (count,), generator=generator).to(model.device)

    def forward(*segments: Segment) -> None:
        output = model.forward_showing(segments, layers) if layers else model.forward(segments)
        outputs.append(tuple(each.double().cpu() for each in (output.logits, output.hidden, *output.layers)))

    def chain(cache: RequestCache, count: int) -> Segment:
        return Segment(cache, drawn(count), chain_shape(count), range(count))

    def tree(cache: RequestCache, shape: TreeShape = TREE, rows: Sequence[int] | None = None) -> Segment:
        return Segment(cache, drawn(len(shape)), shape, range(len(shape)) if rows is None else rows)

    first, second, third = (model.new_cache() for _ in range(3))
    forward(chain(first, 5), chain(second, 90), chain(third, 1))  # a long prompt between short ones
    for cache, count in zip((first, second, third), (5, 90, 1), strict=True):
        cache.commit(range(count))
    for _ in range(2):
        forward(tree(first), chain(second, 4), chain(third, 1))
        first.commit((0, 2, 4, 6))
        second.commit((0, 1))
        third.commit((0,))
    for written, until in ((0, 1), (1, 3), (3, 7)):
        level = TreeShape(TREE.parents[:until])
        forward(Segment(second, drawn(until - written), level, range(until - written), written))
    second.commit((0, 2, 5))
    forward(chain(third, 1))
    forward(tree(second, rows=(1, 6)), tree(first, TreeShape((-1, -1))))  # another order, few rows, two first nodes
    second.commit(())
    second.rollback(40)
    model.release_cache(first)  # its pages are free
    forward(chain(second, 3), tree(third, LARGE_TREE, range(0, 71, 7)))
    third.commit((0, 1, 3, 5))
    second.commit((0, 1, 2))
    fourth, fifth = model.new_cache(), model.new_cache()
    forward(chain(fourth, 30), chain(third, 1), chain(fifth, 2))
    for cache, count in ((fourth, 30), (third, 1), (fifth, 2)):
        cache.commit(range(count))
    forward(Segment(fourth, drawn(230), chain_shape(230), ()))  # nothing wanted
    fourth.commit(range(230))
    forward(tree(fourth), tree(second), chain(fifth, 1))
    for cache in (second, third, fourth, fifth):
        model.release_cache(cache)
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


def apart(left: Tensor, right: Tensor, spread: float) -> tuple[float, float]:
    """Largest and root mean square difference, in units of the spread of what is compared."""
    difference = (left - right) / spread
    return float(difference.abs().max()), float(difference.square().mean().sqrt())


def assert_equal_up_to_rounding(ours: Tensor, theirs: Tensor) -> None:
    """Each product sums about 100 terms and is off by some 1e-7 of its size; a wrong mask or position gives 1."""
    largest, typical = apart(ours, theirs, float(theirs.std()))
    assert largest <= 5e-5
    assert typical <= 5e-6
