"""The recurrent drafter alone: what it proposes, within which budget, and which target it refuses."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.head_models import MarkovWithEmbedding, MarkovWithHead, random_redrafter
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.drafters import Portfolio, PromptLookup, Redrafter, from_spec
from truedraft.drafters.base import DraftRequest, StepOutcome
from truedraft.drafters.heads.head import HeadRecord
from truedraft.errors import (
    IncompatibleRuleError,
    OptionError,
    UnsupportedModelError,
)
from truedraft.kinds.redrafter.drafter import DRAWN_FROM
from truedraft.kinds.redrafter.module import RedrafterHead
from truedraft.verification import BlockVerification, SpeculativeSampling

VOCAB = 6
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)
SEEDED = SamplingParams(temperature=1.0, seed=1)
NOISE = KeyedNoise(0, 0, 0)


@pytest.fixture
def target() -> MarkovWithEmbedding:
    return MarkovWithEmbedding.random(VOCAB, seed=1)


@pytest.fixture
def head(target: MarkovWithEmbedding) -> RedrafterHead:
    return random_redrafter(target, spread=3.0)


def drafter_of(head: RedrafterHead, target: MarkovWithEmbedding, **options: int) -> Redrafter:
    made = Redrafter(head, **options)  # type: ignore[arg-type]
    made.check(target)
    return made


def begun(drafter: Redrafter, number: int, params: SamplingParams, vector: Tensor | None) -> DraftRequest:
    """A request whose prompt was read, and whose last token is 3."""
    request = DraftRequest(number, params, [1, 3])
    drafter.begin(request)
    hidden = None if vector is None else vector[None]
    drafter.observe([request], [StepOutcome(Proposal.empty(), (), (3,), hidden)])
    return request


def propose(drafter: Redrafter, requests: Sequence[DraftRequest], *budgets: Budget) -> list[Proposal]:
    given = budgets or (drafter.limits,) * len(requests)
    return drafter.propose(requests, given, [NOISE] * len(requests))


def beams_slowly(
    target: MarkovWithEmbedding, head: RedrafterHead, vector: Tensor, beams: int, length: int
) -> list[tuple[float, tuple[int, ...]]]:
    """Beam search, one path at a time."""
    found: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(length):
        longer = []
        for score, path in found:
            state = head.new_state(1)
            for token in (3, *path):
                state = head.advance(state, target.embed(torch.tensor([token])))
            gains = target.unembed(head.leaving(vector[None], state))[0].log_softmax(dim=-1).tolist()
            longer += [(score + gain, (*path, token)) for token, gain in enumerate(gains)]
        found = sorted(longer, reverse=True)[:beams]
    return found


@pytest.mark.parametrize(("beams", "length"), [(1, 4), (2, 3), (5, 2), (6, 3)])
def test_beams_are_those_of_a_slow_search(
    target: MarkovWithEmbedding, head: RedrafterHead, beams: int, length: int
) -> None:
    drafter = drafter_of(head, target, beams=beams, length=length, nodes=99)
    vector = target.vector_after([1])
    proposal = propose(drafter, [begun(drafter, 0, GREEDY, vector)])[0]
    proposal.check()
    prefixes = {path for end in range(1, length + 1) for _, path in beams_slowly(target, head, vector, beams, end)}
    assert {proposal.tree.path_tokens(node) for node in range(len(proposal.tree))} == prefixes
    assert (proposal.kinds, proposal.probs) == ({DrawKind.DETERMINISTIC}, None)


def test_the_likeliest_nodes_are_kept(target: MarkovWithEmbedding, head: RedrafterHead) -> None:
    vector = target.vector_after([1])
    whole, few = (drafter_of(head, target, beams=6, length=3, nodes=nodes) for nodes in (99, 5))
    trees = [propose(each, [begun(each, 0, GREEDY, vector)])[0].tree for each in (whole, few)]
    assert trees[1].host_ids == trees[0].host_ids[:5]
    assert trees[1].shape.parents == trees[0].shape.parents[:5]


def test_paths_are_drawn_from_the_measured_temperature_on(target: MarkovWithEmbedding, head: RedrafterHead) -> None:
    """Unless somebody says so, or the rule cannot judge them; greedy and coupled requests never mind."""
    below, at = (dataclasses.replace(SAMPLED, temperature=each) for each in (DRAWN_FROM - 0.01, DRAWN_FROM))
    chosen, drawn = {DrawKind.DETERMINISTIC}, {DrawKind.WITHOUT_REPLACEMENT}
    for sampled, expected in ((None, (chosen, drawn)), (True, (drawn, drawn)), (False, (chosen, chosen))):
        drafter = drafter_of(head, target, beams=4, length=2, nodes=6, sampled=sampled)
        for params, kinds in zip((below, at), expected, strict=True):
            request = begun(drafter, 0, params, target.vector_after([1]))
            assert propose(drafter, [request], Budget(2, 4))[0].kinds == kinds <= drafter.kinds
            assert drafter.settled(params).kinds == kinds
            assert (drafter.acceptance_curve(params) is None) or kinds == chosen
        for params, kinds in ((GREEDY, chosen), (SEEDED, {DrawKind.COUPLED})):
            request = begun(drafter, 0, params, target.vector_after([1]))
            assert propose(drafter, [request], Budget(2, 4))[0].kinds == kinds
    drafter = drafter_of(head, target, beams=4, length=2, nodes=6)
    request = begun(drafter, 0, at, target.vector_after([1]))
    blocks = BlockVerification().judges
    judged = dataclasses.replace(request, judged=blocks)
    assert propose(drafter, [judged], Budget(2, 4))[0].kinds == chosen == drafter.kinds_for(blocks)
    assert drafter.kinds_for(SpeculativeSampling().judges) == chosen | drawn
    forced = drafter_of(head, target, sampled=True)
    assert forced.kinds_for(blocks) == drawn  # which that rule refuses


@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_an_engine_draws_where_its_rule_can_judge_it(
    target: MarkovWithEmbedding, head: RedrafterHead, rule: str
) -> None:
    made: list[frozenset[DrawKind]] = []

    class Seen(Redrafter):
        def propose(self, batch: Any, budgets: Any, noise: Any) -> list[Proposal]:
            proposals = super().propose(batch, budgets, noise)
            made.extend(each.kinds for each in proposals if len(each.tree))
            return proposals

    params = SamplingParams(max_tokens=12, temperature=1.0)
    for drafter in (Seen(head, beams=3, length=2), Portfolio([Seen(head, beams=3, length=2), PromptLookup()])):
        made.clear()
        Engine(target, drafter, rule, controller="fixed").generate([1, 2], params)
        assert set(made) == {
            frozenset({DrawKind.WITHOUT_REPLACEMENT if rule == "speculative" else DrawKind.DETERMINISTIC})
        }
    with pytest.raises(IncompatibleRuleError, match="without replacement"):
        Engine(target, Redrafter(head, sampled=True), "block")


def test_sizes_and_targets_that_do_not_fit(target: MarkovWithEmbedding, head: RedrafterHead) -> None:
    for option, value in (("beams", 0), ("length", 0), ("nodes", -1), ("beams", 257), ("length", 33)):
        with pytest.raises(OptionError, match=f"{option} of a recurrent drafter"):
            Redrafter(head, **{option: value})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="embed"):
        Redrafter(head).check(MarkovWithHead.random(VOCAB, seed=1))
    none = drafter_of(head, target, nodes=0)
    assert not len(propose(none, [begun(none, 0, GREEDY, target.vector_after([1]))], Budget(3, 3))[0].tree)


def test_words_make_drafters(target: MarkovWithEmbedding, head: RedrafterHead, tmp_path: Path) -> None:
    head.save(tmp_path, HeadRecord("first", target.fingerprint))
    made = from_spec(f"redrafter:{tmp_path},beams=3,length=2,nodes=5", target)
    assert isinstance(made, Redrafter)
    assert (made.beams, made.length, made.nodes, made.sampled, made.sizes_chosen) == (3, 2, 5, None, True)
    made = from_spec(f"redrafter:{tmp_path},sampled=true", target)
    assert isinstance(made, Redrafter)
    assert (made.sampled, made.sizes_chosen, made.length) == (True, False, 3)
    with pytest.raises(OptionError, match="sampled must be true"):
        from_spec(f"redrafter:{tmp_path},sampled=yes", target)
    with pytest.raises(OptionError, match="beams must be a whole number"):
        from_spec(f"redrafter:{tmp_path},beams=many", target)


def test_more_beams_than_ids(target: MarkovWithEmbedding, head: RedrafterHead) -> None:
    drafter = drafter_of(head, target, beams=50, length=2, nodes=99)
    tree = propose(drafter, [begun(drafter, 0, GREEDY, target.vector_after([1]))])[0].tree
    assert set(tree.shape.depths) == {1, 2}
    paths = [tree.path_tokens(node) for node in range(len(tree))]
    assert len(set(paths)) == len(paths)
    assert all(path[:-1] in paths for path in paths if len(path) > 1)
    assert all(0 <= token < VOCAB for token in itertools.chain.from_iterable(paths))
