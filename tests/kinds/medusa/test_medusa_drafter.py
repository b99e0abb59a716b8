"""The Medusa drafter alone: what it proposes, within which budget, from which vector, and which target it refuses."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.head_models import MarkovWithHead, random_heads
from truedraft import SamplingParams
from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.rank_tree import RankTree
from truedraft.drafters import Medusa, from_spec
from truedraft.drafters.base import DraftRequest, StepOutcome
from truedraft.drafters.heads.head import HeadRecord
from truedraft.errors import (
    CompositionError,
    ModelError,
    OptionError,
)
from truedraft.kinds.medusa.drafter import DEFAULT_NODES
from truedraft.kinds.medusa.folders import published_tree
from truedraft.kinds.medusa.guess_trees import GuessTrees
from truedraft.kinds.medusa.module import MedusaHeads

VOCAB = 6
TREE = RankTree(((0,), (0, 0), (1,), (0, 1), (0, 0, 0), (2,)), (0.5, 0.3, 0.2, 0.15, 0.1, 0.05))
STAR = RankTree(((0,), (1,), (2,), (3,)))
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)
SEEDED = SamplingParams(temperature=0.5, seed=5)
NOISE = KeyedNoise(0, 0, 0)


@pytest.fixture
def target() -> MarkovWithHead:
    return MarkovWithHead.random(VOCAB, seed=1)


@pytest.fixture
def heads(target: MarkovWithHead) -> MedusaHeads:
    return random_heads(target, heads=3, layers=2)


@pytest.fixture
def drafter(target: MarkovWithHead, heads: MedusaHeads) -> Medusa:
    made = Medusa(heads, {"greedy": TREE, "sampled": STAR})
    made.check(target)
    return made


def begun(drafter: Medusa, number: int, params: SamplingParams, vector: Tensor | None) -> DraftRequest:
    """A request whose prompt was read."""
    request = DraftRequest(number, params, [1, 2])
    drafter.begin(request)
    hidden = None if vector is None else vector[None]
    drafter.observe([request], [StepOutcome(Proposal.empty(), (), (3,), hidden)])
    return request


def ranked(target: MarkovWithHead, heads: MedusaHeads, vector: Tensor) -> list[list[int]]:
    """Of each head all ids, the likeliest first."""
    logits = heads.logits(vector[None], target.unembed, target.finish_logits)[:, 0]
    return logits.argsort(dim=-1, descending=True).tolist()


def ranked_with_noise(
    target: MarkovWithHead, heads: MedusaHeads, vector: Tensor, temperature: float, noise: KeyedNoise
) -> list[list[int]]:
    """Of each head all ids by logits + T min(T, 1) G; head 0 decides the first token of the step."""
    logits = heads.logits(vector[None], target.unembed, target.finish_logits)[:, 0]
    shared = [noise.gumbel(depth, target.vocab_size, logits.device) for depth in range(len(logits))]
    gumbel = torch.stack(shared)
    weight = temperature * min(temperature, 1.0)
    return (logits + weight * gumbel).argsort(dim=-1, descending=True).tolist()


def tokens_of(tree: RankTree, guesses: list[list[int]]) -> list[int]:
    return [guesses[len(path) - 1][path[-1]] for path in tree.paths]


def propose(drafter: Medusa, requests: Sequence[DraftRequest], *budgets: Budget) -> list[Proposal]:
    given = budgets or (drafter.limits,) * len(requests)
    return drafter.propose(requests, given, [NOISE] * len(requests))


def test_the_tree_is_filled_with_the_heads_guesses(target: MarkovWithHead, heads: MedusaHeads, drafter: Medusa) -> None:
    vector = target.vector_after([1, 2])
    proposal = propose(drafter, [begun(drafter, 0, GREEDY, vector)])[0]
    proposal.check()
    assert proposal.tree.host_ids == tokens_of(TREE, ranked(target, heads, vector))
    assert proposal.tree.shape == TREE.shape
    assert (proposal.kinds, proposal.probs) == ({DrawKind.DETERMINISTIC}, None)
    assert drafter.kinds == {DrawKind.DETERMINISTIC}


def test_greedy_and_other_requests_have_their_own_trees_in_one_batch(
    target: MarkovWithHead, heads: MedusaHeads, drafter: Medusa
) -> None:
    vectors = [target.vector_after([1, token]) for token in range(4)]
    params = [GREEDY, SEEDED, SAMPLED, SamplingParams(seed=1)]
    requests = [begun(drafter, i, *each) for i, each in enumerate(zip(params, vectors, strict=True))]
    noise = [KeyedNoise(5, 3, i) for i in range(4)]
    together = drafter.propose(requests, [drafter.limits] * 4, noise)
    assert [proposal.tree.shape for proposal in together] == [TREE.shape, STAR.shape, STAR.shape, TREE.shape]
    for place, (vector, tree) in enumerate(zip(vectors, (TREE, STAR, STAR, TREE), strict=True)):
        if place == 1:
            guesses = ranked_with_noise(target, heads, vector, 0.5, noise[1])
        else:
            guesses = ranked(target, heads, vector)
        assert together[place].tree.host_ids == tokens_of(tree, guesses)
        alone = drafter.propose([requests[place]], [drafter.limits], [noise[place]])[0]
        assert alone.tree.host_ids == together[place].tree.host_ids
        assert (together[place].kinds, together[place].probs) == ({DrawKind.DETERMINISTIC}, None)


@pytest.mark.parametrize(
    ("budget", "paths"),
    [
        (Budget(3, 3, 6), TREE.paths),
        (Budget(9, 9, 99), TREE.paths),
        (Budget(3, 3, 4), TREE.paths[:4]),
        (Budget(1, 3), ((0,), (1,), (2,))),
        (Budget(2, 3), ((0,), (0, 0), (1,), (0, 1), (2,))),
        (Budget(3, 1), ((0,), (0, 0), (0, 0, 0))),
        (Budget(2, 2, 2), ((0,), (0, 0))),
        (Budget(0), ()),
        (Budget(3, 0), ()),
        (NO_DRAFT, ()),
    ],
)
def test_a_budget_cuts_the_tree_by_order(
    target: MarkovWithHead, heads: MedusaHeads, drafter: Medusa, budget: Budget, paths: tuple[tuple[int, ...], ...]
) -> None:
    vector = target.vector_after([1, 2])
    proposal = propose(drafter, [begun(drafter, 0, GREEDY, vector)], budget)[0]
    assert proposal.tree.host_ids == tokens_of(RankTree(paths), ranked(target, heads, vector))
    assert len(proposal.tree) <= budget.nodes
    assert proposal.tree.shape.depth <= budget.depth


def test_nodes(target: MarkovWithHead, heads: MedusaHeads, drafter: Medusa) -> None:
    assert (drafter.nodes, drafter.nodes_chosen, drafter.limits) == (DEFAULT_NODES, False, Budget(3, 4, 6))
    assert drafter.tree_for(GREEDY) is TREE
    assert drafter.tree_for(SAMPLED) is STAR
    fewer = drafter.with_nodes(2)
    fewer.check(target)
    assert (fewer.nodes, fewer.nodes_chosen, fewer.limits) == (2, True, Budget(2, 2, 2))
    assert fewer.tree_for(GREEDY) == TREE, "the whole tree, so that another number can be chosen"
    request = begun(fewer, 0, GREEDY, target.vector_after([1, 2]))
    assert len(propose(fewer, [request])[0].tree) == 2
    assert drafter.with_nodes(0).limits.is_zero


def likeliest(
    target: MarkovWithHead, heads: MedusaHeads, vector: Tensor, depth: int, nodes: int
) -> set[tuple[int, ...]]:
    """Token paths by the definition: the largest products of the heads' probabilities, of all there are."""
    probs = heads.logits(vector[None], target.unembed, target.finish_logits)[:, 0].softmax(dim=-1).tolist()
    paths = [path for d in range(1, depth + 1) for path in itertools.product(range(target.vocab_size), repeat=d)]
    paths.sort(key=lambda path: -math.prod(probs[head][token] for head, token in enumerate(path)))
    return set(paths[:nodes])


