"""Cascades: the distribution of what they write, answers, the caches of all levels, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.certified import SAMPLED, TOKENS, assert_certified
from support.embedded_models import embedded
from support.noise_cells import CellNoise, every_result
from support.tiny_models import PROMPTS as TEXTS
from support.tiny_models import packed
from truedraft import Engine, SamplingParams
from truedraft.certify.certificate import Check, Stack
from truedraft.certify.draft_state import DraftState
from truedraft.certify.invariance import Invariance
from truedraft.certify.statistics import Statistics
from truedraft.core.budget import Budget, Hint
from truedraft.core.noise import KeyedNoise, Purpose
from truedraft.core.proposal import Draw, DrawKind, Proposal
from truedraft.core.tree import TokenTree
from truedraft.drafters import Cascade, Drafter, DraftModel, NoDrafter, Portfolio, PromptLookup, from_spec
from truedraft.drafters.base import DraftRequest, Features, StepOutcome
from truedraft.drafters.prompt_lookup import NgramIndex
from truedraft.errors import (
    CompositionError,
    IncompatibleRuleError,
    OptionError,
    TruedraftError,
    VocabularyMismatchError,
)
from truedraft.testing import MarkovModel, ScriptedDrafter
from truedraft.verification import SpeculativeSampling

VOCAB = 6
PROMPTS = [[3, 1, 2], [0], [5, 5, 4, 1], [2, 2], [1, 4, 1, 4, 1]]
WARM = SamplingParams(temperature=1.0)
TARGET = MarkovModel.random(VOCAB, 1, context_length=128)
MIDDLE = MarkovModel.random(VOCAB, 1, sharpness=1.2, context_length=128)
SMALL = MarkovModel.random(VOCAB, 1, sharpness=0.8, context_length=128)

CASCADES: dict[str, Callable[[], Cascade]] = {
    "model": lambda: Cascade(DraftModel(SMALL, 3), DraftModel(MIDDLE), 8),
    "lookup": lambda: Cascade(PromptLookup(min_ngram=1), DraftModel(MIDDLE), 8),
    "tree": lambda: Cascade(DraftModel(SMALL, branching=(2, 2)), DraftModel(MIDDLE), 5),
    "three levels": lambda: Cascade(Cascade(PromptLookup(min_ngram=1), DraftModel(SMALL), 3), DraftModel(MIDDLE), 8),
}
THROUGHOUT = {"tree", "three levels"}
"""Between them they have all that the others have: models, a lookup, trees inside, a cascade in a cascade."""


# ------------------------------------------------------------------------------------------ distributions


def watched(drafter: Drafter, seen: list[object]) -> Drafter:
    """Writes down what a drafter inside proposes, and what becomes of it."""
    propose, observe = drafter.propose, drafter.observe

    def proposing(*asked):  # type: ignore[no-untyped-def]
        made = propose(*asked)
        seen.extend(tuple(each.tree.host_ids) for each in made)
        return made

    def observing(batch, outcomes):  # type: ignore[no-untyped-def]
        seen.extend((each.path, each.tokens) for each in outcomes)
        observe(batch, outcomes)

    drafter.propose, drafter.observe = proposing, observing  # type: ignore[method-assign]
    return drafter


class Lying(ScriptedDrafter):
    """Says that it drew the token 0 from a distribution that gives it nothing."""

    kinds = frozenset({DrawKind.INDEPENDENT})  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(lambda tokens: [[0]], depth=1, nodes=1)

    def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
        probs = torch.zeros(1, 2, dtype=torch.float64)
        probs[0, 1] = 1.0
        tree = TokenTree.chain([0])
        draws = ((Draw(0, 0, DrawKind.INDEPENDENT),), ())
        return [Proposal.empty() if budget.is_zero else Proposal(tree, draws, probs) for budget in budgets]


def three_levels(seen: list[object]) -> Drafter:
    return Cascade(watched(DraftModel(MarkovModel.random(2, 7), 1), seen), DraftModel(MarkovModel.random(2, 6)), 2)


@pytest.mark.parametrize(
    ("inside", "vocab", "text", "length"),
    [
        *((lambda _: DraftModel(MarkovModel.random(2, 6), 2), 2, [1, 0], length) for length in (1, 2, 3)),
        (lambda _: DraftModel(MarkovModel.random(3, 6), branching=(2,)), 3, [1, 2], 2),
        (lambda _: ScriptedDrafter(lambda tokens: [[tokens[-1]], [0, 1]]), 3, [1, 2], 2),
        (three_levels, 2, [1], 2),
        (lambda _: Lying(), 2, [1], 2),
    ],
    ids=["chain of 1", "chain of 2", "chain of 3", "siblings", "candidates", "three levels", "draws that nobody made"],
)
def test_the_distribution_of_a_chain_is_the_middle_models(
    inside: Callable[[list[object]], Drafter], vocab: int, text: list[int], length: int
) -> None:
    """By running it in every cell of its noise: rejections, recovered tokens and further rounds included."""
    middle = MarkovModel.random(vocab, 5)

    def run(noise: CellNoise) -> tuple[object, tuple[int, ...]]:
        seen: list[object] = []
        cascade = Cascade(watched(inside(seen), seen), DraftModel(middle), length)
        request = DraftRequest(0, WARM, list(text))
        cascade.begin(request)
        (proposal,) = cascade.propose([request], [Budget(length)], [noise])
        ids = tuple(proposal.tree.host_ids)
        assert proposal.probs is not None
        for place, row in enumerate(proposal.probs):
            assert torch.allclose(row, middle.probs_after([*text, *ids[:place]]), atol=1e-12)
        cascade.end(request)
        return (*seen, ids), ids

    found = every_result(run)
    assert math.fsum(found.values()) == pytest.approx(1.0, abs=1e-9)
    for chain, mass in found.items():
        expected = math.prod(float(middle.probs_after([*text, *chain[:i]])[token]) for i, token in enumerate(chain))
        assert mass == pytest.approx(expected, abs=1e-9)


def test_no_number_decides_twice() -> None:
    """Keys of levels and turns differ even where position, purpose and index are the same."""
    noise = KeyedNoise(1, 10, 2)
    levels = [
        noise,
        noise.inside(0, 0),
        noise.inside(1, 0),
        noise.inside(0, 0).inside(0, 0),
        noise.inside(0, 0).inside(1, 0),
    ]
    levels += [noise.inside(1, 0).inside(0, 0), noise.of_member(1).inside(0, 0), KeyedNoise(1, 10, 3).inside(0, 0)]
    numbers = [each.uniform(purpose, depth) for each in levels for purpose in Purpose for depth in range(3)]
    assert len(set(numbers)) == len(numbers)
    at = noise.inside(4, 2)
    assert at.uniform(Purpose.DRAFT, 1) == noise.inside(4, 0).uniform(Purpose.DRAFT, 3)
    ours, theirs = at.gumbel(1, 5, torch.device("cpu")), noise.gumbel(3, 5, torch.device("cpu"))
    assert ours is not None
    assert theirs is not None
    assert ours.equal(theirs)  # the Gumbel noise of a position is that of all levels


# ------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(own, marks=[] if name in THROUGHOUT else pytest.mark.slow, id=name)
        for name, own in CASCADES.items()
    ],
)
def test_answers_and_caches_are_certified(make: Callable[[], Cascade], monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(TARGET, make(), SpeculativeSampling())
    more: tuple[tuple[SamplingParams, Check], ...] = (
        (SamplingParams(max_tokens=24), DraftState()),
        (SAMPLED, Invariance()),
        (SAMPLED, Statistics()),
    )
    assert_certified(monkeypatch, stack, PROMPTS, (*TOKENS, *more))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_answers_of_transformers_are_the_same(family: str) -> None:
    """With penalties, banned words and a form of the text, too: they change what the middle model gives."""
    target, middle = packed(family), packed("llama")
    prompts = [list(text) for text in TEXTS]
    for params in (
        SamplingParams(24),
        SamplingParams(24, temperature=0.9, seed=4, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(24, min_tokens=6, frequency_penalty=0.4),
    ):
        plain = Engine(target).generate(prompts, params)
        for inside in (PromptLookup(min_ngram=1), DraftModel(packed("gpt2"), 2)):
            engine = Engine(target, Cascade(inside, DraftModel(middle), 6), controller="fixed")
            assert [each.token_ids for each in engine.generate(prompts, params)] == [each.token_ids for each in plain]


def test_a_middle_model_like_the_target_is_always_right() -> None:
    engine = Engine(TARGET, Cascade(PromptLookup(min_ngram=1), DraftModel(TARGET), 6), controller="fixed")
    answer = engine.generate(PROMPTS[0], SamplingParams(43, temperature=1.0))
    assert answer.stats.accepted_tokens == answer.stats.draft_tokens > 30


# ------------------------------------------------------------------------------------------ caches and texts


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.data())
def test_an_index_taken_back_is_a_fresh_one(tokens: list[int], data: st.DataObject) -> None:
    index = NgramIndex(range(3, 0, -1))
    for _ in range(3):
        index.find(tokens)
        tokens = tokens[: data.draw(st.integers(0, len(tokens)))]
        index.rewind(tokens)
        fresh = NgramIndex(range(3, 0, -1))
        assert index.find(tokens) == fresh.find(tokens)
        tokens = tokens + data.draw(st.lists(st.integers(0, 2), max_size=10))
        assert index.find(tokens) == NgramIndex(range(3, 0, -1)).find(tokens)


def test_an_index_taken_far_back_reads_the_text_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truedraft.drafters.prompt_lookup._TAKEN_BACK", 5)
    index = NgramIndex(range(2, 0, -1))
    tokens = [1, 2, 1, 2, 3, 1, 2, 1]
    index.find(tokens)
    index.rewind(tokens[:5])
    assert index.find(tokens[:5]) == NgramIndex(range(2, 0, -1)).find(tokens[:5])


@torch.inference_mode()
def test_a_step_that_failed_leaves_nothing_behind() -> None:
    """Asked twice without being told between, it proposes the same twice; its middle model's cache is a fresh one."""
    cascade = CASCADES["three levels"]()
    request = DraftRequest(0, SamplingParams(), [3, 1, 2, 3, 1])
    cascade.begin(request)
    noise = KeyedNoise(0, 5, 1)
    first, second = (cascade.propose([request], [Budget(8)], [noise])[0] for _ in range(2))
    assert first.tree.host_ids == second.tree.host_ids
    assert len(first.tree) == 8
    text = [*request.tokens, *first.tree.host_ids[:2], 5]
    later = DraftRequest(0, SamplingParams(), text)
    cascade.observe([later], [StepOutcome(first, (0, 1), tuple(text[5:]))])
    assert list(cascade.held.models[0].prefixes.text(0)) == text[:7]
    (again,) = cascade.propose([later], [Budget(8)], [KeyedNoise(0, 8, 2)])
    fresh = CASCADES["three levels"]()
    fresh.begin(later)
    assert again.tree.host_ids == fresh.propose([later], [Budget(8)], [KeyedNoise(0, 8, 2)])[0].tree.host_ids
    cascade.end(later)
    assert not cascade.held.requests


