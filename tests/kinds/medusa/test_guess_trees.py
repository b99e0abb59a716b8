"""Guesses become trees: by trees of ranks, or at each step the paths that the heads hold likeliest."""

from __future__ import annotations

import math

import pytest
import torch

from support.head_models import SHARPENED
from truedraft.core import transfers
from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.params import SamplingParams
from truedraft.core.rank_tree import RankTree
from truedraft.core.theory import AcceptanceCurve
from truedraft.core.top_k import TopK
from truedraft.drafters.heads.acceptance import AcceptanceOdds
from truedraft.drafters.heads.calibration import Calibration, tree_curves
from truedraft.errors import CompositionError, ModelError, OptionError
from truedraft.kinds.medusa.guess_trees import MOST_CHOSEN_NODES, MOST_RANKS, GuessTrees, fixed_trees, trees_for

TREE = RankTree(((0,), (0, 0), (1,), (0, 1), (0, 0, 0), (2,)), (0.5, 0.3, 0.2, 0.15, 0.1, 0.05))
STAR = RankTree(((0,), (1,), (2,), (3,)))
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)
SEEDED = SamplingParams(temperature=1.0, seed=1)
FACTS = {"trees": {"greedy": {"likeliest": {"nodes": [1, 4], "tokens": [1.5, 1.8]}}, "sampled": {"nodes": 3}}}


def guesses(*rows: list[list[float]]) -> TopK:
    """Of each row the heads' probabilities; ids are 100 row + 10 head + rank."""
    probabilities = torch.tensor(rows).transpose(0, 1)  # [depth, rows, ranks]
    depth, count, ranks = probabilities.shape
    row, head, rank = torch.arange(count)[:, None], torch.arange(depth)[:, None, None], torch.arange(ranks)
    return TopK(100 * row + 10 * head + rank, probabilities.log())


SURE = [[0.9, 0.05], [0.8, 0.1], [0.7, 0.1]]
UNSURE = [[0.3, 0.29], [0.2, 0.1], [0.1, 0.1]]


def test_trees_follow_how_sure_the_heads_are() -> None:
    """Sure: 0.9, 0.72, 0.504 make a chain. Unsure: 0.3, 0.29, then 0.06 below the first."""
    trees = GuessTrees(3).trees(guesses(SURE, UNSURE), [(GREEDY, Budget(3, 2, 3))] * 2)
    assert [(tree.host_ids, tree.shape.parents) for tree in trees] == [
        ([0, 10, 20], (-1, 0, 1)),
        ([100, 101, 110], (-1, -1, 0)),
    ]
    assert [tree.tokens.tolist() for tree in trees] == [tree.host_ids for tree in trees]


def test_where_survival_is_calibrated_it_chooses() -> None:
    """The unsure heads' first guesses survive at 0.9, 0.87 and 0.83, others hardly: a chain at temperature 0.

    At temperature 1 nothing was calibrated. Coupled requests have a calibration of their own, which is raw here.
    """
    calibration = Calibration.of({"greedy": SHARPENED, "coupled": [[0, 0, 0, 1, 0]] * 2})
    ways = GuessTrees(3, calibration=calibration)
    requests = [(params, Budget(3, 2, 3)) for params in (GREEDY, SAMPLED, SEEDED)]
    trees = ways.trees(guesses(UNSURE, UNSURE, UNSURE), requests)
    assert [tree.shape.parents for tree in trees] == [(-1, 0, 1), (-1, -1, 0), (-1, -1, 0)]


def test_calibration_between_temperatures() -> None:
    cold, hot = [[2, -2, -1, 1, 0]], [[0, 0, 0, 2, -1]]
    calibration = Calibration.of({"greedy": cold, "sampled": hot})
    assert calibration(GREEDY) == AcceptanceOdds.of(cold)
    assert calibration(SAMPLED) == calibration(SamplingParams(temperature=1.7)) == AcceptanceOdds.of(hot)
    between = calibration(SamplingParams(temperature=0.5))
    assert between == AcceptanceOdds.of([[1, -1, -0.5, 1.5, -0.5]])
    assert calibration(SamplingParams(temperature=0.5)) is between, "made once"
    for number in range(5000):  # a client chooses it
        assert calibration(SamplingParams(temperature=number / 5000)) is not None
    assert len(calibration._between) <= 101, "one for each hundredth"
    assert calibration(SEEDED) is None and Calibration()(GREEDY) is None
    raw_at_one = Calibration.of({"greedy": cold})
    assert raw_at_one(SamplingParams(temperature=0.5)) == AcceptanceOdds.of([[1, -1, -0.5, 1, 0]])
    assert raw_at_one(SAMPLED) is None and Calibration()(SamplingParams(temperature=0.5)) is None
    with pytest.raises(ModelError, match="is damaged"):
        Calibration.of({"greedy": [[1, 2]]})


