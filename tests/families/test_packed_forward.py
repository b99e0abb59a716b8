"""Every row of a packed forward equals its own path run alone by transformers, whatever shares the forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from transformers import (
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GPTNeoConfig,
    Llama4TextConfig,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
)

from support.tiny_models import FAMILIES, GROUPED, SMALL, VOCAB, WINDOW, build, packed, stock, stock_logits
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.errors import UnsupportedModelError
from truedraft.models import HuggingFaceModel, LanguageModel, Segment
from truedraft.models.cache import RequestCache
from truedraft.models.probe import check_against_stock

# float32 rounding over a few layers; a wrong mask or position gives 1 and more.
TOLERANCE = 2e-5
TREE = TreeShape((-1, 0, 0, 1, 2, 2, 4))
"""A root token and below it 6 nodes with the leaves 3, 5 and 6; the path 0, 2, 4, 6 skips two of them."""


@dataclass
class Text:
    """One request: its cache, and the tokens that the cache should hold."""

    cache: RequestCache
    tokens: list[int] = field(default_factory=list)

    def commit(self, new: Sequence[int], path: Sequence[int]) -> None:
        self.cache.commit(path)
        self.tokens += [new[node] for node in path]

    def rollback(self, length: int) -> None:
        self.cache.rollback(length)
        del self.tokens[length:]


@dataclass
class Part:
    """A text's share of a forward: uncommitted tokens, of which earlier forwards wrote the first few."""

    text: Text
    new: list[int]
    shape: TreeShape
    written: int = 0

    def segment(self) -> Segment:
        own = range(len(self.shape) - self.written)
        return Segment(self.text.cache, torch.tensor(self.new[self.written :]), self.shape, own, self.written)

    def differences(self, alone: PreTrainedModel, logits: torch.Tensor) -> list[float]:
        """How far each new node's row is from its path run alone."""
        found = []
        for node in range(self.written, len(self.shape)):
            path = [self.new[i] for i in self.shape.path(node)]
            expected = stock_logits(alone, [*self.text.tokens, *path])[-1]
            found.append(float((logits[node - self.written] - expected).abs().max()))
        return found


class Packs:
    """Runs forwards and compares every row."""

    def __init__(self, model: LanguageModel, alone: PreTrainedModel) -> None:
        self.model = model
        self.alone = alone
        self.worst = 0.0
        self._generator = torch.Generator().manual_seed(5)

    def tokens(self, count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=self._generator).tolist()

    def part(self, text: Text, shape: TreeShape) -> Part:
        return Part(text, self.tokens(len(shape)), shape)

    def run(self, *parts: Part) -> None:
        logits = self.model.forward([part.segment() for part in parts]).logits
        counts = [len(part.shape) - part.written for part in parts]
        for part, own in zip(parts, logits.split(counts), strict=True):
            self.worst = max(self.worst, *part.differences(self.alone, own))


@torch.inference_mode()
def worst_difference(model: LanguageModel, alone: PreTrainedModel) -> float:
    """Ragged prefill, mixed packs, commits of a branch and in part, rollback, other orders, trees level by level."""
    packs = Packs(model, alone)
    a, b, c = (Text(model.new_cache()) for _ in range(3))

    prefill = [packs.part(a, chain_shape(5)), packs.part(b, chain_shape(13)), packs.part(c, chain_shape(1))]
    packs.run(*prefill)
    for part in prefill:
        part.text.commit(part.new, range(len(part.new)))

    tree, chain, chunk = packs.part(a, TREE), packs.part(b, chain_shape(4)), packs.part(c, chain_shape(WINDOW + 1))
    packs.run(tree, chain, chunk)
    a.commit(tree.new, (0, 2, 4, 6))
    b.commit(chain.new, (0, 1))
    c.commit(chunk.new, range(WINDOW + 1))
    assert [text.cache.length for text in (a, b, c)] == [9, 15, 10]

    trees = [packs.part(text, TREE) for text in (c, a, b)]
    packs.run(*trees)
    c.commit(trees[0].new, (0, 1, 3))
    a.commit(trees[1].new, ())
    b.commit(trees[2].new, (0, 2, 5))
    c.rollback(4)

    # Level by level: the root token, its children, then the rest, each forward behind what the last one wrote.
    grown = packs.part(a, TREE)
    for written, until in ((0, 1), (1, 3), (3, 7)):
        level = Part(a, grown.new[:until], TreeShape(TREE.parents[:until]), written)
        others = [packs.part(text, TREE) for text in (b, c)]
        packs.run(others[0], level, others[1])
    a.commit(grown.new, (0, 2, 5))
    packs.run(*(packs.part(text, chain_shape(2)) for text in (a, b, c)))
    for text in (a, b, c):
        model.release_cache(text.cache)
    return packs.worst


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_packs_equal_transformers(family: str) -> None:
    difference = worst_difference(packed(family), stock(family))
    assert difference <= TOLERANCE


OTHERS: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma2 with a soft cap": lambda: Gemma2Config(
        **GROUPED, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=5.0
    ),
    "phi": lambda: PhiConfig(**SMALL, intermediate_size=64),
    "opt": lambda: OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=48, max_position_embeddings=128),
    "qwen2_moe with a window that attention is not told": lambda: Qwen2MoeConfig(
        **GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0, num_experts=4
    ),
    "llama4 with chunks": lambda: Llama4TextConfig(
        **GROUPED,
        head_dim=16,
        intermediate_size_mlp=64,
        num_local_experts=2,
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 0],
        attn_temperature_tuning=False,
    ),
    "llama4 that scales its queries by position": lambda: Llama4TextConfig(
        **GROUPED,
        head_dim=16,
        intermediate_size_mlp=64,
        num_local_experts=2,
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 0],
        attn_temperature_tuning=True,
        floor_scale=12,  # 8,192 in real models: beyond what is compared when a model is loaded
    ),
    "bloom": lambda: BloomConfig(vocab_size=VOCAB, hidden_size=48, n_layer=2, n_head=4),
    "falcon": lambda: FalconConfig(**SMALL),
    "gpt_neo": lambda: GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=48, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ),
}
REFUSED = {"bloom", "falcon", "gpt_neo", "llama4 that scales its queries by position"}


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_are_exact_or_refused(name: str) -> None:
    """No family runs and answers wrongly."""
    alone = build(OTHERS[name](), seed=0)
    model = build(OTHERS[name](), seed=0)
    check = check_against_stock(model, name)
    if name in REFUSED:
        with pytest.raises(UnsupportedModelError):
            check(HuggingFaceModel(model, None, name))
        return
    loaded = HuggingFaceModel(model, None, name)
    check(loaded)
    assert worst_difference(loaded, alone) <= TOLERANCE
