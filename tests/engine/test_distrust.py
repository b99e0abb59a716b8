"""What a drafter gives is checked, and what it is given it cannot spoil."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from support.markov import spoiled
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.noise import Purpose
from truedraft.core.probs import draw
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.token_view import TokenView
from truedraft.core.tree import TokenTree
from truedraft.drafters import Drafter, DraftModel
from truedraft.testing import MarkovModel, ScriptedDrafter
from truedraft.verification import BlockVerification, Rule, SpeculativeSampling

VOCAB = 8
PROMPTS = [[3, 1], [1, 1], [2, 5]]
PARAMS = SamplingParams(max_tokens=15, temperature=1.0)

Spoil = Callable[[list[int], Tensor], Tensor]
"""From the text before a draw and its distribution `[vocab]` to the distribution that is stored."""


class Drawing(Drafter):
    """Draws chains from even distributions, and says something else of them."""

    name: ClassVar[str] = "drawing"

    def __init__(self, spoil: Spoil, depth: int = 3, vocab: int = VOCAB) -> None:
        self.limits = Budget(depth)
        self._spoil = spoil
        self._even = torch.full((vocab,), 1 / vocab, dtype=torch.float64)

    @property
    def kinds(self) -> frozenset[DrawKind]:
        return frozenset({DrawKind.INDEPENDENT})

    def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
        proposals = []
        for request, budget, own in zip(batch, budgets, noise, strict=True):
            text, probs = list(request.tokens), []
            for depth in range(budget.depth):
                uniform = torch.tensor([own.uniform(Purpose.DRAFT, depth, 0)], dtype=torch.float64)
                probs.append(self._spoil(text, self._even.clone()))
                text.append(int(draw(self._even[None], uniform)))
            drawn = torch.tensor(text[len(request.tokens) :])
            proposals.append(Proposal.chain(drawn, torch.stack(probs)) if probs else Proposal.empty())
        return proposals


def on_second(spoil: Callable[[Tensor], Tensor], after: int = 6) -> Spoil:
    """Spoil the distributions of the second prompt only, from some length of the text on."""
    return lambda text, dist: spoil(dist) if text[:2] == PROMPTS[1] and len(text) >= after else dist


def with_entry(value: float) -> Callable[[Tensor], Tensor]:
    return lambda dist: dist.index_fill(0, torch.tensor([2]), value)


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "log probabilities": torch.log,
    "half the mass": lambda dist: dist / 2,
    "a hundredth too much": lambda dist: dist * 1.01,
    "NaN": with_entry(torch.nan),
    "infinity": with_entry(torch.inf),
    "less than nothing": lambda dist: dist.clone().index_add_(
        0, torch.tensor([2, 3]), torch.tensor([-0.2, 0.2]).double()
    ),
}


@pytest.mark.plants_failures
@pytest.mark.parametrize("rule", [SpeculativeSampling(), BlockVerification()], ids=["speculative", "block"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_distribution_that_is_none_undrafts_its_request_alone(fault: str, rule: Rule) -> None:
    target = MarkovModel.random(VOCAB, seed=1)
    sound, answers = (
        Engine(target, Drawing(spoil), rule, controller="fixed", entropy=4).generate(PROMPTS, PARAMS)
        for spoil in (lambda text, dist: dist, on_second(FAULTS[fault]))
    )
    assert [(a.token_ids, a.stats, a.warnings) for a in answers[::2]] == [
        (a.token_ids, a.stats, ()) for a in sound[::2]
    ]
    broken = answers[1]
    assert (broken.finish_reason, broken.error, len(broken.token_ids)) == ("length", None, 15)
    (warning,) = broken.warnings
    assert "drafter 'drawing'" in warning and "no distributions" in warning and "undrafted" in warning
    assert broken.stats.draft_tokens < sound[1].stats.draft_tokens


@pytest.mark.plants_failures
def test_what_was_not_drawn_is_noticed_and_what_nobody_drew_from_may_hold_anything() -> None:
    """The stored distribution is one-hot at 7: each other token would stay for certain."""
    target = MarkovModel.random(VOCAB, seed=1)
    one_hot = torch.eye(VOCAB, dtype=torch.float64)[7]
    answer = Engine(target, Drawing(lambda text, dist: one_hot), controller="fixed", entropy=4).generate([3, 1], PARAMS)
    assert "nothing to the token drawn" in answer.warnings[0]
    assert answer.stats.accepted_tokens == 0

    class Unnamed(Drawing):
        def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
            return [
                each
                if each.probs is None
                else Proposal(each.tree, each.draws, torch.cat([each.probs, each.probs[:1] * torch.nan]))
                for each in super().propose(batch, budgets, noise)
            ]

    answer = Engine(target, Unnamed(lambda text, dist: dist), controller="fixed", entropy=4).generate([3, 1], PARAMS)
    assert answer.warnings == () and answer.stats.accepted_tokens > 0


@pytest.mark.plants_failures
@pytest.mark.parametrize("rule", [SpeculativeSampling(), BlockVerification()], ids=["speculative", "block"])
def test_a_distribution_that_breaks_below_a_drawn_token_does_not_bend_the_answer(rule: Rule) -> None:
    """To drop the token above it, because of what was drawn there, would give 1 with 0.75 instead of 0.5."""
    even = MarkovModel(torch.full((2, 2, 2), 0.5, dtype=torch.float64))
    drafter = Drawing(lambda text, dist: dist * torch.nan if text[-1] == 0 else dist, depth=2, vocab=2)
    engine = Engine(even, drafter, rule, controller="fixed", max_batch=50, entropy=4)
    made = engine.generate([[1, 1]] * 800, SamplingParams(max_tokens=3, temperature=1.0))
    # After a 1 from the prefill, so that the first distribution is sound.
    begun = sum(answer.token_ids[0] == 1 for answer in made)
    ones = sum(answer.token_ids[:2] == [1, 1] for answer in made)
    # About 400 answers begin with 1; more than 5 standard deviations off with probability below 1e-6.
    assert abs(ones - begun / 2) < 5 * (begun / 4) ** 0.5


@pytest.mark.parametrize("branching", [(1, 1, 1), (3, 2, 1)], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["sampled", "seeded"])
def test_a_draft_model_that_breaks_below_a_drawn_token_is_judged_by_what_it_drew(
    branching: tuple[int, ...], kind: str
) -> None:
    """Behind token 0 it gives nothing but NaN."""
    target = MarkovModel.random(VOCAB, seed=1)
    draft = spoiled(MarkovModel(target.probs), lambda row, pair: pair[1] or row.fill_(torch.nan))
    answers, plain = [], []
    for seed in range(20):
        params = PARAMS if kind == "sampled" else replace(PARAMS, seed=seed)
        engine = Engine(target, DraftModel(draft, branching=branching), controller="fixed", entropy=seed)
        answers += engine.generate(PROMPTS, params)
        plain += Engine(target).generate(PROMPTS, params)
    assert all(answer.warnings == () and len(answer.token_ids) == 15 for answer in answers)
    assert any(0 in answer.token_ids for answer in answers)
    assert sum(answer.stats.accepted_tokens for answer in answers) > 0
    if kind == "seeded":
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]


@pytest.mark.plants_failures
@pytest.mark.parametrize(
    ("tree", "probs", "words"),
    [
        (TokenTree.chain([1, 2]), torch.full((2, VOCAB + 1), 0.1), "shape (2, 9)"),
        (TokenTree.chain([1, 2]), torch.full((2, VOCAB), 1), "torch.int64"),
        (TokenTree(torch.tensor([1.0, 2.0]), TokenTree.chain([1, 2]).shape), torch.full((2, VOCAB), 1 / 8), "float32"),
        (TokenTree(torch.tensor([1]), TokenTree.chain([1, 2]).shape), torch.full((2, VOCAB), 1 / 8), "of shape (1,)"),
        (TokenTree.chain([1] * 9), torch.full((9, VOCAB), 1 / 8), "9 nodes, 9 deep"),
        (TokenTree.chain([VOCAB]), torch.full((1, VOCAB), 1 / 8), "outside 0 to 7"),
        (TokenTree.chain([-1]), torch.full((1, VOCAB), 1 / 8), "outside 0 to 7"),
    ],
)
def test_shapes_are_checked(tree: TokenTree, probs: Tensor, words: str) -> None:
    class Given(Drawing):
        def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
            whole = Proposal.chain(torch.zeros(len(tree), dtype=torch.int64), probs)
            return [Proposal(tree, whole.draws, probs) for _ in batch]

    answers = Engine(
        MarkovModel.random(VOCAB, seed=1), Given(lambda text, dist: dist), controller="fixed", entropy=4
    ).generate(PROMPTS, PARAMS)
    for answer in answers:
        assert "drafter 'drawing'" in answer.warnings[0] and words in answer.warnings[0]
        assert answer.stats.draft_tokens == 0


CHANGES: dict[str, Callable[[Any], object]] = {
    "append": lambda request: request.tokens.append(0),
    "insert": lambda request: request.tokens.insert(0, 0),
    "delete": lambda request: request.tokens.__delitem__(0),
    "set": lambda request: request.tokens.__setitem__(-1, 0),
    "add": lambda request: request.tokens.__iadd__([0]),
    "replace": lambda request: setattr(request, "tokens", [0]),
}


@pytest.mark.plants_failures
@pytest.mark.parametrize("change", CHANGES)
def test_a_drafter_cannot_change_the_text_that_it_is_shown(change: str) -> None:
    class Meddling(ScriptedDrafter):
        def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
            for request in batch:
                CHANGES[change](request)
            return super().propose(batch, budgets, noise)

    target = MarkovModel.random(VOCAB, seed=1)
    answer = Engine(target, Meddling(lambda tokens: [[5]]), controller="fixed", entropy=4).generate([3, 1], PARAMS)
    assert answer.token_ids == Engine(target, entropy=4).generate([3, 1], PARAMS).token_ids
    (warning,) = answer.warnings
    assert "drafter 'scripted' failed" in warning and "cannot" in warning


def test_a_view_reads_like_the_list_and_grows_with_it() -> None:
    tokens = [5, 6, 7]
    view = TokenView(tokens)
    tokens.append(8)
    assert (len(view), view[-1], view[1:3], list(view), view + tokens) == (4, 8, [6, 7], tokens, tokens * 2)
    assert 6 in view
    assert view == tokens and view == TokenView(tokens) and view != [5] and repr(view) == "[5, 6, 7, 8]"
    assert torch.tensor(view).tolist() == tokens  # type: ignore[arg-type]
    view[:].append(9)
    assert len(tokens) == 4


@pytest.mark.plants_failures
def test_observing_that_fails_undrafts_one_request_and_the_others_go_on_as_before() -> None:
    """A draft model's cache is as after a fresh start, so that nothing is lost but the time to read the text again."""

    class Broken(DraftModel):
        def observe(self, batch, outcomes):  # type: ignore[no-untyped-def]
            for request, outcome in zip(batch, outcomes, strict=True):
                if request.tokens[:2] == PROMPTS[1] and len(request.tokens) > 7:
                    raise RuntimeError("no idea")
                super().observe([request], [outcome])

    target = MarkovModel.random(VOCAB, seed=1)
    sound = Engine(target, DraftModel(target, 3), controller="fixed", entropy=4).generate(PROMPTS, PARAMS)
    draft = MarkovModel(target.probs)
    answers = Engine(target, Broken(draft, 3), controller="fixed", entropy=4).generate(PROMPTS, PARAMS)
    assert [answer.token_ids for answer in answers[::2]] == [answer.token_ids for answer in sound[::2]]
    assert all(answer.stats.draft_acceptance_rate == 1.0 and answer.warnings == () for answer in answers[::2])
    assert [answer.stats.recoveries for answer in answers] == [1, 1, 1]
    assert "no idea" in answers[1].warnings[0]
    assert 0 < answers[1].stats.draft_tokens < sound[1].stats.draft_tokens
    assert draft.pool.in_use == 0