def test_the_better_trees_serve() -> None:
    """As the training found; where it did not compare them, as both promised."""
    counted = {"greedy": TREE, "sampled": STAR}
    better = {"nodes": [8], "tokens": [1.9]}, [{"nodes": 8, "replayed": 2.0}]
    for greedy, fixed in (
        ({"chosen": "counted"}, True),
        ({"chosen": "likeliest"}, False),
        ({"likeliest": better[0], "promises": better[1]}, True),
        ({"likeliest": better[0] | {"tokens": [2.1]}, "promises": better[1]}, False),
        ({"chosen": "likeliest", "likeliest": better[0], "promises": better[1]}, False),
        ({"promises": better[1]}, False),
    ):
        ways = trees_for(3, counted, {"trees": {"greedy": greedy}})
        assert (ways.is_fixed(GREEDY), ways.is_fixed(SAMPLED)) == (fixed, False)
        tree = ways.trees(guesses(SURE, SURE), [(GREEDY, Budget(3, 2, 3)), (SAMPLED, Budget(3, 2, 3))])
        assert tree[0].shape.parents == ((-1, 0, -1) if fixed else (-1, 0, 1))
        assert tree[1].shape.parents == (-1, 0, 1)
        assert ways.wanted(GREEDY, Budget(3, 2, 3)) == (Budget(2, 2, 3) if fixed else Budget(3, 2, 3))
        if fixed:
            assert ways.acceptance_curve(GREEDY) == fixed_trees(counted).acceptance_curve(GREEDY)
    assert not trees_for(3, {}, {"trees": {"greedy": {"chosen": "counted"}}}).is_fixed(GREEDY), "there is none"
    with pytest.raises(OptionError, match="and there is none"):
        GuessTrees(3, fixed_for=["greedy"])


@pytest.mark.parametrize("ways", [GuessTrees(3), fixed_trees({"greedy": TREE, "sampled": STAR.first(2)})])
def test_each_request_has_its_own_budget_and_the_tree_that_it_gets_alone(ways: GuessTrees) -> None:
    rows = [SURE, UNSURE, SURE, UNSURE]
    requests = [
        (GREEDY, Budget(3, 2, 5)),
        (SAMPLED, Budget(1, 2, 2)),
        (SAMPLED, Budget(2, 1, 2)),
        (GREEDY, Budget(3, 2, 5)),
    ]
    together = ways.trees(guesses(*rows), requests)
    for number, (tree, (params, budget)) in enumerate(zip(together, requests, strict=True)):
        assert 0 < len(tree) <= budget.nodes and tree.shape.depth <= budget.depth
        assert all(len(children) <= budget.width for children in tree.shape.children)
        wanted = ways.wanted(params, budget)
        alone = guesses(*rows[: number + 1])  # no deeper or wider than it wants
        cut = TopK(alone.ids[: wanted.depth, -1:, : wanted.width], alone.log_probs[: wanted.depth, -1:])
        assert ways.trees(cut, [(params, budget)])[0].host_ids == tree.host_ids


def test_what_is_wanted_of_the_heads() -> None:
    chosen, fixed = GuessTrees(3), fixed_trees({"greedy": TREE, "sampled": STAR})
    assert chosen.wanted(GREEDY, Budget(9, 9, 4)) == Budget(3, 4, 4)
    assert chosen.wanted(SAMPLED, Budget(2, 3, 40)) == Budget(2, 3, 40)
    assert chosen.wanted(GREEDY, Budget(9, 99, 1)) == Budget(1, 1, 1)
    assert fixed.wanted(GREEDY, Budget(9, 9, 4)) == Budget(2, 2, 4)
    assert fixed.wanted(SAMPLED, Budget(9, 9, 9)) == Budget(1, 4, 4)
    for ways in (chosen, fixed):
        assert ways.wanted(GREEDY, NO_DRAFT).is_zero and ways.wanted(GREEDY, Budget(0)).is_zero