def test_memory_holds_the_caches_of_all_levels() -> None:
    """What an engine with a limit does of it is held by tests/engine/test_cache_bytes."""
    assert [each.model for each in CASCADES["model"]().held.models] == [MIDDLE, SMALL]


@torch.inference_mode()
def test_the_context_ends_a_chain_and_a_budget_of_zero_does_no_work() -> None:
    cascade = CASCADES["model"]()
    near = DraftRequest(0, SamplingParams(), [1] * 126)
    cascade.begin(near)
    nothing, few = (cascade.propose([near], [budget], [KeyedNoise(0, 126, 1)])[0] for budget in (Budget(0), Budget(8)))
    assert (len(nothing.tree), len(few.tree)) == (0, 3)


def written(cascade: Cascade, params: SamplingParams, number: int, *, kept: bool = True, chains: int = 6) -> Hint:
    """What it expects of its guesses for a request behind some chains of five."""
    request = DraftRequest(number, params, [1, 2], kept=kept)
    cascade.begin(request)
    for step in range(chains):
        noise = KeyedNoise(number, 2, step)
        (proposal,) = cascade.propose([request], [Budget(5)], [noise])
        cascade.observe([request], [StepOutcome(proposal, (), ())])
        cascade.rewind(request)
    hint = cascade.hint(request)
    cascade.end(request)
    return hint


