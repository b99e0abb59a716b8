"""Block drafters by decoder.c give what their modules give, each text for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from support.layer_heads import random_head
from support.tiny_models import build
from truedraft.kinds.block.drafter import BlockRunner
from truedraft.kinds.block.module import BlockConfig, BlockHead, DFlashHead, DSparkHead
from truedraft.kinds.dflash2.drafter import DFlash2Runner
from truedraft.kinds.dflash2.module import DFlash2Config, DFlash2Head
from truedraft.models.backends.native.build import built
from truedraft.models.backends.native.heads import block_slots
from truedraft.models.cache import RequestCache
from truedraft.models.huggingface import HuggingFaceModel

pytestmark = pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)
WIDTH, VOCAB, LONGEST = 64, 211, 700
SIZES: dict[str, Any] = {
    "width": WIDTH, "vocab_size": VOCAB, "layers": (0, 1), "heads": 4, "kv_heads": 2, "head": 32, "inner": 96,
    "block": 5, "mask_id": VOCAB - 1, "depth": 3, "most_positions": 1024,
}  # fmt: skip
KINDS: dict[str, tuple[type[BlockHead], dict[str, Any]]] = {
    "dflash": (DFlashHead, {"own_output": True, "draft_vocab": 100}),
    "dflash, windows": (DFlashHead, {"windows": (40, 0, 300)}),
    "dspark": (DSparkHead, {"own_output": True, "from_anchor": True, "markov": 8, "markov_kind": "rnn"}),
    "dflash2": (DFlash2Head, {"rank": 8, "candidates": 6}),
    "dflash2, three taps, windows": (DFlash2Head, {"rank": 8, "candidates": 6, "taps": 3, "windows": (0, 17, 0)}),
}
kinds = pytest.mark.parametrize("kind", list(KINDS))


def made(kind: str) -> BlockHead:
    head, options = KINDS[kind]
    config = (DFlash2Config if head is DFlash2Head else BlockConfig)(**SIZES, **options)
    return random_head(head, config)


def runner_of(head: BlockHead, dtype: torch.dtype = torch.float32) -> BlockRunner:
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
    target = HuggingFaceModel(build(LlamaConfig(**sizes, num_attention_heads=2), seed=1, dtype=dtype), None, "small")
    return (DFlash2Runner if isinstance(head, DFlash2Head) else BlockRunner)(head, target)


def by_modules(head: BlockHead, monkeypatch: pytest.MonkeyPatch) -> BlockRunner:
    with monkeypatch.context() as patch:
        patch.setattr(BlockHead, "native_blocks", lambda *_: None)
        return runner_of(head)


def texts(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What texts show, long ones too: attention reads them in chunks of 256."""
    draws = torch.Generator().manual_seed(2)
    return [torch.randn(count, 2 * WIDTH, generator=draws).to(dtype) for count in (3, 1, 255, LONGEST)]


def drafts(runner: BlockRunner, shown: list[Tensor], anchors: list[int]) -> list[tuple[Tensor, ...]]:
    """Slots after the texts, all together; then after a few tokens more, which take the place of the block."""
    caches: list[RequestCache] = [runner.pool.acquire() for _ in shown]
    found = [runner.run(caches, shown, anchors)]
    more = [each[:2].flip(0) for each in shown]
    return [*found, runner.run(caches, more, [each + 1 for each in anchors])]


@kinds
def test_slots_are_those_of_the_modules(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, anchors = made(kind), [5, 9, 200, 17]
    native, plain = runner_of(head), by_modules(head, monkeypatch)
    assert native.native is not None and plain.native is None
    for own, expected in zip(drafts(native, texts(), anchors), drafts(plain, texts(), anchors), strict=True):
        for value, other in zip(own, expected, strict=True):
            assert value.shape == other.shape
            torch.testing.assert_close(value, other, rtol=2e-4, atol=2e-4)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_does_not_depend_on_its_neighbours(kind: str, dtype: torch.dtype) -> None:
    runner, anchors, shown = runner_of(made(kind), dtype), [5, 9, 200, 17], texts(dtype)
    together = drafts(runner, shown, anchors)
    for number in range(len(shown)):
        alone = drafts(runner, shown[number : number + 1], anchors[number : number + 1])
        for own, every in zip(alone, together, strict=True):
            assert all(value.equal(other[number : number + 1]) for value, other in zip(own, every, strict=True))


def test_rows_of_a_block_see_all_of_it() -> None:
    starts, slots = block_slots(2)
    assert (starts.tolist(), slots.tolist()) == ([0, 2, 4], [0, 1, 0, 1])


@pytest.mark.parametrize(
    "options",
    [
        {"windows": (8, 8, 8), "sink": 2},
        {"windows": (8, 8, 8), "window_causal": True},
        {"width": 56, "head": 14},
    ],
)
def test_what_is_not_supported_runs_by_modules(options: dict[str, Any]) -> None:
    head = random_head(DFlashHead, BlockConfig(**SIZES | options))
    assert head.native_blocks(head.rotary(head.norm.weight), 0) is None and len(head.layers) == SIZES["depth"]


@pytest.mark.parametrize("options", [{"group": 8}, {"taps": 9, "block": 10}])
def test_convolutions_that_are_not_supported_run_by_modules(options: dict[str, Any]) -> None:
    head = random_head(DFlash2Head, DFlash2Config(**SIZES | options, rank=8))
    assert head.native_blocks(head.rotary(head.norm.weight), 0) is None