@pytest.mark.parametrize("budget", [Budget(3, 64, 7), Budget(2, 64, 30), Budget(1, 64), Budget(3, 64, 1)])
def test_by_default_the_heads_likeliest_paths_are_drafted(
    target: MarkovWithHead, heads: MedusaHeads, budget: Budget
) -> None:
    drafter = Medusa(heads, GuessTrees(3), nodes=12)
    drafter.check(target)
    assert (drafter.limits, drafter.tree_kind) == (Budget(3, 12, 12), "likeliest")
    vectors = [target.vector_after([1, token]) for token in range(4)]
    requests = [begun(drafter, i, (GREEDY, SAMPLED)[i % 2], vector) for i, vector in enumerate(vectors)]
    made = propose(drafter, requests, *[budget] * 4)
    for vector, proposal in zip(vectors, made, strict=True):
        proposal.check()
        assert (proposal.kinds, proposal.probs) == ({DrawKind.DETERMINISTIC}, None)
        found = {proposal.tree.path_tokens(node) for node in range(len(proposal.tree))}
        nodes = min(12, budget.nodes, VOCAB if budget.depth == 1 else 1000)
        assert found == likeliest(target, heads, vector, budget.depth, nodes)
    assert len({proposal.tree.shape for proposal in made}) > 1 or budget.nodes == 1 or budget.depth == 1
    narrow = propose(drafter, requests[:1], Budget(3, 2, 6))[0].tree
    assert len(narrow) == 6 and all(len(children) <= 2 for children in narrow.shape.children)