@torch.inference_mode()
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0)], ids=["greedy", "sampled"])
def test_it_counts_the_levels_that_guesses_save(params: SamplingParams) -> None:
    """Guesses of the middle model's own twin are all right: a chain of five takes one level. Without any it takes
    five."""
    right = Cascade(DraftModel(MIDDLE, 8), DraftModel(MIDDLE), 8)
    assert written(right, params, 0).guessed > 0.8
    assert right.levels == 1
    alone = Cascade(NoDrafter(), DraftModel(MIDDLE), 8)
    assert written(alone, params, 0).guessed < 0.15
    assert alone.levels == 5


@torch.inference_mode()
def test_what_it_counts_of_a_request_that_is_kept_is_told_to_others() -> None:
    for params, kept in [(WARM, True), (replace(WARM, seed=3), True), (SamplingParams(), True), (WARM, False)]:
        cascade = Cascade(DraftModel(MIDDLE, 8), DraftModel(MIDDLE), 8)
        first = written(cascade, WARM, 0, chains=0).guessed
        assert written(cascade, params, 1, kept=kept).guessed > first
        assert (written(cascade, WARM, 2, chains=0).guessed > first) is kept, (params, kept)


# ------------------------------------------------------------------------------------------ what goes wrong


def test_who_fails_inside_costs_no_answer() -> None:
    calls = 0

    def failing(tokens: Sequence[int]) -> list[list[int]]:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise RuntimeError("the sixth time")
        return [[1, 2]]

    engine = Engine(TARGET, Cascade(ScriptedDrafter(failing), DraftModel(MIDDLE), 4), controller="fixed")
    answer = engine.generate(PROMPTS[0], SamplingParams(30))
    assert answer.token_ids == Engine(TARGET).generate(PROMPTS[0], SamplingParams(30)).token_ids
    assert "the sixth time" in answer.warnings[0]


