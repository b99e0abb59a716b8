"""The Medusa drafter alone: which trees it proposes within which budget, from which vector, and its words."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kinds.test_vector_drafters import GREEDY, HEADS, SAMPLED, STAR, TARGET, TREE, VOCAB, begun, propose
from truedraft import SamplingParams
from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.proposal import DrawKind
from truedraft.core.rank_tree import RankTree
from truedraft.drafters import Medusa, from_spec
from truedraft.drafters.base import StepOutcome
from truedraft.drafters.heads.head import HeadRecord
from truedraft.errors import CompositionError, ModelError, OptionError
from truedraft.kinds.medusa.drafter import DEFAULT_NODES
from truedraft.kinds.medusa.folders import published_tree
from truedraft.kinds.medusa.guess_trees import GuessTrees
from truedraft.kinds.medusa.module import MedusaHeads

VECTOR = TARGET.vector_after([1, 2])


def checked(*trees: object, nodes: int | None = None) -> Medusa:
    made = Medusa(HEADS, *trees, nodes=nodes)  # type: ignore[arg-type]
    made.check(TARGET)
    return made


def fixed() -> Medusa:
    return checked({"greedy": TREE, "sampled": STAR})


def scores(vector: Tensor, temperature: float = 0.0, noise: KeyedNoise | None = None) -> Tensor:
    """Of each head, over all ids: logits + T min(T, 1) G, where head 0 decides the first token of the step."""
    logits = HEADS.logits(vector[None], TARGET.unembed, TARGET.finish_logits)[:, 0]
    if noise is None:
        return logits
    gumbel = torch.stack([noise.gumbel(depth, VOCAB, logits.device) for depth in range(3)])
    return logits + temperature * min(temperature, 1.0) * gumbel


def filled(tree: RankTree, of_heads: Tensor) -> list[int]:
    ranked = of_heads.argsort(dim=-1, descending=True).tolist()
    return [ranked[len(path) - 1][path[-1]] for path in tree.paths]


def likeliest(of_heads: Tensor, depth: int, nodes: int) -> set[tuple[int, ...]]:
    """Token paths by the definition: the largest products of the heads' probabilities, of all there are."""
    probs = of_heads.softmax(dim=-1).tolist()
    paths = [path for d in range(1, depth + 1) for path in itertools.product(range(VOCAB), repeat=d)]
    paths.sort(key=lambda path: -math.prod(probs[head][token] for head, token in enumerate(path)))
    return set(paths[:nodes])


def test_greedy_and_other_requests_have_their_own_trees_in_one_batch() -> None:
    vectors = [TARGET.vector_after([1, token]) for token in range(4)]
    params = [GREEDY, SamplingParams(temperature=0.5, seed=5), SAMPLED, SamplingParams(seed=1)]
    drafter = fixed()
    requests = [begun(drafter, i, *each) for i, each in enumerate(zip(params, vectors, strict=True))]
    found = propose(drafter, requests)
    for number, (proposal, tree) in enumerate(zip(found, (TREE, STAR, STAR, TREE), strict=True)):
        noise = KeyedNoise(5, 3, number) if number == 1 else None
        assert proposal.tree.host_ids == filled(tree, scores(vectors[number], 0.5, noise))
        assert (proposal.tree.shape, proposal.kinds, proposal.probs) == (tree.shape, {DrawKind.DETERMINISTIC}, None)
    assert drafter.kinds == {DrawKind.DETERMINISTIC}


@pytest.mark.parametrize(
    ("budget", "paths"),
    [
        (Budget(9, 9, 99), TREE.paths),
        (Budget(3, 3, 4), TREE.paths[:4]),
        (Budget(1, 3), ((0,), (1,), (2,))),
        (Budget(2, 3), ((0,), (0, 0), (1,), (0, 1), (2,))),
        (Budget(3, 1), ((0,), (0, 0), (0, 0, 0))),
        (Budget(2, 2, 2), ((0,), (0, 0))),
        (Budget(3, 0), ()),
        (NO_DRAFT, ()),
    ],
)
def test_a_budget_cuts_the_tree_by_order(budget: Budget, paths: tuple[tuple[int, ...], ...]) -> None:
    drafter = fixed()
    (proposal,) = propose(drafter, [begun(drafter, 0, GREEDY, VECTOR)], budget)
    assert proposal.tree.host_ids == filled(RankTree(paths), scores(VECTOR))


