"""Forwards over pages by Triton's kernels give what torch's operations give: `make test-kernels`, or on a GPU."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen3Config

from support.backends import HostRecorder, graph_backend
from support.loops import SMALL, TREE, assert_equal_up_to_rounding
from support.tiny_models import VOCAB, build
from support.triton_kernels import DEVICE, why_not
from truedraft.core.tree import chain_shape
from truedraft.models.backends.graphs.attention import gathered_attention
from truedraft.models.base import Segment
from truedraft.models.huggingface import HuggingFaceModel

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

SHALLOW = SMALL | {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHALLOW),
    "mistral with a window": MistralConfig(**SHALLOW, sliding_window=9),
    "qwen3, with gelu": Qwen3Config(**SHALLOW, head_dim=32, hidden_act="gelu"),
}


def model_of(name: str, *, kernels: bool) -> HuggingFaceModel:
    module = build(CONFIGS[name], seed=0, spread=0.15).to(DEVICE)  # type: ignore[arg-type]
    model = HuggingFaceModel(module, None, name, lambda given: graph_backend(given, HostRecorder()))
    if not kernels:
        model._backend._attention = gathered_attention  # type: ignore[attr-defined]
        model._backend._paged._together = False  # type: ignore[attr-defined]
    return model


def forwards(model: HuggingFaceModel) -> list[torch.Tensor]:
    """A part of a prompt beside a short text, all packed; then a tree beside a chain, recorded and replayed."""
    first, second = model.new_cache(), model.new_cache()
    found = []

    def ids(count: int, seed: int) -> torch.Tensor:
        return (torch.arange(count) * 7 + seed) % VOCAB

    segments = [Segment(first, ids(70, 1), chain_shape(70), (0, 69)), Segment(second, ids(3, 2), chain_shape(3), (2,))]
    found.append(model.forward(segments).logits)
    first.commit(range(70))
    second.commit(range(3))
    for seed in range(3):
        tree = Segment(first, ids(len(TREE), seed), TREE, range(len(TREE)))
        found.append(model.forward([Segment(second, ids(2, seed), chain_shape(2), (0, 1)), tree]).logits)
        first.commit((0, 2, 4, 6))
        second.commit((0,))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_forwards_by_kernels_are_those_by_torch(name: str) -> None:
    model = model_of(name, kernels=True)
    assert "Triton kernels" in model.fast_paths
    ours, theirs = forwards(model), forwards(model_of(name, kernels=False))
    for one, other in zip(ours, theirs, strict=True):
        assert_equal_up_to_rounding(one, other)


def test_a_row_does_not_notice_its_neighbours() -> None:
    """Up to rounding: products of float32 may sum otherwise for other numbers of rows."""
    model = model_of("llama", kernels=True)
    cache = model.new_cache()
    model.forward([Segment(cache, torch.arange(40), chain_shape(40), ())])
    cache.commit(range(40))
    one = Segment(cache, torch.tensor([5]), chain_shape(1), (0,))
    alone = model.forward([one]).logits
    cache.commit(())
    beside = model.forward([Segment(model.new_cache(), torch.arange(9), chain_shape(9), (8,)), one]).logits[1:]
    assert_equal_up_to_rounding(alone, beside)