class Seeing(ScriptedDrafter):
    features = Features()


class Coupling(ScriptedDrafter):
    kinds = frozenset({DrawKind.COUPLED})  # type: ignore[assignment]


def test_what_does_not_go_together_is_refused() -> None:
    middle = DraftModel(MIDDLE)
    with pytest.raises(CompositionError, match="'prompt-lookup' has no model that could verify"):
        Cascade(middle, PromptLookup())
    with pytest.raises(CompositionError, match="'scripted' cannot draft inside a cascade"):
        Cascade(Seeing(lambda tokens: []), middle)
    with pytest.raises(CompositionError, match="'portfolio' cannot draft inside a cascade"):
        Cascade(Portfolio([PromptLookup()]), middle)
    with pytest.raises(IncompatibleRuleError):
        Cascade(Coupling(lambda tokens: []), middle)
    with pytest.raises(OptionError, match="num_speculative_tokens must be 1 or more"):
        Cascade(NoDrafter(), middle, 0)
    with pytest.raises(VocabularyMismatchError):
        Engine(TARGET, Cascade(DraftModel(MarkovModel.random(4, 1)), middle))
    with pytest.raises(VocabularyMismatchError):
        Engine(MarkovModel.random(4, 1), Cascade(PromptLookup(), middle))


def test_words() -> None:
    target = embedded()
    cascade = from_spec("cascade(prompt-lookup;draft),num_speculative_tokens=5", target)
    assert isinstance(cascade, Cascade)
    assert (cascade.limits.depth, cascade.drafter.name, cascade.middle.name) == (5, "prompt-lookup", "draft")
    deep = from_spec("cascade(suffix;draft;draft,num_speculative_tokens=3)", target)
    assert isinstance(deep, Cascade)
    assert isinstance(deep.drafter, Cascade)
    for words, told in {
        "cascade(draft)": "needs two members or more",
        "cascade": "needs members in parentheses",
        "cascade(draft;auto)": "has 'auto' as a member",
        "cascade(draft;prompt-lookup)": "'prompt-lookup' has no model that could verify",
        "cascade(medusa;draft)": "'medusa' cannot draft inside a cascade",
        "cascade(prompt-lookup;draft,chains=2)": "chains of 'draft' has no effect",
        "cascade(draft,async=1;draft)": "'draft' cannot draft inside a cascade",
        "cascade(prompt-lookup;draft),width=3": "option of drafter 'cascade'",
        "cascade(prompt-lookup;draft),num_speculative_tokens=0": "must be 1 or more",
    }.items():
        with pytest.raises(TruedraftError, match=told.replace("(", r"\(")):
            from_spec(words, target)


