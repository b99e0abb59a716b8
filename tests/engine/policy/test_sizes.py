"""The node budget by measured costs: against trying all, per request of a batch, and with kept costs."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from support.records import step_record
from support.tiny_models import VOCAB, packed
from truedraft.core.params import SamplingParams
from truedraft.core.rank_tree import RankTree
from truedraft.core.theory import AcceptanceCurve, DraftCost, DraftPoint, TargetCost, best_option
from truedraft.drafters import PromptLookup, Redrafter
from truedraft.drafters.heads.head import HeadRecord
from truedraft.drafters.portfolio import Portfolio
from truedraft.engine.policy import CostStore, Effort, StepCosts, drafter_cost, target_cost
from truedraft.engine.policy.kept import target_key
from truedraft.engine.policy.sizes import node_options, nodes_for, sized
from truedraft.errors import ModelError, OptionError
from truedraft.kinds.medusa.drafter import Medusa
from truedraft.kinds.medusa.guess_trees import GuessTrees, fixed_trees
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.redrafter.module import RedrafterConfig, RedrafterHead

CHANCES = ((0.6, 0.1, 0.05), (0.5, 0.1, 0.05), (0.4, 0.1, 0.05))


def counted_tree() -> RankTree:
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    return RankTree.counted({path: math.prod(CHANCES[d][rank] for d, rank in enumerate(path)) for path in paths})


def forwards(row_s: float, context_s: float = 1e-6) -> TargetCost:
    return TargetCost.fit(
        {
            (rows, context): 0.01 + row_s * rows + context_s * rows * context
            for rows in (1, 2, 64)
            for context in (0, 1024)
        }
    )


def curve_of(tree: RankTree) -> AcceptanceCurve:
    found = fixed_trees({"greedy": tree}).acceptance_curve(SamplingParams())
    assert found is not None
    return found


DRAFTING = DraftCost((DraftPoint(1, 3, 0.0005), DraftPoint(2, 12, 0.0006), DraftPoint(3, 39, 0.0007)))


@pytest.mark.parametrize("row_s", [1e-5, 2e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("requests", [1, 4])
def test_it_is_the_best_of_all_budgets(row_s: float, requests: int) -> None:
    tree, cost = counted_tree(), forwards(row_s)
    options = node_options(curve_of(tree), cost, DRAFTING, context=256, requests=requests)
    contexts = [256] * requests
    plain_s = cost(requests, contexts)
    for nodes in range(1, len(tree) + 1):
        part = tree.first(nodes)
        step_s = cost((nodes + 1) * requests, contexts) + DRAFTING(part.depth)
        assert options[nodes].expected_tokens == pytest.approx(part.expected_tokens)
        assert options[nodes].speedup == pytest.approx(part.expected_tokens * plain_s / step_s)
    assert options[0].speedup == 1.0 and len(options) == len(tree) + 1


def test_a_batch_and_dear_rows_leave_room_for_fewer_nodes() -> None:
    curve = curve_of(counted_tree())
    alone, together = (
        best_option(node_options(curve, forwards(2e-4), DRAFTING, requests=requests)).nodes for requests in (1, 16)
    )
    assert alone > together > 0
    assert best_option(node_options(curve, forwards(2e-2), DRAFTING)).nodes == 0


def test_nodes_that_nobody_measured() -> None:
    by_hand = medusa(tree=RankTree.cartesian((2, 2)))
    with pytest.raises(OptionError, match="give the number of nodes"):
        nodes_for(packed("llama"), by_hand)
    assert best_option(node_options(AcceptanceCurve((), (0,)), forwards(1e-4), DRAFTING)).nodes == 0


def medusa(nodes: int | None = None, tree: RankTree | None = None) -> Medusa:
    heads = MedusaHeads(MedusaConfig(48, VOCAB, heads=3))
    trees = {"greedy": counted_tree() if tree is None else tree}
    return Medusa(heads, trees, nodes=nodes)


@pytest.fixture
def store(tmp_path: Path) -> CostStore:
    return CostStore(tmp_path / "costs")


def test_short_curves_are_measured_once_and_kept_apart(store: CostStore, monkeypatch: pytest.MonkeyPatch) -> None:
    once = Effort(0.0, 1, 1)
    monkeypatch.setattr("truedraft.engine.policy.kept._SHORT_TARGET", once)
    monkeypatch.setattr("truedraft.engine.policy.kept._SHORT_DRAFTER", once)
    target = packed("llama")
    first = nodes_for(target, medusa(), costs=StepCosts(target, store=store))
    assert first.costs.measuring_s > 0.0 and first.costs.warnings == []
    assert 0 <= first.nodes <= len(counted_tree())
    again = nodes_for(target, medusa(), costs=StepCosts(target, store=store))
    assert again.costs.measuring_s == 0.0 and again.choice == first.choice
    assert nodes_for(target, medusa(), costs=StepCosts(target, store=store, refresh=True)).costs.measuring_s > 0.0
    assert store.load(target_key(target), TargetCost) == (None, None)  # a short curve does not stand in for a long one

    kept = target_cost(target, effort=once, store=store)
    assert store.load(target_key(target), TargetCost) == (kept.value, None)
    by_kept = nodes_for(target, medusa(), costs=StepCosts(target, store=store))
    given = nodes_for(target, medusa(), costs=StepCosts(target, store=store, forwards=kept.value))
    assert by_kept.choice == given.choice and by_kept.costs.measuring_s == 0.0
    dear = nodes_for(target, medusa(), costs=StepCosts(target, store=store, forwards=forwards(1.0)))
    assert dear.nodes == 0 and "no tree is predicted to pay" in dear.describe()
    asked = nodes_for(target, medusa(), costs=StepCosts(target, store=store, forwards=forwards(1.0)), least=1)
    assert asked.nodes == 1 and asked.choice.speedup < 1.0, "who asks for drafts gets the one that costs least"
    cheap = nodes_for(
        target, medusa(), costs=StepCosts(target, store=store, forwards=TargetCost.fit({(1, 8): 10.0, (64, 8): 10.0}))
    )
    assert cheap.nodes == len(counted_tree())
    assert f"{cheap.nodes} nodes by the cost curve: {counted_tree().expected_tokens:.2f} tokens" in cheap.describe()


def test_sizes_are_chosen_anew_after_steps_parted_from_the_curve(
    store: CostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V was taken in a disturbed minute: the next use measures it again, and what drafting costs with it."""
    monkeypatch.setattr("truedraft.engine.policy.kept._SHORT_TARGET", Effort(0.0, 1, 1))
    monkeypatch.setattr("truedraft.engine.policy.kept._SHORT_DRAFTER", Effort(0.0, 1, 1))
    now = [1e9]
    store, target = CostStore(store.folder, lambda: now[0]), packed("llama")
    first = nodes_for(target, medusa(), costs=StepCosts(target, store=store))
    check = first.costs.check()
    assert check is not None
    now[0] += 61.0
    for _ in range(50):
        took_s = 3.0 * first.costs.forwards()(2, (9,))
        check(step_record(2, 9, 1, target_s=took_s))
    monkeypatch.setattr("truedraft.engine.policy.kept.drafter_cost", asked := MagicMock(side_effect=drafter_cost))
    again = nodes_for(target, medusa(), costs=StepCosts(target, store=store))
    assert again.costs.measuring_s > 0.0 and "steps took 3.0 times what they say" in again.costs.warnings[0]
    assert asked.call_args.kwargs["refresh"] is True
    assert nodes_for(target, medusa(), costs=StepCosts(target, store=store)).costs.warnings == []


