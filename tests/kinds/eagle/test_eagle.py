"""EAGLE-3 heads as drafters, held to a slow reference that is written from the paper's page, token by token."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.backends import HostRecorder
from support.eagle_reference import EagleReference, random_eagle
from support.layer_heads import GREEDY, Records, answers_of, as_transformers_runs_it, plain_answers, target
from support.tiny_models import CONTEXT, PROMPTS, VOCAB
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.noise import Purpose
from truedraft.core.probs import draw, total_variation
from truedraft.core.rank_tree import RankTree
from truedraft.core.top_k import TopK
from truedraft.drafters import DraftRequest, Eagle3
from truedraft.drafters.heads import layers
from truedraft.drafters.heads.levels import drawn_tree
from truedraft.drafters.tree_builder import LikeliestTree
from truedraft.kinds.eagle.drafter import Eagle3Runner
from truedraft.kinds.eagle.module import Eagle3Config, Eagle3Head
from truedraft.models.backends.native.build import built
from truedraft.models.backends.native.linear import likeliest_of, native_linears
from truedraft.models.base import LanguageModel
from truedraft.models.cache import RequestCache
from truedraft.training.online.learner import Tenants

SIZES = Eagle3Config(48, VOCAB, (0, 1), heads=4, kv_heads=2, head=32, inner=64, reach=3, most_positions=CONTEXT)
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "the target's LM head": {"own_output": False},
    "heads that no native forward has": {"head": 16},
    "fewer ids": {"draft_vocab": 40},
    "an embedding of its own": {"own_embedding": True},
    "normed residual, positions from 1": {"norm_before_residual": True, "rope_start": 1},
    "norm before fc": {"norm_before_fc": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "norms of queries and keys": {"query_norms": True},
}

needs_library = pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)


def head(**changes: Any) -> Eagle3Head:
    return random_eagle(replace(SIZES, **changes))


class Recorded(Records, Eagle3):
    pass


class Replayed(Records, Eagle3):
    """Drafts from recordings: `GraphPairs` on a stand-in."""

    def _new_runner(self, target: LanguageModel) -> Eagle3Runner:
        self.recorder = HostRecorder()
        return Eagle3Runner(self.head, target, self.recorder)


@pytest.mark.parametrize("kind", [Recorded, Replayed])
@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_chains_are_what_the_page_says(name: str, kind: Any) -> None:
    made = head(**VARIANTS[name])
    drafter, reference = kind(made), EagleReference(as_transformers_runs_it(), made)
    assert answers_of(Engine(target(), drafter, controller="fixed"), GREEDY) == plain_answers(GREEDY)
    for text, proposal in drafter.seen[::5]:
        path: list[int] = []
        for token in proposal.tree.host_ids:
            assert token == int(reference.logits(text, path).argmax()), f"after {text} {path}"
            path.append(token)
    assert len(drafter.seen) > 20
    assert kind is Recorded or sum(each.replays for each in drafter.recorder.made) > 40


def test_forwards_that_are_recorded_are_counted() -> None:
    """And steps in which there was one are not settled, though the target records nothing."""
    drafter = Replayed(head())
    engine = Engine(target(), drafter, controller="fixed")
    counted, settled = [0], []
    engine.listeners.append(lambda step: counted.append(drafter.warmups))
    engine.listeners.append(lambda step: settled.append(step.settled))
    for _ in range(3):
        before = drafter.warmups
        engine.generate(list(PROMPTS[0]), SamplingParams(max_tokens=24))
    assert drafter.warmups == before > 0
    assert settled == [now == was for was, now in itertools.pairwise(counted)]


def test_forwards_of_each_tenants_heads_are_counted() -> None:
    """Those of one tenant's own, made of other weights, and of the heads that the others have."""
    tenants = Tenants(Replayed(head()))
    engine = Engine(target(), tenants, controller="fixed")
    tenants.take("a", head())
    counts = []
    for scope in ("a", None):
        engine.submit(list(PROMPTS[0]), SamplingParams(max_tokens=8), scope=scope)
        while engine.step():
            pass
        counts.append((tenants.warmups, tenants.base.warmups))
    assert counts[0][0] > 0 == counts[0][1]
    assert counts[1][0] > counts[0][0] and counts[1][1] == counts[1][0] - counts[0][0]


