"""EAGLE-3 heads as drafters, held to a slow reference that is written from the paper's page, token by token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from support.backends import HostRecorder, graph_backend, native_backend
from support.eagle_reference import EagleReference, random_eagle
from support.tiny_models import CONTEXT, PROMPTS, VOCAB, build
from truedraft import Engine, SamplingParams
from truedraft.cache import RequestCache
from truedraft.core.budget import Budget
from truedraft.core.proposal import Proposal
from truedraft.core.rank_tree import RankTree
from truedraft.drafters import DraftRequest, Eagle3, Portfolio, PromptLookup
from truedraft.drafters.heads.levels import LikeliestTree, drawn_tree
from truedraft.errors import CompositionError, OptionError
from truedraft.heads import Eagle3Config, Eagle3Head, HeadRecord
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend
from truedraft.models.huggingface import HuggingFaceModel

SIZES = Eagle3Config(48, VOCAB, (0, 1), heads=4, kv_heads=2, head=16, inner=64, reach=3, most_positions=CONTEXT)
BACKENDS = {
    "stock": StockBackend,
    "native": native_backend,
    "graphs": lambda model: graph_backend(model, HostRecorder()),
}
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
GREEDY = SamplingParams(max_tokens=24)


def as_transformers_runs_it() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return build(config, seed=3, spread=0.15)


def target(backend: str = "stock") -> HuggingFaceModel:
    return HuggingFaceModel(as_transformers_runs_it(), None, "tiny", BACKENDS[backend])


def head(**changes: Any) -> Eagle3Head:
    return random_eagle(replace(SIZES, **changes))


class Recorded(Eagle3):
    """Notes each request's text and what was proposed behind it."""

    def propose(self, batch: Sequence[DraftRequest], budgets: Any, noise: Any) -> list[Proposal]:
        proposals = super().propose(batch, budgets, noise)
        self.seen = getattr(self, "seen", [])
        self.seen += [(list(each.tokens), own) for each, own in zip(batch, proposals, strict=True)]
        self.depths = [*getattr(self, "depths", []), *(each.depth for each in budgets)]
        return proposals


needs_library = pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_chains_are_what_the_page_says(name: str) -> None:
    model, made = target(), head(**VARIANTS[name])
    reference = EagleReference(as_transformers_runs_it(), made)
    drafter = Recorded(made)
    engine = Engine(model, drafter, controller="fixed")
    answers = engine.generate([list(each) for each in PROMPTS], GREEDY)
    assert [each.token_ids for each in answers] == plain_answers(GREEDY)
    for text, proposal in drafter.seen[::5]:
        path: list[int] = []
        for token in proposal.tree.host_ids:
            assert token == int(reference.logits(text, path).argmax()), f"behind {text} {path}"
            path.append(token)
    assert len(drafter.seen) > 20


@pytest.mark.parametrize("backend", ["stock", pytest.param("native", marks=needs_library)])
@torch.inference_mode()
def test_trees_of_sampled_requests_have_the_pages_distributions(backend: str) -> None:
    model, made = target(backend), head(draft_vocab=40)
    reference, drafter = EagleReference(as_transformers_runs_it(), made), Recorded(made, branching=(2, 2, 1))
    engine = Engine(model, drafter, controller="fixed", entropy=3)
    engine.generate([list(each) for each in PROMPTS], SamplingParams(max_tokens=16, temperature=0.8))
    for text, proposal in drafter.seen[::7]:
        tree = proposal.tree
        for row, draws in enumerate(proposal.draws):
            if not draws:
                continue
            path = [tree.host_ids[node] for node in tree.shape.path(row - 1)] if row else []
            expected = torch.softmax(reference.logits(text, path).double() / 0.8, -1)
            torch.testing.assert_close(proposal.probs[draws[0].dist].double(), expected, rtol=0, atol=2e-5)
    assert any(len(proposal.tree) > 5 for _, proposal in drafter.seen)


