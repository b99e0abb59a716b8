"""What a drafter gives is checked, what it is given it cannot spoil, and where it fails it bends no answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from support.answers import fixed
from support.chi_square import p_value
from support.faulty_parts import raising
from support.layer_heads import random_head
from support.layer_heads import target as layered
from support.markov import spoiled
from support.tiny_models import CONTEXT
from support.tiny_models import PROMPTS as TEXTS
from support.tiny_models import VOCAB as WORDS
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.noise import Purpose, UniformKeys, uniforms
from truedraft.core.probs import draw
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.token_view import TokenView
from truedraft.core.tree import TokenTree
from truedraft.drafters import Cascade, CutShortError, Drafter, DraftModel, Eagle3
from truedraft.kinds.eagle.module import Eagle3Config, Eagle3Head
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
        each = zip(batch, budgets, noise, strict=True)
        return [self._chain(len(batch), *given) for given in each]

    def _chain(self, asked, request, budget, noise):  # type: ignore[no-untyped-def]
        text, probs = list(request.tokens), []
        for depth in range(budget.depth):
            uniform = torch.tensor([noise.uniform(Purpose.DRAFT, depth, 0)], dtype=torch.float64)
            probs.append(self._spoil(text, self._even.clone()))
            text.append(int(draw(self._even[None], uniform)))
        drawn = torch.tensor(text[len(request.tokens) :])
        return Proposal.chain(drawn, torch.stack(probs)) if probs else Proposal.empty()


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
        fixed(target, Drawing(spoil), rule, entropy=4).generate(PROMPTS, PARAMS)
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
    answer = fixed(target, Drawing(lambda text, dist: one_hot), entropy=4).generate([3, 1], PARAMS)
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

    answer = fixed(target, Unnamed(lambda text, dist: dist), entropy=4).generate([3, 1], PARAMS)
    assert answer.warnings == () and answer.stats.accepted_tokens > 0


@pytest.mark.plants_failures
@pytest.mark.parametrize("rule", [SpeculativeSampling(), BlockVerification()], ids=["speculative", "block"])
def test_a_distribution_that_breaks_below_a_drawn_token_does_not_bend_the_answer(rule: Rule) -> None:
    """To drop the token above it, because of what was drawn there, would give 1 with 0.75 instead of 0.5."""
    even = MarkovModel(torch.full((2, 2, 2), 0.5, dtype=torch.float64))
    drafter = Drawing(lambda text, dist: dist * torch.nan if text[-1] == 0 else dist, depth=2, vocab=2)
    engine = fixed(even, drafter, rule, max_batch=50, entropy=4)
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
        engine = fixed(target, DraftModel(draft, branching=branching), entropy=seed)
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

    answers = fixed(MarkovModel.random(VOCAB, seed=1), Given(lambda text, dist: dist), entropy=4).generate(
        PROMPTS, PARAMS
    )
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
    answer = fixed(target, Meddling(lambda tokens: [[5]]), entropy=4).generate([3, 1], PARAMS)
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
    sound = fixed(target, DraftModel(target, 3), entropy=4).generate(PROMPTS, PARAMS)
    draft = MarkovModel(target.probs)
    answers = fixed(target, Broken(draft, 3), entropy=4).generate(PROMPTS, PARAMS)
    assert [answer.token_ids for answer in answers[::2]] == [answer.token_ids for answer in sound[::2]]
    assert all(answer.stats.draft_acceptance_rate == 1.0 and answer.warnings == () for answer in answers[::2])
    assert [answer.stats.recoveries for answer in answers] == [1, 1, 1]
    assert "no idea" in answers[1].warnings[0]
    assert 0 < answers[1].stats.draft_tokens < sound[1].stats.draft_tokens
    assert draft.pool.in_use == 0


# ------------------------------------------------------------------------------------------ failures behind a draw

# What a drafter had drawn before it failed, because of what it drew, is judged: second tokens of answers are counted
# against the target's own distribution; a sound engine fails a case with probability below `FALSE_ALARM`.
FOUR, BATCH, BATCHES = 4, 50, 16
FALSE_ALARM = 1e-6
WARM = SamplingParams(max_tokens=5, temperature=1.0)


def plants(test: Callable[..., None]) -> Callable[..., None]:
    marked: Callable[..., None] = pytest.mark.filterwarnings("ignore::RuntimeWarning")(test)
    return pytest.mark.plants_failures(marked)


def fails_at_zero(model: MarkovModel) -> MarkovModel:
    """It fails whenever it is fed token 0."""
    return raising(model, "out of order", forward=lambda segments: any(0 in each.tokens.tolist() for each in segments))


def everywhere(*weights: float) -> MarkovModel:
    """The same distribution everywhere."""
    return MarkovModel(torch.tensor(weights, dtype=torch.float64).expand(FOUR, FOUR, FOUR).clone())


def uneven() -> MarkovModel:
    return everywhere(0.3, 0.3, 0.2, 0.2)


EVEN = everywhere(0.25, 0.25, 0.25, 0.25)
EVEN.probs[1, 2] = torch.tensor([0.0, 1.0, 1.0, 1.0]) / 3  # no answer begins with 0, so all are drafted for


class ByHand(Drawing):
    """Draws chains of two from even distributions, and fails behind token 0; it says what it drew, or not."""

    name = "by hand"

    def __init__(self, tells: bool) -> None:
        super().__init__(lambda text, dist: dist, depth=2, vocab=FOUR)
        self._tells = tells

    def _chain(self, asked, request, budget, noise):  # type: ignore[no-untyped-def]
        drawn = super()._chain(asked, request, budget, noise)
        if 0 not in drawn.tree.host_ids:
            return drawn
        error, length = RuntimeError("out of order"), drawn.tree.host_ids.index(0) + 1
        if self._tells and asked == 1:
            raise CutShortError(
                Proposal.chain(torch.tensor(drawn.tree.host_ids[:length]), drawn.probs[:length])
            ) from error
        raise error


MAKERS: dict[str, Callable[[], Drafter]] = {
    "chain": lambda: DraftModel(fails_at_zero(uneven()), 2),
    "without replacement": lambda: DraftModel(fails_at_zero(uneven()), branching=(2, 1)),
    "several chains": lambda: DraftModel(fails_at_zero(uneven()), 2, chains=2),
    "inside a cascade": lambda: Cascade(DraftModel(fails_at_zero(uneven()), 3), DraftModel(uneven(), 4), 4),
    "the middle of a cascade": lambda: Cascade(DraftModel(EVEN, 3), DraftModel(fails_at_zero(uneven()), 4), 4),
    "by hand": lambda: ByHand(tells=True),
}


def chance(drafter: Drafter, rule: Rule) -> float:
    engine = fixed(EVEN, drafter, rule, max_batch=BATCH, entropy=3)
    counts = np.zeros(FOUR, dtype=np.int64)
    for _ in range(BATCHES):
        for answer in engine.generate([[1, 2]] * BATCH, WARM):
            assert answer.error is None
            counts[answer.token_ids[1]] += 1
    return p_value(counts, np.full(FOUR, 1 / FOUR))


@plants
@pytest.mark.parametrize("name", MAKERS)
def test_the_answers_follow_the_target(name: str) -> None:
    assert chance(MAKERS[name](), SpeculativeSampling()) > FALSE_ALARM


@plants
def test_so_they_do_where_blocks_are_judged() -> None:
    assert chance(MAKERS["chain"](), BlockVerification()) > FALSE_ALARM


@plants
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0, seed=4)], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("name", MAKERS)
def test_greedy_and_seeded_answers_stay_what_they_are(name: str, params: SamplingParams) -> None:
    if name == "by hand":
        pytest.skip("it draws for sampled requests alone")
    model, prompts = MarkovModel.random(FOUR, seed=2), [[1, 2], [3, 3], [2, 1]]
    params = replace(params, max_tokens=12)
    plain = [answer.token_ids for answer in Engine(model).generate(prompts, params)]
    made = fixed(model, MAKERS[name]()).generate(prompts, params)
    assert [answer.token_ids for answer in made] == plain


@plants
def test_where_nobody_knows_what_was_drawn_there_is_no_answer() -> None:
    engine = fixed(EVEN, ByHand(tells=False), max_batch=BATCH, entropy=3)
    answers = engine.generate([[1, 2]] * BATCH, WARM)
    failed = [answer for answer in answers if answer.error is not None]
    assert 0 < len(failed) < BATCH
    assert all("did not say what (RuntimeError: out of order)" in str(answer.error) for answer in failed)


class DrawsMany(ByHand):
    """Draws as many numbers at once as are worked out together, and fails then."""

    def _chain(self, asked, request, budget, noise):  # type: ignore[no-untyped-def]
        numbers = np.arange(64)
        uniforms([noise], Purpose.DRAFT, UniformKeys(numbers * 0, numbers * 0, numbers))
        raise RuntimeError("out of order")


class FailsBefore(ByHand):
    """Fails together after it has drawn, and alone before it does."""

    def _chain(self, asked, request, budget, noise):  # type: ignore[no-untyped-def]
        if asked > 1:
            noise.uniform(Purpose.DRAFT, 0)
        raise RuntimeError("out of order")


@plants
def test_numbers_that_are_worked_out_together_are_drawn_as_well() -> None:
    (answer,) = fixed(EVEN, DrawsMany(tells=False)).generate([[1, 2]], WARM)
    assert "did not say what (RuntimeError: out of order)" in str(answer.error)


@plants
def test_what_was_drawn_together_is_not_drawn_where_each_is_asked_for_alone() -> None:
    answers = fixed(EVEN, FailsBefore(tells=False), max_batch=BATCH).generate([[1, 2]] * 4, WARM)
    assert [(answer.error, len(answer.token_ids)) for answer in answers] == [(None, 5)] * 4


def eagle() -> Eagle3:
    sizes = Eagle3Config(48, WORDS, (0, 1), heads=4, kv_heads=2, head=16, inner=64, reach=3, most_positions=CONTEXT)
    return Eagle3(random_head(Eagle3Head, sizes))


@plants
@pytest.mark.parametrize("at", [1, 2], ids=["reading", "below a drawn token"])
def test_heads_draft_on_after_a_batch_that_failed(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Together they fail once, each alone does not: the same is drafted as if nothing had failed."""
    params, drafted = SamplingParams(max_tokens=12, temperature=1.0), []
    for fails in (False, True):
        drafter = eagle()
        engine = fixed(layered(), drafter, entropy=3)
        runner, calls = drafter._running[0], [0]
        forward = runner.forward

        def failing(segments, vectors, observed, forward=forward, calls=calls, fails=fails):  # type: ignore[no-untyped-def]
            calls[0] += len(segments) > 1
            if fails and len(segments) > 1 and calls[0] == at:
                raise RuntimeError("out of memory")
            return forward(segments, vectors, observed)

        monkeypatch.setattr(runner, "forward", failing)
        answers = engine.generate([list(each) for each in TEXTS], params)
        drafted.append([(answer.token_ids, answer.stats.draft_tokens, answer.warnings) for answer in answers])
        assert sum(answer.stats.recoveries for answer in answers) == fails * len(TEXTS)
    assert drafted[0] == drafted[1] and min(count for _, count, _ in drafted[0]) > 12


@pytest.mark.plants_failures
@pytest.mark.parametrize("level", [1, 2])
def test_what_a_head_drew_before_it_failed_is_proposed(monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    drafter = eagle()
    engine = fixed(layered(), drafter, entropy=3)
    runner, calls = drafter._running[0], [0]
    forward = runner.forward

    def failing(segments, vectors, observed):  # type: ignore[no-untyped-def]
        calls[0] = 0 if observed else calls[0] + 1
        if calls[0] == level:
            raise RuntimeError("out of order")
        return forward(segments, vectors, observed)

    monkeypatch.setattr(runner, "forward", failing)
    answer = engine.generate(list(TEXTS[0]), SamplingParams(max_tokens=12, temperature=1.0))
    assert answer.stats.draft_tokens == level and "out of order" in answer.warnings[0]