class TooMany(ScriptedDrafter):
    """Proposes a token more than it may."""

    def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
        return super().propose(batch, [Budget(budget.depth + 1, 64, 64) for budget in budgets], noise)


class FailingAtOnce(ScriptedDrafter):
    def begin(self, request: DraftRequest) -> None:
        raise RuntimeError("not today")


@pytest.mark.parametrize("inside", [TooMany, FailingAtOnce], ids=["too many", "at once"])
def test_who_breaks_the_contract_inside_is_given_up_and_nothing_is_left(inside: type[ScriptedDrafter]) -> None:
    middle = MarkovModel.random(VOCAB, 1, sharpness=1.2, context_length=128)
    cascade = Cascade(inside(lambda tokens: [[1, 2, 3, 4, 5]]), DraftModel(middle), 3)
    engine = Engine(TARGET, cascade, controller="fixed")
    answer = engine.generate(PROMPTS[0], SamplingParams(30))
    assert answer.token_ids == Engine(TARGET).generate(PROMPTS[0], SamplingParams(30)).token_ids
    assert len(answer.warnings) == 1
    assert not cascade.held.requests
    assert middle.pool.in_use == 0


@torch.inference_mode()
def test_steps_that_it_was_not_told_of_are_read_when_it_is_asked_again() -> None:
    """Its proposal came to nothing, and two plain steps followed, of which it is told of the last."""
    cascade = CASCADES["model"]()
    request = DraftRequest(0, SamplingParams(), [3, 1, 2])
    cascade.begin(request)
    (first,) = cascade.propose([request], [Budget(4)], [KeyedNoise(0, 3, 1)])
    other = (first.tree.host_ids[0] + 1) % VOCAB
    later = DraftRequest(0, SamplingParams(), [3, 1, 2, other, 3])
    cascade.observe([later], [StepOutcome(Proposal.empty(), (), (3,))])
    assert list(cascade.held.models[0].prefixes.text(0)) == [3, 1, 2]
    noise = KeyedNoise(0, 5, 3)
    (again,) = cascade.propose([later], [Budget(4)], [noise])
    fresh = CASCADES["model"]()
    fresh.begin(later)
    assert again.tree.host_ids == fresh.propose([later], [Budget(4)], [noise])[0].tree.host_ids