@pytest.mark.parametrize("options", [{}, {"logit_bias": {7: 3.0}, "presence_penalty": 0.5}], ids=["plain", "shaped"])
@torch.inference_mode()
def test_the_likeliest_tree_has_the_largest_products_of_a_search_by_hand(options: dict[str, Any]) -> None:
    params, made = SamplingParams(max_tokens=16, **options), head()
    reference, drafter = EagleReference(as_transformers_runs_it(), made), Recorded(made, nodes=7, beams=3)
    answers = Engine(target(), drafter, controller="fixed").generate([list(each) for each in PROMPTS], params)
    assert [each.token_ids for each in answers] == plain_answers(params)
    whole = [each for each, depth in zip(drafter.seen, drafter.depths, strict=True) if depth == SIZES.reach]
    for text, proposal in whole[::6] if not options else ():
        found: dict[tuple[int, ...], float] = {}
        opened: list[tuple[int, ...]] = [()]
        for _ in range(SIZES.reach):
            level = {}
            for path in opened:
                logs, ids = torch.log_softmax(reference.logits(text, path), -1).topk(3)
                level |= {(*path, int(i)): found.get(path, 0.0) + float(log) for i, log in zip(ids, logs, strict=True)}
            found |= level
            opened = sorted(level, key=lambda path: -level[path])[:3]
        tree = proposal.tree
        paths = {tuple(tree.host_ids[each] for each in tree.shape.path(node)) for node in range(len(tree))}
        assert paths == set(sorted(found, key=lambda path: -found[path])[:7])


def test_the_worked_example_of_the_likeliest_tree() -> None:
    tree = LikeliestTree(RequestCache(64), DraftRequest(0, GREEDY), Budget(2, 2, 4))
    tree.grow([[10, 11]], [[math.log(0.6), math.log(0.3)]])
    assert tree.open_paths() == [(10,), (11,)]
    tree.grow([[12, 13], [14, 15]], [[math.log(0.4), math.log(0.2)], [math.log(0.9), math.log(0.1)]])
    proposal = tree.proposal()
    assert (proposal.tree.host_ids, proposal.tree.shape.parents) == ([10, 11, 14, 12], (-1, -1, 1, 0))


@torch.inference_mode()
def test_seeded_answers_are_those_of_plain_decoding() -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5)
    answers = Engine(target(), Eagle3(head(draft_vocab=40)), controller="fixed").generate([list(PROMPTS[0])], params)
    assert answers[0].token_ids == plain_answers(params, PROMPTS[:1])[0]


@torch.inference_mode()
def test_tokens_that_others_drafted_are_read_with_the_targets_vectors() -> None:
    """Beside prompt lookup, and at steps in which nothing is drafted: later chains are those of the page."""
    model, made = target(), head()
    drafter = Recorded(made)
    engine = Engine(model, Portfolio({"eagle": drafter, "prompt-lookup": PromptLookup()}), controller="in-turn")
    prompt = list(PROMPTS[0]) * 3
    answer = engine.generate([prompt], GREEDY)[0]
    assert answer.token_ids == plain_answers(GREEDY, [prompt])[0]
    reference = EagleReference(as_transformers_runs_it(), made)
    drafted = [(text, own) for text, own in drafter.seen if len(own.tree)]
    for text, proposal in drafted:
        assert proposal.tree.host_ids[0] == int(reference.logits(text, ()).argmax())
    assert len(drafted) > 3


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(CompositionError, match=r"reads layers 0, 7, and tiny shows 3"):
        Engine(target(), Eagle3(head(layers=(0, 7))))
    foreign = head(vocab_size=200, draft_vocab=60)
    with pytest.raises(CompositionError, match="guesses the id 119, and tiny has 97 ids"):
        Engine(target(), Eagle3(foreign))
    with pytest.raises(OptionError, match="takes branching or nodes"):
        Eagle3(head(), nodes=8, branching=(2, 1))
    with pytest.raises(OptionError, match="layers are not named"):
        Eagle3(head(layers=()))


def test_a_folder_holds_what_was_saved(tmp_path: Any) -> None:
    made = head(draft_vocab=40, fc_norm=True)
    made.save(tmp_path, HeadRecord("tiny", "f"), dtype=torch.float32)
    kept = Eagle3Head.load(tmp_path)
    assert kept.config == made.config and kept.record.target_name == "tiny"
    for name, weight in made.state_dict().items():
        assert kept.state_dict()[name].equal(weight), name


def plain_answers(params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Any]:
    return [each.token_ids for each in Engine(target()).generate([list(each) for each in prompts], params)]


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
    assert all(own.probs is not None for _, own in drafter.seen if len(own.tree))
