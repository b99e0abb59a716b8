"""EAGLE-3 heads as drafters, held to a slow reference that is written from the paper's page, token by token."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.eagle_reference import EagleReference, random_eagle
from support.layer_heads import GREEDY, Records, answers_of, as_transformers_runs_it, plain_answers, target
from support.tiny_models import CONTEXT, PROMPTS, VOCAB
from truedraft import Engine, SamplingParams
from truedraft.cache import RequestCache
from truedraft.core.budget import Budget
from truedraft.drafters import DraftRequest, Eagle3
from truedraft.drafters.heads.levels import LikeliestTree, drawn_shape
from truedraft.heads import Eagle3Config, Eagle3Head

SIZES = Eagle3Config(48, VOCAB, (0, 1), heads=4, kv_heads=2, head=16, inner=64, reach=3, most_positions=CONTEXT)
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "the target's LM head": {"own_output": False},
    "fewer ids": {"draft_vocab": 40},
    "an embedding of its own": {"own_embedding": True},
    "normed residual, positions from 1": {"norm_before_residual": True, "rope_start": 1},
    "norm before fc": {"norm_before_fc": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "norms of queries and keys": {"query_norms": True},
}


def head(**changes: Any) -> Eagle3Head:
    return random_eagle(replace(SIZES, **changes))


class Recorded(Records, Eagle3):
    pass


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_chains_are_what_the_page_says(name: str) -> None:
    made = head(**VARIANTS[name])
    reference, drafter = EagleReference(as_transformers_runs_it(), made), Recorded(made)
    assert answers_of(Engine(target(), drafter, controller="fixed"), GREEDY) == plain_answers(GREEDY)
    for text, proposal in drafter.seen[::5]:
        path: list[int] = []
        for token in proposal.tree.host_ids:
            assert token == int(reference.logits(text, path).argmax()), f"behind {text} {path}"
            path.append(token)
    assert len(drafter.seen) > 20


def test_the_worked_example_of_the_likeliest_tree() -> None:
    tree = LikeliestTree(RequestCache(64), DraftRequest(0, GREEDY), Budget(2, 2, 4))
    tree.grow([[10, 11]], [[math.log(0.6), math.log(0.3)]])
    assert tree.open_paths() == [(10,), (11,)]
    tree.grow([[12, 13], [14, 15]], [[math.log(0.4), math.log(0.2)], [math.log(0.9), math.log(0.1)]])
    proposal = tree.proposal()
    assert (proposal.tree.host_ids, proposal.tree.shape.parents) == ([10, 11, 14, 12], (-1, -1, 1, 0))


def test_what_it_holds_of_a_request_is_counted_by_its_tokens() -> None:
    """Keys and values of two heads of 16 entries, and vectors of two layers that were not read yet, in float32."""
    engine = Engine(target(), drafter := Eagle3(head()), controller="fixed")
    assert (drafter.held.request_bytes, drafter.held.token_bytes) == (0, 4 * (2 * 2 * 16 + 2 * 48))
    requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS[:2]]
    for _ in range(4):
        engine.step()
    tokens = sum(len(each.tokens) - 1 for each in requests)  # the last of each has no vector yet
    assert drafter.held.n_bytes == drafter.held.token_bytes * tokens > 0
    for each in requests:
        engine.cancel(each)
    engine.step()
    assert drafter.held.n_bytes == 0


def test_the_shape_of_drawn_trees_is_the_best_of_all() -> None:
    """By hand, all shapes of at most 16 nodes and a depth of 3."""

    def brings(shape: tuple[int, ...]) -> float:
        return (1 - 0.5 ** shape[0]) * (1 + brings(shape[1:])) if shape else 0.0

    shapes = [shape for depth in (1, 2, 3) for shape in itertools.product(range(1, 17), repeat=depth)]
    fitting = [shape for shape in shapes if sum(math.prod(shape[: d + 1]) for d in range(len(shape))) <= 16]
    assert drawn_shape(16, 3) == drawn_shape(16, 5) == (3, 2, 1)
    assert brings((3, 2, 1)) == max(map(brings, fitting))
    assert drawn_shape(1, 5) == (1,) and len(drawn_shape(64, 2)) == 2


def test_with_nodes_sampled_requests_get_a_tree_of_draws() -> None:
    engine = Engine(target(), drafter := Recorded(head(), nodes=16), controller="fixed")
    engine.generate(PROMPTS[0], SamplingParams(max_tokens=24, temperature=1.0))
    assert drafter.limits.depth == 3 and drafter.branching == (3, 2, 1)
    proposals = [each for _, each in drafter.drafted]
    assert max(len(each.tree) for each in proposals) == 15
    assert all(each.probs is not None for each in proposals)
