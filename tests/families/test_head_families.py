"""Medusa and ReDrafter on real architectures: greedy answers equal transformers', and a node sees its path alone."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from support.answers import count_moves
from support.backends import graph_backend
from support.head_models import fitted_heads, random_heads, random_redrafter
from support.pairwise import by_turns, pairwise
from support.tiny_models import FAMILIES, PROMPTS, VOCAB, build, llama, packed, reference, stock
from truedraft import Engine, SamplingParams
from truedraft.core.rank_tree import RankTree
from truedraft.core.stats import Counters
from truedraft.core.tree import chain_shape
from truedraft.drafters import Drafter, Medusa, Redrafter
from truedraft.kinds.medusa.folders import published_tree
from truedraft.kinds.medusa.module import MedusaHeads
from truedraft.models import HuggingFaceModel, Segment, pad_model
from truedraft.models.backends.base import BackendMaker
from truedraft.models.backends.stock import StockBackend
from truedraft.models.loading import fastest_backend
from truedraft.models.padding import PaddedSize

COUNT = 64
PARAMS = SamplingParams(max_tokens=COUNT)
LIST = [list(prompt) for prompt in PROMPTS]
TREES = {
    "published": published_tree().within(3, 10),
    "chain": RankTree(((0,), (0, 0), (0, 0, 0))),
    "star": RankTree(tuple((rank,) for rank in range(8))),
}
SIZES = {"few": (1, 3, 3), "beams": (6, 3, 12), "wide": (24, 2, 40)}  # beams, length, nodes
target = cache(packed)


@cache
def heads_for(family: str) -> MedusaHeads:
    """Fitted to half of the reference answers: often right there, seldom on the others."""
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, reference(family), strict=True)]
    return fitted_heads(target(family), texts[:2])


def redrafter_for(model: HuggingFaceModel, sizes: str, **options: int | bool) -> Redrafter:
    """A head of random weights: right by chance alone, the more often the more it drafts."""
    beams, length, nodes = SIZES[sizes]
    return Redrafter(random_redrafter(model, **options), beams=beams, length=length, nodes=nodes)


@pytest.mark.parametrize(("family", "kind"), by_turns(FAMILIES, [*TREES, *SIZES], always=["published", "beams"]))
def test_greedy_equals_transformers(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, drafter = count_moves(monkeypatch), redrafter_for(target(family), kind) if kind in SIZES else None
    medusa = None if drafter else Medusa(heads_for(family), {"greedy": TREES[kind]}, nodes=64)
    engine = Engine(target(family), drafter or medusa, controller="fixed")
    batch = engine.generate(LIST, PARAMS)
    assert [tuple(answer.token_ids) for answer in batch] == [answer[:COUNT] for answer in reference(family)]
    assert not any(answer.warnings for answer in batch)
    if family == "llama":  # of all families' rows `test_packed_forward` says that they do not hang on their neighbours
        alone = engine.generate(LIST[0], PARAMS)
        assert alone.token_ids == batch[0].token_ids and not alone.warnings
        assert alone.stats == batch[0].stats, "what is drafted depends on the neighbours"
    total = sum((answer.stats for answer in batch), Counters())
    if medusa is None:
        assert total.draft_tokens > len(PROMPTS) * COUNT
        assert kind != "wide" or 0 < total.accepted_tokens < total.draft_tokens
        return
    # Otherwise the heads test nothing: some paths are kept in full, some in part, some not at all.
    assert 0.15 < total.accepted_per_position[0] / total.tried_per_position[0] < 0.98
    assert total.accepted_per_position[-1] > 0
    assert bool(moved) == (kind != "chain"), "no path through a later sibling was accepted"


@pytest.mark.parametrize(
    ("family", "options"), by_turns(["llama", "gemma3", "gpt2"], [{}, {"rnn": False}, {"layers": 0}, {"tied": False}])
)
def test_heads_of_any_form_and_of_no_use_change_no_answer(family: str, options: dict[str, int | bool]) -> None:
    """Without options tied Medusa heads with random blocks, else forms of ReDrafter's head."""
    model = target(family)
    if "rnn" in options:  # then the state is a sum of embeddings
        options = options | {"state": model.head_width}
    medusa = Medusa(random_heads(model, heads=3, spread=0.2), {"greedy": TREES["published"]}, nodes=20)
    drafter: Drafter = redrafter_for(model, "wide", **options) if options else medusa
    answers = Engine(model, drafter, controller="fixed").generate(LIST, PARAMS)
    assert [tuple(answer.token_ids) for answer in answers] == [answer[:COUNT] for answer in reference(family)]
    assert sum(answer.stats.draft_tokens for answer in answers) > 1000
    assert not options or sum(answer.stats.accepted_tokens for answer in answers) > 0


def native_llama() -> PreTrainedModel:
    """Heads of 32, which the native forward takes where it can be compiled."""
    sizes = llama().to_dict() | {"hidden_size": 128, "head_dim": 32}
    left_out = ("model_type", "architectures")
    return build(LlamaConfig(**{name: sizes[name] for name in sizes if name not in left_out}), seed=1)


@cache
def answers_and_drafter(kind: str) -> tuple[list[list[int]], Drafter]:
    """Plain answers, and what drafts for the model."""
    own = HuggingFaceModel(native_llama(), None, "own")
    plain = [answer.token_ids for answer in Engine(own).generate(LIST, PARAMS)]
    if kind == "redrafter":
        return plain, redrafter_for(own, "wide")
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, plain, strict=True)]
    heads = random_heads(own, heads=3, spread=0.1) if kind == "tied" else fitted_heads(own, texts)
    return plain, Medusa(heads, {"greedy": TREES["published"]}, nodes=30)


@pytest.mark.parametrize(
    ("padded", "backend", "kind"),
    pairwise([True, False], [StockBackend, fastest_backend], ["fitted", "tied", "redrafter"]),
)
def test_padded_and_fast_targets_take_the_same_heads(padded: bool, backend: BackendMaker, kind: str) -> None:
    plain, drafter = answers_and_drafter(kind)
    module = native_llama()
    if padded:
        module = pad_model(module, PaddedSize("1M", layers=3, width=512, inner=512))
    engine = Engine(HuggingFaceModel(module, None, "ours", backend), drafter, controller="fixed")
    answers = engine.generate(LIST, PARAMS)
    assert [answer.token_ids for answer in answers] == plain
    assert sum(answer.stats.accepted_tokens for answer in answers) > (COUNT if kind == "fitted" else 0)


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
    context = LIST[1]
    tokens = [(17 * node + 3) % VOCAB for node in range(len(shape))]
    below = model.new_cache()
    model.forward([Segment(below, torch.tensor(context), chain_shape(len(context)), ())])
    below.commit(range(len(context)))
    logits = model.forward([Segment(below, torch.tensor(tokens), shape, range(len(shape)))]).logits
    close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3)
    for node in range(0, len(shape), 5):
        ids = torch.tensor([*context, *(tokens[i] for i in shape.path(node))])
        alone = model.new_cache()
        close(logits[node], model.forward([Segment(alone, ids, chain_shape(len(ids)), (len(ids) - 1,))]).logits[0])
        model.release_cache(alone)
