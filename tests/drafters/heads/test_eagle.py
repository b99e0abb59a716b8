"""EAGLE-3 heads as drafters, held to a slow reference that is written from the paper's page, token by token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
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
from truedraft.core.rank_tree import RankTree
from truedraft.drafters import DraftRequest, Eagle3
from truedraft.drafters.heads.levels import LikeliestTree, drawn_tree
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


def test_drawn_trees_are_the_best_of_all() -> None:
    """By hand, all trees of four nodes and a depth of 3, and every tree from a larger one."""

    def worth(paths: Iterable[tuple[int, ...]]) -> float:
        return sum(math.prod(0.48 if rank == 0 else 0.1 * 0.65 ** (rank - 1) for rank in path) for path in paths)

    every = [path for depth in (1, 2, 3) for path in itertools.product(range(4), repeat=depth)]
    trees = [
        some
        for some in itertools.combinations(every, 4)
        if all(
            (len(path) == 1 or path[:-1] in some) and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in some)
            for path in some
        )
    ]
    best = drawn_tree(4, 3)
    assert len(trees) > 10 and best.paths == ((0,), (0, 0), (0, 0, 0), (1,))
    assert worth(best.paths) == pytest.approx(max(map(worth, trees))) == pytest.approx(best.expected_tokens - 1)
    assert drawn_tree(16, 5).paths[:4] == best.paths and drawn_tree(1, 5).paths == ((0,),)
    assert drawn_tree(64, 2).depth == 2 and len(drawn_tree(64, 2)) == 64


def test_with_nodes_sampled_requests_get_a_tree_of_draws() -> None:
    engine = Engine(target(), drafter := Recorded(head(), nodes=16), controller="fixed")
    engine.generate(PROMPTS[0], SamplingParams(max_tokens=24, temperature=1.0))
    assert drafter.ranks is drawn_tree(16, SIZES.reach) and drafter.limits.depth == 3
    whole = [own.tree.shape.parents for (_, own), depth in zip(drafter.seen, drafter.depths, strict=True) if depth == 3]
    by_level = sorted(drafter.ranks.paths, key=lambda path: (len(path), path))
    assert whole and set(whole) == {RankTree(tuple(by_level)).shape.parents}
    assert all(own.probs is not None for _, own in drafter.drafted)