def test_nodes() -> None:
    drafter = fixed()
    assert (drafter.nodes, drafter.nodes_chosen, drafter.limits) == (DEFAULT_NODES, False, Budget(3, 4, 6))
    assert (drafter.tree_for(GREEDY), drafter.tree_for(SAMPLED)) == (TREE, STAR)
    fewer = drafter.with_nodes(2)
    fewer.check(TARGET)
    assert (fewer.nodes, fewer.nodes_chosen, fewer.limits) == (2, True, Budget(2, 2, 2))
    assert fewer.tree_for(GREEDY) == TREE, "the whole tree, so that another number can be chosen"
    assert len(propose(fewer, [begun(fewer, 0, GREEDY, VECTOR)])[0].tree) == 2
    assert drafter.with_nodes(0).limits.is_zero
    assert Medusa(HEADS, {"sampled": STAR}).tree_for(GREEDY) == STAR, "one tree serves both kinds"
    assert Medusa(HEADS, GuessTrees(3)).tree_for(GREEDY) is None


@pytest.mark.parametrize("budget", [Budget(3, 64, 7), Budget(2, 64, 30), Budget(1, 64), Budget(3, 64, 1)])
def test_by_default_the_heads_likeliest_paths_are_drafted(budget: Budget) -> None:
    drafter = checked(GuessTrees(3), nodes=12)
    assert (drafter.limits, drafter.tree_kind) == (Budget(3, 12, 12), "likeliest")
    vectors = [TARGET.vector_after([1, token]) for token in range(4)]
    requests = [begun(drafter, i, (GREEDY, SAMPLED)[i % 2], vector) for i, vector in enumerate(vectors)]
    made = propose(drafter, requests, *[budget] * 4)
    for vector, proposal in zip(vectors, made, strict=True):
        found = {proposal.tree.path_tokens(node) for node in range(len(proposal.tree))}
        nodes = min(12, budget.nodes, VOCAB if budget.depth == 1 else 1000)
        assert found == likeliest(scores(vector), budget.depth, nodes)
    assert len({proposal.tree.shape for proposal in made}) > 1 or budget.nodes == 1 or budget.depth == 1
    narrow = propose(drafter, requests[:1], Budget(3, 2, 6))[0].tree
    assert len(narrow) == 6 and all(len(children) <= 2 for children in narrow.shape.children)
    shallow = checked(GuessTrees(2), nodes=40)
    assert propose(shallow, [begun(shallow, 0, GREEDY, VECTOR)])[0].tree.shape.depth == 2, "by fewer heads"


@pytest.mark.parametrize("temperature", [0.8, 1.0, 1.7])
def test_coupled_requests_get_what_their_noise_makes_likeliest(temperature: float) -> None:
    """The likeliest paths by the softmax of perturbed logits, of all there are; another noise gives others."""
    drafter = checked(GuessTrees(3), nodes=12)
    request = begun(drafter, 0, SamplingParams(temperature=temperature, seed=1), VECTOR)
    seen = set()
    for position in range(8):
        noise = KeyedNoise(1, position, 0)
        (proposal,) = drafter.propose([request], [Budget(3, 64, 9)], [noise])
        found = {proposal.tree.path_tokens(node) for node in range(len(proposal.tree))}
        assert found == likeliest(scores(VECTOR, temperature, noise), 3, 9)
        seen.add(frozenset(found))
        (narrow,) = drafter.propose([request], [Budget(2, 1, 9)], [noise])
        assert narrow.tree.shape.parents == (-1, 0), "a budget of one child and two tokens"
    assert len(seen) > 1


def test_the_vector_is_that_of_the_last_drawn_token() -> None:
    """It comes with each step, and is kept as a copy."""
    drafter = fixed()
    request = begun(drafter, 0, GREEDY, VECTOR)
    (proposal,) = propose(drafter, [request])
    for path in ((), (0,), (2,), (0, 3), (0, 1, 4)):
        wanted = TARGET.vector_after([1, (path[-1] + 1 if path else 0) % VOCAB])
        hidden = torch.cat([wanted, torch.zeros(3)])[None]  # a padded target's is wider
        drafter.observe([request], [StepOutcome(proposal, path, (0,) * (len(path) + 1), hidden)])
        hidden.fill_(torch.nan)  # the next forward may write over it
        assert propose(drafter, [request])[0].tree.host_ids == filled(TREE, scores(wanted))