@pytest.mark.parametrize("temperature", [0.8, 1.0, 1.7])
def test_coupled_requests_get_what_their_noise_makes_likeliest(
    target: MarkovWithHead, heads: MedusaHeads, temperature: float
) -> None:
    """The likeliest paths by the softmax of perturbed logits, of all there are; another noise gives others."""
    drafter = Medusa(heads, GuessTrees(3), nodes=12)
    drafter.check(target)
    vector = target.vector_after([1, 2])
    request = begun(drafter, 0, SamplingParams(temperature=temperature, seed=1), vector)
    logits = heads.logits(vector[None], target.unembed, target.finish_logits)[:, 0]
    seen = set()
    for position in range(8):
        noise = KeyedNoise(1, position, 0)
        shared = [noise.gumbel(depth, VOCAB, logits.device) for depth in range(3)]
        gumbel = torch.stack(shared)
        probs = (logits + temperature * min(temperature, 1.0) * gumbel).softmax(dim=-1).tolist()
        paths = [path for d in (1, 2, 3) for path in itertools.product(range(VOCAB), repeat=d)]
        paths.sort(key=lambda path: -math.prod(probs[head][token] for head, token in enumerate(path)))
        (proposal,) = drafter.propose([request], [Budget(3, 64, 9)], [noise])
        found = {proposal.tree.path_tokens(node) for node in range(len(proposal.tree))}
        assert found == set(paths[:9])
        seen.add(frozenset(found))
        (narrow,) = drafter.propose([request], [Budget(2, 1, 9)], [noise])
        assert narrow.tree.shape.parents == (-1, 0), "a budget of one child and two tokens"
    assert len(seen) > 1


def test_trees_may_be_chosen_by_fewer_heads(target: MarkovWithHead, heads: MedusaHeads) -> None:
    drafter = Medusa(heads, GuessTrees(2), nodes=40)
    drafter.check(target)
    assert propose(drafter, [begun(drafter, 0, GREEDY, target.vector_after([1, 2]))])[0].tree.shape.depth == 2
    with pytest.raises(OptionError, match="there are 3"):
        Medusa(heads, GuessTrees(4))
    with pytest.raises(OptionError, match="at most 256"):
        Medusa(heads, GuessTrees(3), nodes=1000)
    assert Medusa(heads, GuessTrees(3)).tree_for(GREEDY) is None


def test_one_tree_serves_both_kinds(heads: MedusaHeads) -> None:
    assert Medusa(heads, {"sampled": STAR}).tree_for(GREEDY) == STAR
    assert Medusa(heads, {"greedy": TREE}).tree_for(SAMPLED) == TREE


def test_the_vector_is_that_of_the_last_drawn_token(
    target: MarkovWithHead, heads: MedusaHeads, drafter: Medusa
) -> None:
    """It comes with each step, and is kept as a copy."""
    request = begun(drafter, 0, GREEDY, target.vector_after([1, 2]))
    proposal = propose(drafter, [request])[0]
    for path in ((), (0,), (2,), (0, 3), (0, 1, 4)):
        wanted = target.vector_after([1, (path[-1] + 1 if path else 0) % VOCAB])
        hidden = torch.cat([wanted, torch.zeros(3)])[None]  # a padded target's is wider
        drafter.observe([request], [StepOutcome(proposal, path, (0,) * (len(path) + 1), hidden)])
        hidden.fill_(torch.nan)  # the next forward may write over it
        assert propose(drafter, [request])[0].tree.host_ids == tokens_of(TREE, ranked(target, heads, wanted))


# --- what does not fit ---


def test_trees_that_do_not_fit_are_refused(heads: MedusaHeads, target: MarkovWithHead) -> None:
    with pytest.raises(CompositionError, match="7 ranks wide"):
        Medusa(heads, {"greedy": RankTree.cartesian([7])}).check(target)
    with pytest.raises(OptionError, match=r"4 deep.*there are 3"):
        Medusa(heads, {"greedy": published_tree()})
    with pytest.raises(OptionError, match="0 or more"):
        Medusa(heads, {"greedy": TREE}, nodes=-1)
    with pytest.raises(OptionError, match="'greedy' and 'sampled'"):
        Medusa(heads, {"greeedy": TREE})
    with pytest.raises(OptionError, match="got \\[\\]"):
        Medusa(heads, {})