def test_the_worked_example_of_the_likeliest_tree() -> None:
    tree = LikeliestTree(RequestCache(64), DraftRequest(0, GREEDY), Budget(2, 2, 4))
    tree.grow([[10, 11]], [[math.log(0.6), math.log(0.3)]])
    assert tree.open_paths() == [(10,), (11,)]
    tree.grow([[12, 13], [14, 15]], [[math.log(0.4), math.log(0.2)], [math.log(0.9), math.log(0.1)]])
    proposal = tree.proposal()
    assert (proposal.tree.host_ids, proposal.tree.shape.parents) == ([10, 11, 14, 12], (-1, -1, 1, 0))


def test_what_it_holds_of_a_request_is_counted_by_its_tokens() -> None:
    """Keys and values of two heads of 32 entries, and vectors of two layers that were not read yet, in float32."""
    engine = Engine(target(), drafter := Eagle3(head()), controller="fixed")
    assert (drafter.held.request_bytes, drafter.held.token_bytes) == (0, 4 * (2 * 2 * 32 + 2 * 48))
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


def in_few_bits(made: Eagle3Head) -> Eagle3Head:
    """A head with the weights that those of few bits stand for: a layer gives them for a row with a single 1."""
    other = copy.deepcopy(made)
    for layer in other.modules():
        if isinstance(layer, torch.nn.Linear):
            (few,) = native_linears([layer], layers._FEW_BITS, torch.float32).values()
            layer.weight.copy_(few(torch.eye(layer.in_features)).T)
    return other


@needs_library
@torch.inference_mode()
def test_a_head_with_few_bits_says_what_its_drafts_are_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token inverts the distribution that goes with it: the page's with such weights, but for inputs of 8 bits."""
    monkeypatch.setattr(layers, "_LEAST_QUANTIZED", 0)
    made = head(draft_vocab=40)
    reference = EagleReference(as_transformers_runs_it(), in_few_bits(made))
    drafter = Recorded(made, num_speculative_tokens=3)
    engine = Engine(target(), drafter, controller="fixed", entropy=3)
    engine.generate([list(each) for each in PROMPTS], SamplingParams(max_tokens=16, temperature=0.8))
    away = []
    for (text, proposal), noise in zip(drafter.seen, drafter.noise, strict=True):
        tokens = proposal.tree.host_ids
        for depth, token in enumerate(tokens):
            given = proposal.probs[depth]
            uniform = torch.tensor([noise.uniform(Purpose.DRAFT, depth, depth)], dtype=torch.float64)
            assert token == int(draw(given[None], uniform))
            assert float(given.sum()) == pytest.approx(1.0) and not given[::2].any()  # which are not among its ids
            if len(away) < 40:
                page = torch.softmax(reference.logits(text, tokens[:depth]) / 0.8, -1)
                away.append(float(total_variation(given, page)))
    assert len(away) == 40 and max(away) < 0.08


@needs_library
@pytest.mark.parametrize("options", [{}, {"nodes": 7}, {"branching": (2, 2)}], ids=str)
@torch.inference_mode()
def test_few_bits_change_no_answer(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_LEAST_QUANTIZED", 0)
    drafter = Recorded(head(draft_vocab=40), **options)
    engine = Engine(target("native"), drafter, controller="fixed")
    for params in (GREEDY, SamplingParams(max_tokens=24, temperature=1.0, seed=5)):
        answers = engine.generate([list(each) for each in PROMPTS], params)
        assert [each.token_ids for each in answers] == plain_answers(params)
    assert sum(len(each.tree) for _, each in drafter.seen) > 40


@needs_library
@pytest.mark.parametrize("vocab", [VOCAB, 1600])
def test_the_native_ranking_is_that_of_torch(vocab: int) -> None:
    """With many equal logits, of ids that fill no vector and of those that do."""
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(1)).mul(2).round().div(2)
    found, expected = likeliest_of(logits, 8), TopK.of(logits, 8)
    assert found.ids.equal(expected.ids)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-5)