def test_trees_chosen_at_each_step_are_sized_by_their_own_curve(store: CostStore) -> None:
    """Level costs favour the last node that brings anything; dear rows the few that bring most."""
    target, heads = packed("llama"), MedusaHeads(MedusaConfig(48, VOCAB, heads=3))
    curve = AcceptanceCurve.fit([(1, 1.6), (4, 1.9), (8, 2.0), (16, 2.0)], lambda nodes: min(nodes, 3))
    drafter = Medusa(heads, GuessTrees(3, {"greedy": curve}, {"sampled": counted_tree()}))
    level = TargetCost.fit({(1, 8): 10.0, (64, 8): 10.0})
    found, budgets = sized(drafter, target, costs=StepCosts(target, forwards=level, store=store))
    assert isinstance(found, Medusa)
    assert (found.nodes, found.tree_kind, found.limits.nodes) == (8, "likeliest", 8)
    assert "8 nodes by the cost curve: 2.00 tokens" in budgets[drafter.name].describe()
    steep = TargetCost.fit({(1, 8): 10.0, (2, 8): 11.0, (3, 8): 20.0})
    dear, _ = sized(drafter, target, costs=StepCosts(target, forwards=steep, store=store))
    assert isinstance(dear, Medusa) and dear.nodes == 1
    sampled, _ = sized(
        drafter, target, SamplingParams(temperature=1.0), costs=StepCosts(target, forwards=level, store=store)
    )
    assert isinstance(sampled, Medusa) and sampled.nodes == len(counted_tree()), "by the counts: there is no curve"