# --- words ---


@pytest.fixture
def folder(tmp_path: Path, heads: MedusaHeads, target: MarkovWithHead) -> Path:
    heads.save(tmp_path / "heads", HeadRecord(target.name, target.fingerprint, {"greedy": TREE, "sampled": STAR}))
    return tmp_path / "heads"


def medusa(spec: str, target: MarkovWithHead) -> Medusa:
    made = from_spec(spec, target)
    assert isinstance(made, Medusa)
    return made


def test_words_become_a_drafter(folder: Path, target: MarkovWithHead, tmp_path: Path) -> None:
    plain = medusa(f"medusa:{folder}", target)
    assert (plain.nodes_chosen, plain.tree_for(GREEDY), plain.tree_for(SAMPLED)) == (False, TREE, STAR)
    assert (plain.tree_kind, plain.limits) == ("likeliest", Budget(3, 16, 16))
    counted = medusa(f"medusa:{folder},tree=counted", target)
    assert (counted.tree_kind, counted.nodes_chosen, counted.limits) == ("fixed", False, Budget(3, 4, 6))
    assert (counted.tree_for(GREEDY), counted.tree_for(SAMPLED)) == (TREE, STAR)
    assert medusa(f"medusa:{folder},tree=counted,nodes=2", target).limits == Budget(2, 2, 2)
    assert (medusa(f"medusa:{folder},nodes=3", target).nodes, medusa(f"medusa:{folder},nodes=0", target).nodes) == (
        3,
        0,
    )
    full = medusa(f"medusa:{folder},branching=3-2", target)
    assert (full.nodes, full.nodes_chosen, full.tree_for(SAMPLED)) == (9, True, RankTree.cartesian([3, 2]))
    assert full.tree_kind == "fixed"
    assert medusa(f"medusa:{folder},branching=3-2,nodes=4", target).nodes == 4
    (tmp_path / "tree.json").write_text(json.dumps([[1], [0, 0], [0]]))
    listed = medusa(f"medusa:{folder},tree={tmp_path / 'tree.json'}", target)
    assert (listed.nodes, listed.tree_for(GREEDY)) == (3, RankTree(((0,), (1,), (0, 0))))


def test_what_was_measured_of_the_trees_comes_with_the_folder(
    tmp_path: Path, heads: MedusaHeads, target: MarkovWithHead
) -> None:
    facts = {"trees": {"greedy": {"likeliest": {"nodes": [1, 2], "tokens": [1.5, 1.8]}}}}
    heads.save(tmp_path, HeadRecord(target.name, target.fingerprint, {"greedy": TREE}, facts))
    drafter = Medusa(MedusaHeads.load(tmp_path))
    curve, older = drafter.acceptance_curve(GREEDY), drafter.acceptance_curve(SAMPLED)
    assert curve is not None and curve.marginal_gains == pytest.approx((0.5, 0.3)) and curve.depths == (0, 1, 2)
    assert older is not None and older.marginal_gains == TREE.survival, (
        "where it was not measured, the counted tree stands in"
    )
    facts["trees"]["greedy"]["likeliest"]["tokens"] = [1.5]
    heads.save(tmp_path, HeadRecord(target.name, target.fingerprint, {"greedy": TREE}, facts))
    with pytest.raises(ModelError, match="damaged"):
        Medusa(MedusaHeads.load(tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("nodes=three", "'three'"),
        ("nodes=-1", "0 or more"),
        ("branching=2-0", "1 or more"),
        ("branching=1-1-1-1", "4 deep"),
        ("branching=2,tree=x.json", "not both"),
        ("branching=2,tree=counted", "not both"),
        ("nodes=300", "at most 256 nodes, got 300"),
        ("tree=nowhere.json", "nowhere.json"),
        ("tree=~nobody-is-called-so/tree.json", "nobody-is-called-so"),
    ],
)
def test_unusable_words(folder: Path, target: MarkovWithHead, options: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        from_spec(f"medusa:{folder},{options}", target)


@pytest.mark.parametrize("content", ["[[0], 1]", "[]", '{"paths": []}', "[[0], [true]]", "[[0], [1, 0.5]]", "[[0"])
def test_files_that_hold_no_tree(folder: Path, target: MarkovWithHead, tmp_path: Path, content: str) -> None:
    (tmp_path / "tree.json").write_text(content)
    with pytest.raises(OptionError, match="tree"):
        from_spec(f"medusa:{folder},tree={tmp_path / 'tree.json'}", target)