def test_extents_are_upper_limits() -> None:
    assert GuessTrees(3).extent(2) == Budget(2, 2, 2)
    assert GuessTrees(3).extent(200) == Budget(3, MOST_RANKS, 200)
    assert GuessTrees(3).extent(0).is_zero
    assert fixed_trees({"greedy": TREE, "sampled": STAR}).extent(2) == Budget(2, 2, 2)
    with pytest.raises(OptionError, match=f"at most {MOST_CHOSEN_NODES} nodes, got 257; give fewer, or a fixed tree"):
        GuessTrees(3).extent(257)


@pytest.mark.parametrize("ways", [GuessTrees(3), fixed_trees({"greedy": TREE})])
def test_guesses_on_a_device_are_read_once_or_not_at_all(ways: GuessTrees, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [(GREEDY, Budget(3, 2, 5)), (SAMPLED, Budget(2, 2, 2))]
    expected = [tree.host_ids for tree in ways.trees(guesses(SURE, UNSURE), requests)]
    reads = []
    fetch = transfers.fetch
    monkeypatch.setattr(transfers, "waits", lambda device: True)
    monkeypatch.setattr(transfers, "fetch", lambda tensors: reads.append(len(tensors)) or fetch(tensors))
    trees = ways.trees(guesses(SURE, UNSURE), requests)
    assert reads == ([2] if ways.name == "likeliest" else [])
    assert [tree.on_device for tree in trees] == [not reads] * 2
    assert [tree.host_ids for tree in trees] == expected


def test_acceptance_curves() -> None:
    counted = {"greedy": TREE, "sampled": STAR}
    fixed = fixed_trees(counted)
    assert fixed.acceptance_curve(GREEDY) == AcceptanceCurve(TREE.survival, (0, 1, 2, 2, 2, 3, 3))
    assert fixed.acceptance_curve(SAMPLED) is None, "nobody counted it"
    assert GuessTrees(3).acceptance_curve(GREEDY) is None and GuessTrees(3).counted(GREEDY) is None
    chosen = GuessTrees(2, tree_curves(FACTS, 2), counted)
    curve = chosen.acceptance_curve(GREEDY)
    assert curve is not None and curve.depths == (0, 1, 2, 2, 2)
    assert [curve.tokens(nodes) for nodes in (0, 1, 2, 4, 9)] == pytest.approx([1.0, 1.5, 1.6, 1.8, 1.8])
    older = GuessTrees(2, tree_curves({"steps": 3}, 2), counted)
    assert older.acceptance_curve(GREEDY) == fixed.acceptance_curve(GREEDY), (
        "heads that were trained before there were curves"
    )
    assert chosen.acceptance_curve(SAMPLED) is None and chosen.counted(SAMPLED) is STAR
    assert math.isclose(TREE.expected_tokens, AcceptanceCurve(TREE.survival, (0,) * 7).tokens(6))


def test_curves_are_read_from_facts() -> None:
    assert tree_curves(FACTS, 2) == {"greedy": AcceptanceCurve.fit([(1, 1.5), (4, 1.8)], lambda nodes: min(nodes, 2))}
    assert tree_curves({}, 2) == {}
    for damaged in (
        {"trees": 3},
        {"trees": {"greedy": 3}},
        {"trees": {"greedy": {"likeliest": {"nodes": [1]}}}},
        {"trees": {"greedy": {"likeliest": {"nodes": [1, 2], "tokens": [1.5]}}}},
        {"trees": {"greedy": {"likeliest": {"nodes": [1], "tokens": ["much"]}}}},
        {"trees": {"greedy": {"likeliest": {"nodes": [1], "tokens": [2.5]}}}},
    ):
        with pytest.raises(ModelError, match="is damaged"):
            tree_curves(damaged, 2)


def test_what_does_not_fit() -> None:
    with pytest.raises(OptionError, match="3 deep needs as many heads, and there are 2"):
        fixed_trees({"greedy": TREE}).check(2)
    with pytest.raises(CompositionError, match="4 ranks wide needs as many ids, and the target has 3"):
        fixed_trees({"greedy": STAR}).check(3, 3)
    with pytest.raises(OptionError, match="trees of 3 heads need as many, and there are 2"):
        GuessTrees(3).check(2)
    GuessTrees(3).check(3, 2)
    for trees in ({}, {"greeedy": TREE}):
        with pytest.raises(OptionError, match="'greedy' and 'sampled'"):
            fixed_trees(trees)