def test_only_open_budgets_are_chosen(store: CostStore) -> None:
    target, cost = packed("llama"), forwards(1e-3)
    for drafter in (PromptLookup(), medusa(nodes=5), medusa(tree=RankTree.cartesian((2, 2)))):
        assert sized(drafter, target, costs=StepCosts(target, forwards=cost, store=store)) == (drafter, {})
    drafter = medusa()
    found, budgets = sized(
        drafter, target, SamplingParams(temperature=1.0), costs=StepCosts(target, forwards=cost, store=store)
    )
    assert isinstance(found, Medusa) and found is not drafter
    assert found.nodes == budgets["medusa"].nodes and found.nodes_chosen


def test_each_member_of_a_portfolio_gets_what_pays_for_it(store: CostStore) -> None:
    target = packed("llama")
    lookup, costs = PromptLookup(), StepCosts(target, forwards=forwards(1e-3), store=store)
    drafter = Portfolio({"first": medusa(), "lookup": lookup, "second": medusa(nodes=5)})
    found, budgets = sized(drafter, target, costs=costs)
    assert list(found.members) == ["first", "lookup", "second"] and list(budgets) == ["first"]
    assert found.members["first"].limits.nodes == budgets["first"].nodes and budgets["first"].costs is costs
    assert found.members["lookup"] is lookup
    assert sized(Portfolio([lookup]), target, costs=costs)[1] == {}


def recurrent(**sizes: int) -> Redrafter:
    """Two beams bring more than four with few nodes, and have no more than four."""
    few = [{"beams": 2, "length": length, "nodes": [1, 2, 4], "tokens": [1.5, 1.65, 1.75]} for length in (1, 2)]
    many = {"beams": 4, "length": 2, "nodes": [1, 2, 4, 8], "tokens": [1.5, 1.6, 1.7, 1.8]}
    head = RedrafterHead(RedrafterConfig(48, VOCAB, state=8, exit_width=48, layers=1))
    return Redrafter(head.with_record(HeadRecord(facts={"beams": {"greedy": [*few, many]}})), **sizes)  # type: ignore[arg-type]


def test_beams_and_their_length_are_chosen_with_the_nodes(store: CostStore) -> None:
    target = packed("llama")
    level = TargetCost.fit({(1, 8): 10.0, (64, 8): 10.0})
    found, budgets = sized(recurrent(), target, costs=StepCosts(target, forwards=level, store=store))
    assert isinstance(found, Redrafter)
    assert (found.beams, found.length, found.nodes, found.sizes_chosen) == (4, 2, 8, True)
    assert "4 beams of 2, 8 nodes by the cost curve: 1.80 tokens" in budgets["redrafter"].describe()
    rows = TargetCost.fit({(1, 8): 10.0, (2, 8): 10.0, (3, 8): 10.0, (5, 8): 10.0, (6, 8): 900.0})
    found, budgets = sized(recurrent(), target, costs=StepCosts(target, forwards=rows, store=store))
    assert isinstance(found, Redrafter)
    assert found.beams == 2 and found.nodes <= 4
    drafter = recurrent(beams=3)
    assert sized(drafter, target, costs=StepCosts(target, forwards=level, store=store)) == (drafter, {})
    drafter = recurrent()
    assert sized(
        drafter, target, SamplingParams(temperature=1.0), costs=StepCosts(target, forwards=level, store=store)
    ) == (drafter, {})


def test_damaged_curves_of_beams(store: CostStore) -> None:
    head = RedrafterHead(RedrafterConfig(48, VOCAB, state=8, exit_width=48, layers=1))
    drafter = Redrafter(head.with_record(HeadRecord(facts={"beams": {"greedy": [{"beams": 2}]}})))
    with pytest.raises(ModelError, match="damaged"):
        drafter.size_plans(SamplingParams())
