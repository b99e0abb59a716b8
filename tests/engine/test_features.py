"""What drafters are given of the target's forward: at which rows, at parts of prompts too, and nothing undeclared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch

from support.answers import fixed
from support.head_models import MarkovWithHead
from truedraft import Engine, SamplingParams
from truedraft.core.proposal import Proposal
from truedraft.drafters import Drafter, Features, StepOutcome
from truedraft.drafters.portfolio import Portfolio, joint_features
from truedraft.engine.policy import Budget, Controller, Decision, RequestView
from truedraft.engine.scheduler import FixedParts
from truedraft.errors import CompositionError
from truedraft.testing import ScriptedDrafter

VOCAB = 9
GUESSES = [[1, 2], [3], [1, 4, 5]]


@pytest.fixture
def target() -> MarkovWithHead:
    return MarkovWithHead.random(VOCAB, 3)


class Watching(ScriptedDrafter):
    """Notes texts as they were before the step, and outcomes; and what was proposed behind which text."""

    guesses: ClassVar[list[list[int]]] = GUESSES

    def __init__(self) -> None:
        super().__init__(lambda tokens: [path[:] for path in self.guesses], depth=3, nodes=8)
        self.seen: list[tuple[list[int], StepOutcome]] = []
        self.proposed: list[tuple[list[int], Proposal]] = []

    def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
        made = super().propose(batch, budgets, noise)
        self.proposed += [(list(request.tokens), each) for request, each in zip(batch, made, strict=True)]
        return made

    def observe(self, batch, outcomes):  # type: ignore[no-untyped-def]
        for request, outcome in zip(batch, outcomes, strict=True):
            tokens = list(request.tokens)
            self.seen.append((tokens[: len(tokens) - len(outcome.tokens)], outcome))


class Last(Watching):
    features: Features | None = Features(logits=True)


class All(Watching):
    features: Features | None = Features(rows="all", logits=True)


class OfTrees(Watching):
    features: Features | None = Features(rows="tree", logits=True)


class Merged(Controller):
    """All drafters always, in the order of these names or of their own."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        first, *others = (Decision(name, Budget(3, 8)) for name in self._names or views[0].limits)
        return [Decision(first.drafter, first.budget, tuple(others)) for _ in views]


PARAMS = [SamplingParams(max_tokens=12), SamplingParams(max_tokens=9, temperature=1.0)]


def run(target: MarkovWithHead, drafter: Drafter, controller: Controller | str = "fixed") -> list[list[int]]:
    engine = Engine(target, drafter, controller=controller, entropy=2)
    engine._scheduler.reading = FixedParts(4)
    return [answer.token_ids for answer in engine.generate([[1, 2, 3, 4, 5, 6, 7, 8, 1, 2], [3]], PARAMS)]


def test_the_last_row_is_where_the_next_token_was_drawn(target: MarkovWithHead) -> None:
    drafter = Last()
    run(target, drafter)
    lengths = set()
    for before, outcome in drafter.seen:
        if outcome.partial:
            continue
        text = before + [outcome.proposal.tree.host_ids[node] for node in outcome.path]
        assert outcome.hidden is not None and outcome.logits is not None and outcome.logits.shape == (1, VOCAB)
        assert outcome.hidden.equal(target.vector_after(text)[None])
        lengths.add(len(outcome.path))
    assert len(lengths) > 1


def test_all_rows_are_those_of_the_tree_and_of_each_token_of_a_prompt(target: MarkovWithHead) -> None:
    drafter = All()
    run(target, drafter)
    last = Last()
    run(target, last)
    parts, ends = ([outcome for _, outcome in each.seen if outcome.partial] for each in (drafter, last))
    for rows, end in zip(parts, ends, strict=True):
        assert rows.hidden is not None and end.hidden is not None and end.hidden.equal(rows.hidden[-1:])
        assert len(rows.hidden) == 4 and end.tokens == () and end.path == ()
    assert len(parts) == 2
    trees = [each for each in drafter.seen if len(each[1].proposal.tree)]
    assert trees
    for before, outcome in trees:
        paths = [outcome.proposal.tree.path_tokens(node) for node in range(len(outcome.proposal.tree))]
        wanted = torch.stack([target.vector_after([*before, *path]) for path in ((), *paths)])
        assert outcome.hidden is not None and outcome.hidden.equal(wanted)
        assert outcome.logits is not None and len(outcome.logits) == len(wanted)


def test_rows_of_trees_are_all_of_a_tree_and_the_last_of_a_part_of_a_prompt(target: MarkovWithHead) -> None:
    """Alone, and where another drafter sees all rows of prompts and proposes the same nodes."""
    alone, every = OfTrees(), All()
    run(target, alone)
    run(target, every)
    beside, both = OfTrees(), All()
    run(target, Portfolio({"all": both, "trees": beside}), Merged())
    for own, other in ((alone, every), (beside, both)):
        assert len(own.seen) == len(other.seen) > 10
        assert any(outcome.partial for _, outcome in own.seen)
        for (before, mine), (_, theirs) in zip(own.seen, other.seen, strict=True):
            assert mine.logits is not None and theirs.logits is not None, before
            drafted = len(mine.proposal.tree) > 0
            assert mine.logits.equal(theirs.logits if drafted else theirs.logits[-1:])
            assert len(mine.logits) == len(mine.proposal.tree) + 1
    assert joint_features(Portfolio([Last(), OfTrees()])) == OfTrees.features


def test_who_declares_nothing_is_given_nothing_and_answers_are_the_same(target: MarkovWithHead) -> None:
    drafter = Watching()
    assert run(target, drafter) == run(target, Last()) == run(target, All())
    assert all(outcome.hidden is None and outcome.logits is None for _, outcome in drafter.seen)


def test_layers_that_a_forward_does_not_show_are_refused(target: MarkovWithHead) -> None:
    class Layered(Watching):
        features: Features | None = Features(layers=(2,))

    with pytest.raises(CompositionError, match=r"reads vectors of layers 2, .* shows none; load the target"):
        fixed(target, Layered(), entropy=2)
