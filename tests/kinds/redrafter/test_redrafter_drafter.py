"""The recurrent drafter alone: what it proposes, within which budget, and which target it refuses."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from kinds.test_vector_drafters import GREEDY, HEAD, SAMPLED, SEEDED, TARGET, VOCAB, begun, propose
from support.head_models import MarkovWithHead
from support.layer_heads import noted
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.drafters import Portfolio, PromptLookup, Redrafter, from_spec
from truedraft.drafters.heads.head import HeadRecord
from truedraft.errors import IncompatibleRuleError, OptionError, UnsupportedModelError
from truedraft.kinds.redrafter.drafter import DRAWN_FROM
from truedraft.verification import BlockVerification, SpeculativeSampling

VECTOR = TARGET.vector_after([1])


def drafter_of(**options: Any) -> Redrafter:
    made = Redrafter(HEAD, **options)
    made.check(TARGET)
    return made


def proposed(drafter: Redrafter, params: SamplingParams = GREEDY, *budgets: Budget) -> Proposal:
    """Behind a prompt that ends in 3."""
    (proposal,) = propose(drafter, [begun(drafter, 0, params, VECTOR)], *budgets)
    return proposal


def beams_slowly(beams: int, length: int) -> list[tuple[float, tuple[int, ...]]]:
    """Beam search, one path at a time."""
    found: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(length):
        longer = []
        for score, path in found:
            state = HEAD.new_state(1)
            for token in (3, *path):
                state = HEAD.advance(state, TARGET.embed(torch.tensor([token])))
            gains = TARGET.unembed(HEAD.leaving(VECTOR[None], state))[0].log_softmax(dim=-1).tolist()
            longer += [(score + gain, (*path, token)) for token, gain in enumerate(gains)]
        found = sorted(longer, reverse=True)[:beams]
    return found


@pytest.mark.parametrize(("beams", "length"), [(1, 4), (2, 3), (5, 2), (6, 3)])
def test_beams_are_those_of_a_slow_search(beams: int, length: int) -> None:
    """Their prefixes are the tree, of which fewer nodes are the first ones."""
    whole, few = (proposed(drafter_of(beams=beams, length=length, nodes=nodes)) for nodes in (99, 5))
    whole.check()
    prefixes = {path for end in range(1, length + 1) for _, path in beams_slowly(beams, end)}
    assert {whole.tree.path_tokens(node) for node in range(len(whole.tree))} == prefixes
    assert (whole.kinds, whole.probs) == ({DrawKind.DETERMINISTIC}, None)
    assert few.tree.host_ids == whole.tree.host_ids[:5]
    assert few.tree.shape.parents == whole.tree.shape.parents[:5]


def test_paths_are_drawn_from_the_measured_temperature_on() -> None:
    """Unless somebody says so, or the rule cannot judge them; greedy and coupled requests never mind."""
    below, at = (dataclasses.replace(SAMPLED, temperature=each) for each in (DRAWN_FROM - 0.01, DRAWN_FROM))
    chosen, drawn = {DrawKind.DETERMINISTIC}, {DrawKind.WITHOUT_REPLACEMENT}
    for sampled, expected in ((None, (chosen, drawn)), (True, (drawn, drawn)), (False, (chosen, chosen))):
        drafter = drafter_of(beams=4, length=2, nodes=6, sampled=sampled)
        for params, kinds in zip((below, at), expected, strict=True):
            assert proposed(drafter, params, Budget(2, 4)).kinds == kinds <= drafter.kinds
            assert drafter.settled(params).kinds == kinds
            assert (drafter.acceptance_curve(params) is None) or kinds == chosen
        for params, kinds in ((GREEDY, chosen), (SEEDED, {DrawKind.COUPLED})):
            assert proposed(drafter, params, Budget(2, 4)).kinds == kinds
    drafter, blocks = drafter_of(beams=4, length=2, nodes=6), BlockVerification().judges
    judged = dataclasses.replace(begun(drafter, 0, at, VECTOR), judged=blocks)
    assert propose(drafter, [judged], Budget(2, 4))[0].kinds == chosen == drafter.kinds_for(blocks)
    assert drafter.kinds_for(SpeculativeSampling().judges) == chosen | drawn
    assert drafter_of(sampled=True).kinds_for(blocks) == drawn  # which that rule refuses


@pytest.mark.parametrize(
    ("rule", "kind"), [("speculative", DrawKind.WITHOUT_REPLACEMENT), ("block", DrawKind.DETERMINISTIC)]
)
def test_an_engine_draws_where_its_rule_can_judge_it(rule: str, kind: DrawKind) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0)
    for beside in ([], [PromptLookup()]):
        seen = noted(Redrafter)(HEAD, beams=3, length=2)
        drafter = Portfolio([seen, *beside]) if beside else seen
        Engine(TARGET, drafter, rule, controller="fixed").generate([1, 2], params)
        assert {own.kinds for _, own in seen.drafted} == {frozenset({kind})}
    with pytest.raises(IncompatibleRuleError, match="without replacement"):
        Engine(TARGET, Redrafter(HEAD, sampled=True), "block")


def test_sizes_and_targets_that_do_not_fit() -> None:
    for option, value in (("beams", 0), ("length", 0), ("nodes", -1), ("beams", 257), ("length", 33)):
        with pytest.raises(OptionError, match=f"{option} of a recurrent drafter"):
            drafter_of(**{option: value})
    with pytest.raises(UnsupportedModelError, match="embed"):
        Redrafter(HEAD).check(MarkovWithHead.random(VOCAB, seed=1))
    assert not len(proposed(drafter_of(nodes=0), GREEDY, Budget(3, 3)).tree)


def test_words_make_drafters(tmp_path: Path) -> None:
    HEAD.save(tmp_path, HeadRecord("first", TARGET.fingerprint))
    made = from_spec(f"redrafter:{tmp_path},beams=3,length=2,nodes=5", TARGET)
    assert isinstance(made, Redrafter)
    assert (made.beams, made.length, made.nodes, made.sampled, made.sizes_chosen) == (3, 2, 5, None, True)
    made = from_spec(f"redrafter:{tmp_path},sampled=true", TARGET)
    assert isinstance(made, Redrafter)
    assert (made.sampled, made.sizes_chosen, made.length) == (True, False, 3)
    with pytest.raises(OptionError, match="sampled must be true"):
        from_spec(f"redrafter:{tmp_path},sampled=yes", TARGET)
    with pytest.raises(OptionError, match="beams must be a whole number"):
        from_spec(f"redrafter:{tmp_path},beams=many", TARGET)


def test_more_beams_than_ids() -> None:
    tree = proposed(drafter_of(beams=50, length=2, nodes=99)).tree
    assert set(tree.shape.depths) == {1, 2}
    paths = [tree.path_tokens(node) for node in range(len(tree))]
    assert len(set(paths)) == len(paths)
    assert all(path[:-1] in paths for path in paths if len(path) > 1)
    assert all(0 <= token < VOCAB for token in itertools.chain.from_iterable(paths))
