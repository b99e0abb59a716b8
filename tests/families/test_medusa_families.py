"""Medusa on real architectures: greedy answers equal transformers' own, and a node sees its path and nothing else."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from support.answers import count_moves
from support.backends import graph_backend
from support.head_models import fitted_heads, random_heads
from support.pairwise import by_turns, pairwise
from support.tiny_models import FAMILIES, PROMPTS, VOCAB, build, llama, packed, reference, stock
from truedraft import Engine, SamplingParams
from truedraft.core.rank_tree import RankTree
from truedraft.core.stats import Counters
from truedraft.core.tree import chain_shape
from truedraft.drafters import Medusa
from truedraft.kinds.medusa.folders import published_tree
from truedraft.kinds.medusa.module import MedusaHeads
from truedraft.models.backends.base import BackendMaker
from truedraft.models.backends.stock import StockBackend
from truedraft.models.base import Segment
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import fastest_backend
from truedraft.models.padding import PaddedSize, pad_model

COUNT = 64
PARAMS = SamplingParams(max_tokens=COUNT)
TREES = {
    "published": published_tree().within(3, 10),
    "chain": RankTree(((0,), (0, 0), (0, 0, 0))),
    "star": RankTree(tuple((rank,) for rank in range(8))),
}

target = cache(packed)


def expected(family: str) -> list[tuple[int, ...]]:
    """Transformers' own greedy answers to PROMPTS."""
    return [answer[:COUNT] for answer in reference(family)]


@cache
def heads_for(family: str) -> MedusaHeads:
    """Fitted to half of the reference answers: often right there, seldom on the others."""
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, reference(family), strict=True)]
    return fitted_heads(target(family), texts[:2])


@pytest.mark.parametrize(("family", "tree"), by_turns(FAMILIES, TREES, always=["published"]))
def test_greedy_equals_transformers(family: str, tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = count_moves(monkeypatch)
    engine = Engine(target(family), Medusa(heads_for(family), {"greedy": TREES[tree]}, nodes=64), controller="fixed")
    batch = engine.generate([list(prompt) for prompt in PROMPTS], PARAMS)
    assert [tuple(answer.token_ids) for answer in batch] == expected(family)
    assert not any(answer.warnings for answer in batch)
    if family == "llama":  # of all families' rows `test_packed_forward` says that they do not hang on their neighbours
        alone = engine.generate(list(PROMPTS[0]), PARAMS)
        assert alone.token_ids == batch[0].token_ids and not alone.warnings
        assert alone.stats == batch[0].stats, "what is drafted depends on the neighbours"
    total = sum((answer.stats for answer in batch), Counters())
    # Otherwise the heads test nothing: some paths are kept in full, some in part, some not at all.
    assert 0.15 < total.accepted_per_position[0] / total.tried_per_position[0] < 0.98
    assert total.accepted_per_position[-1] > 0
    assert bool(moved) == (tree != "chain"), "no path through a later sibling was accepted"


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_tied_heads_with_random_blocks_change_no_answer(family: str) -> None:
    """What they guess is of no use, and does no harm."""
    heads = random_heads(target(family), heads=3, spread=0.2)
    engine = Engine(target(family), Medusa(heads, {"greedy": TREES["published"]}, nodes=20), controller="fixed")
    answers = engine.generate([list(prompt) for prompt in PROMPTS], PARAMS)
    assert [tuple(answer.token_ids) for answer in answers] == expected(family)
    assert sum(answer.stats.draft_tokens for answer in answers) > 1000


def native_llama() -> PreTrainedModel:
    """Heads of 32, which the native forward takes where it can be compiled."""
    sizes = llama().to_dict() | {"hidden_size": 128, "head_dim": 32}
    left_out = ("model_type", "architectures")
    return build(LlamaConfig(**{name: sizes[name] for name in sizes if name not in left_out}), seed=1)


@cache
def answers_and_heads(tied: bool) -> tuple[list[list[int]], MedusaHeads]:
    """Plain answers, and heads for the model."""
    own = HuggingFaceModel(native_llama(), None, "own")
    plain = [answer.token_ids for answer in Engine(own).generate([list(prompt) for prompt in PROMPTS], PARAMS)]
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, plain, strict=True)]
    return plain, random_heads(own, heads=3, spread=0.1) if tied else fitted_heads(own, texts)


@pytest.mark.parametrize(
    ("padded", "backend", "tied"), pairwise([True, False], [StockBackend, fastest_backend], [True, False])
)
def test_padded_and_fast_targets_take_the_same_heads(padded: bool, backend: BackendMaker, tied: bool) -> None:
    plain, heads = answers_and_heads(tied)
    module = native_llama()
    if padded:
        module = pad_model(module, PaddedSize("1M", layers=3, width=512, inner=512))
    engine = Engine(
        HuggingFaceModel(module, None, "ours", backend),
        Medusa(heads, {"greedy": TREES["published"]}, nodes=30),
        controller="fixed",
    )
    answers = engine.generate([list(prompt) for prompt in PROMPTS], PARAMS)
    assert [answer.token_ids for answer in answers] == plain
    assert sum(answer.stats.accepted_tokens for answer in answers) > (0 if tied else COUNT)


@pytest.mark.parametrize(
    ("tree", "backend", "family"),
    pairwise([*TREES, "whole"], [StockBackend, fastest_backend, graph_backend], ["llama", "mistral", "gpt2"]),
)
def test_a_node_has_the_logits_of_its_path_alone(family: str, backend: BackendMaker, tree: str) -> None:
    """Below a context, with a window in one family, for nodes of known trees; neighbours have tokens of their own."""
    if backend is graph_backend and family == "gpt2":
        pytest.skip("the recorded forward is not for this family")
    shape = (published_tree() if tree == "whole" else TREES[tree]).shape.rooted
    model = HuggingFaceModel(stock(family), None, family, backend)
    context = list(PROMPTS[1])
    tokens = [(17 * node + 3) % VOCAB for node in range(len(shape))]
    below = model.new_cache()
    model.forward([Segment(below, torch.tensor(context), chain_shape(len(context)), ())])
    below.commit(range(len(context)))
    logits = model.forward([Segment(below, torch.tensor(tokens), shape, range(len(shape)))]).logits
    for node in range(0, len(shape), 5):
        ids = torch.tensor([*context, *(tokens[i] for i in shape.path(node))])
        alone = model.new_cache()
        path_alone = model.forward([Segment(alone, ids, chain_shape(len(ids)), (len(ids) - 1,))]).logits[0]
        model.release_cache(alone)
        torch.testing.assert_close(logits[node], path_alone, rtol=1e-3, atol=1e-3)