def test_trees_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CompositionError, match="7 ranks wide"):
        checked({"greedy": RankTree.cartesian([7])})
    with pytest.raises(OptionError, match=r"4 deep.*there are 3"):
        checked({"greedy": published_tree()})


# --- words ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("heads")
    HEADS.save(place, HeadRecord(TARGET.name, TARGET.fingerprint, {"greedy": TREE, "sampled": STAR}))
    return place


def test_words_become_a_drafter(folder: Path, tmp_path: Path) -> None:
    def medusa(options: str) -> Medusa:
        made = from_spec(f"medusa:{folder}{options}", TARGET)
        assert isinstance(made, Medusa)
        return made

    plain = medusa("")
    assert (plain.nodes_chosen, plain.tree_for(GREEDY), plain.tree_for(SAMPLED)) == (False, TREE, STAR)
    assert (plain.tree_kind, plain.limits) == ("likeliest", Budget(3, 16, 16))
    counted = medusa(",tree=counted")
    assert (counted.tree_kind, counted.nodes_chosen, counted.limits) == ("fixed", False, Budget(3, 4, 6))
    assert (counted.tree_for(GREEDY), counted.tree_for(SAMPLED)) == (TREE, STAR)
    assert medusa(",tree=counted,nodes=2").limits == Budget(2, 2, 2)
    assert (medusa(",nodes=3").nodes, medusa(",nodes=0").nodes) == (3, 0)
    full = medusa(",branching=3-2")
    assert (full.nodes, full.nodes_chosen, full.tree_for(SAMPLED)) == (9, True, RankTree.cartesian([3, 2]))
    assert full.tree_kind == "fixed" and medusa(",branching=3-2,nodes=4").nodes == 4
    (tmp_path / "tree.json").write_text(json.dumps([[1], [0, 0], [0]]))
    listed = medusa(f",tree={tmp_path / 'tree.json'}")
    assert (listed.nodes, listed.tree_for(GREEDY)) == (3, RankTree(((0,), (1,), (0, 0))))


def test_what_was_measured_of_the_trees_comes_with_the_folder(tmp_path: Path) -> None:
    facts = {"trees": {"greedy": {"likeliest": {"nodes": [1, 2], "tokens": [1.5, 1.8]}}}}
    HEADS.save(tmp_path, HeadRecord(TARGET.name, TARGET.fingerprint, {"greedy": TREE}, facts))
    drafter = Medusa(MedusaHeads.load(tmp_path))
    curve, older = drafter.acceptance_curve(GREEDY), drafter.acceptance_curve(SAMPLED)
    assert curve is not None and curve.marginal_gains == pytest.approx((0.5, 0.3)) and curve.depths == (0, 1, 2)
    assert older is not None and older.marginal_gains == TREE.survival, "where it was not measured, the counted tree's"
    facts["trees"]["greedy"]["likeliest"]["tokens"] = [1.5]
    HEADS.save(tmp_path, HeadRecord(TARGET.name, TARGET.fingerprint, {"greedy": TREE}, facts))
    with pytest.raises(ModelError, match="damaged"):
        Medusa(MedusaHeads.load(tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("nodes=three", "'three'"),
        ("nodes=-1", "0 or more"),
        ("branching=2-0", "1 or more"),
        ("branching=1-1-1-1", "4 deep"),
        ("branching=2,tree=counted", "not both"),
        ("nodes=300", "at most 256 nodes, got 300"),
        ("tree=nowhere.json", "nowhere.json"),
        ("tree=~nobody-is-called-so/tree.json", "nobody-is-called-so"),
    ],
)
def test_unusable_words(folder: Path, options: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        from_spec(f"medusa:{folder},{options}", TARGET)


@pytest.mark.parametrize("content", ["[[0], 1]", "[]", '{"paths": []}', "[[0], [true]]", "[[0], [1, 0.5]]", "[[0"])
def test_files_that_hold_no_tree(folder: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "tree.json").write_text(content)
    with pytest.raises(OptionError, match="tree"):
        from_spec(f"medusa:{folder},tree={tmp_path / 'tree.json'}", TARGET)
