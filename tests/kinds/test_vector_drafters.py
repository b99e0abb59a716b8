"""What Medusa and ReDrafter have in common: budgets, batches, when nothing is drafted, and targets that are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from support.head_models import SHARPENED, MarkovWithEmbedding, random_heads, random_redrafter
from support.pairwise import named, pairwise
from truedraft import SamplingParams
from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.rank_tree import RankTree
from truedraft.drafters import Medusa, Redrafter, from_spec
from truedraft.drafters.base import DraftRequest, StepOutcome
from truedraft.drafters.heads.head import HeadRecord
from truedraft.errors import CompositionError, DrafterError, ModelNotFoundError, UnknownOptionError
from truedraft.kinds.medusa.guess_trees import GuessTrees
from truedraft.testing import MarkovModel

VOCAB = 6
TARGET = MarkovWithEmbedding.random(VOCAB, seed=1)
TREE = RankTree(((0,), (0, 0), (1,), (0, 1), (0, 0, 0), (2,)), (0.5, 0.3, 0.2, 0.15, 0.1, 0.05))
STAR = RankTree(((0,), (1,), (2,), (3,)))
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)
SEEDED, WARM = SamplingParams(temperature=1.0, seed=1), SamplingParams(temperature=0.5, seed=5)
HEADS, HEAD = random_heads(TARGET, heads=3, layers=2), random_redrafter(TARGET, spread=3.0)
CALIBRATED = HEAD.with_record(HeadRecord(facts={"survival": {"greedy": SHARPENED}}))  # of beams that are not drawn
DRAFTERS: dict[str, Callable[[], Any]] = {
    "fixed trees": lambda: Medusa(HEADS, {"greedy": TREE, "sampled": STAR}),
    "likeliest trees": lambda: Medusa(HEADS, GuessTrees(3), nodes=12),
    "beams": lambda: Redrafter(CALIBRATED, beams=4, length=3, nodes=8, sampled=False),
    "drawn beams": lambda: Redrafter(CALIBRATED, beams=4, length=3, nodes=8, sampled=True),
}
MADE: dict[str, Any] = {"medusa": (HEADS, Medusa), "redrafter": (HEAD, Redrafter)}


def checked(name: str) -> Any:
    drafter = DRAFTERS[name]()
    drafter.check(TARGET)
    return drafter


def begun(drafter: Any, number: int, params: SamplingParams, vector: Tensor) -> DraftRequest:
    """A request whose prompt was read."""
    request = DraftRequest(number, params, [1, 3])
    drafter.begin(request)
    drafter.observe([request], [StepOutcome(Proposal.empty(), (), (3,), vector[None])])
    return request


def propose(drafter: Any, requests: Sequence[DraftRequest], *budgets: Budget) -> list[Proposal]:
    noise = [KeyedNoise(5, 3, each.id) for each in requests]
    made: list[Proposal] = drafter.propose(requests, budgets or (drafter.limits,) * len(requests), noise)
    return made


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_batch_makes_what_each_makes_alone(name: str) -> None:
    drafter = checked(name)
    params = [GREEDY, SAMPLED, SEEDED, WARM, GREEDY, SAMPLED]
    budgets = [Budget(3, 4), Budget(2, 4), Budget(3, 2), Budget(9, 9, 99), Budget(3, 2, 4), NO_DRAFT]
    requests = [begun(drafter, i, each, TARGET.vector_after([1, i % 4])) for i, each in enumerate(params)]
    together = propose(drafter, requests, *budgets)
    assert [len(each.tree) > 0 for each in together] == [True] * 5 + [False]
    for request, proposal, budget in zip(requests, together, budgets, strict=True):
        (alone,) = propose(drafter, [request], budget)
        assert (alone.tree.host_ids, alone.draws) == (proposal.tree.host_ids, proposal.draws)
        assert alone.tree.shape == proposal.tree.shape


@pytest.mark.parametrize(
    ("params", "budget", "name"),
    pairwise(
        named(greedy=GREEDY, sampled=SAMPLED, seeded=SEEDED),
        [Budget(2, 6, 4), Budget(3, 1), Budget(1, 2), Budget(9, 9, 99), Budget(3, 2, 5)],
        list(DRAFTERS),
    ),
)
def test_budgets_are_kept(params: SamplingParams, budget: Budget, name: str) -> None:
    drafter = checked(name)
    (proposal,) = propose(drafter, [begun(drafter, 0, params, TARGET.vector_after([1]))], budget)
    proposal.check()
    shape = proposal.tree.shape
    assert 0 < len(shape) <= min(budget.nodes, drafter.limits.nodes)
    assert shape.depth <= min(budget.depth, 3) and max(map(len, shape.children)) <= budget.width
    drawn = {DrawKind.COUPLED if params.seeded else DrawKind.WITHOUT_REPLACEMENT}
    chosen = params.greedy or "beams" not in name or not (params.seeded or name == "drawn beams")
    assert proposal.kinds == ({DrawKind.DETERMINISTIC} if chosen else drawn)


@pytest.mark.parametrize("name", DRAFTERS)
def test_without_a_vector_or_a_budget_nothing_is_proposed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, request, vector = checked(name), DraftRequest(0, GREEDY, [1, 2]), TARGET.vector_after([1, 2])[None]
    drafter.begin(request)
    assert not len(propose(drafter, [request])[0].tree), "before the prompt was read"
    drafter.observe([request], [StepOutcome(Proposal.empty(), (), (), None)])
    assert not len(propose(drafter, [request])[0].tree), "after a part of it"
    drafter.observe([request], [StepOutcome(Proposal.empty(), (), (3,), vector)])
    assert len(propose(drafter, [request])[0].tree)
    with monkeypatch.context() as patch:
        patch.setattr(drafter, "_runner", None)
        assert not len(propose(drafter, [request], NO_DRAFT)[0].tree), "and the heads do not run"
        with pytest.raises(DrafterError, match="call check"):
            propose(drafter, [request])
    drafter.end(request)
    drafter.end(request)
    assert not len(propose(drafter, [request])[0].tree), "after its end"


@pytest.mark.parametrize("kind", MADE)
def test_another_target_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, made = MADE[kind]
    with pytest.raises(CompositionError, match=r"some/model \(fingerprint 0123\).*markov \(fingerprint markov-"):
        made(head.with_record(HeadRecord("some/model", "0123")), nodes=2).check(TARGET)
    known = made(head.with_record(HeadRecord("markov", TARGET.fingerprint)), nodes=2)
    known.check(TARGET)
    for other, said in (
        (MarkovWithEmbedding.random(VOCAB, seed=2), "take heads that were trained for it"),
        (MarkovWithEmbedding.random(5, seed=1), "read 36 numbers and know 6 ids.*25 numbers and 5 ids"),
        (MarkovModel.random(VOCAB, seed=1), "no vectors that heads could read"),
    ):
        with pytest.raises(CompositionError, match=said):
            known.check(other)
    with pytest.raises(CompositionError, match="know 5 ids"):
        made(type(head)(replace(head.config, vocab_size=VOCAB - 1)), nodes=2).check(TARGET)
    # A sample of the weights tells whose heads they are, and not all are read.
    ours, theirs = (HeadRecord("some/model", "0123", sample=each * 32) for each in "23")
    assert not ours.names(TARGET), "a target without a sample goes by its fingerprint"
    monkeypatch.setattr(MarkovWithEmbedding, "sample", "2" * 32, raising=False)
    monkeypatch.setattr(MarkovWithEmbedding, "fingerprint", property(lambda self: pytest.fail("all weights are read")))
    made(head.with_record(ours), nodes=2).check(TARGET)
    assert not theirs.names(TARGET) and HeadRecord().names(TARGET), "nobody knows of a published one"


@pytest.mark.parametrize("kind", MADE)
def test_words(kind: str, tmp_path: Path) -> None:
    MADE[kind][0].save(tmp_path, HeadRecord("markov", TARGET.fingerprint))
    assert isinstance(from_spec(f"{kind}:{tmp_path},nodes=2", TARGET), MADE[kind][1])
    with pytest.raises(UnknownOptionError, match="did you mean 'nodes'"):
        from_spec(f"{kind}:{tmp_path},node=3", TARGET)
    with pytest.raises(ModelNotFoundError, match="there is no folder"):
        from_spec(f"{kind}:{tmp_path / 'nowhere'}", TARGET)
