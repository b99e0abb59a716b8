"""What an engine tells of each step: how many rows, behind which contexts, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from support.answers import fixed
from support.faulty_parts import raising
from support.markov import greedy
from support.records import watched
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.stats import StepRecord
from truedraft.drafters import DraftModel
from truedraft.testing import MarkovModel, ScriptedController, ScriptedDrafter, altered

VOCAB = 8


@pytest.fixture
def target() -> MarkovModel:
    return MarkovModel.random(VOCAB, seed=1, context_length=1000)


def right(model: MarkovModel, depth: int) -> ScriptedDrafter:
    """Guesses `depth` tokens, all of them right."""
    return ScriptedDrafter(lambda tokens: [greedy(model, tokens, depth)], depth=depth)


def wrong(model: MarkovModel, paths: int) -> ScriptedDrafter:
    """Guesses `paths` tokens for one place, none of them right."""

    def script(tokens: Sequence[int]) -> list[list[int]]:
        best = greedy(model, tokens, 1)[0]
        return [[(best + 1 + i) % VOCAB] for i in range(paths)]

    return ScriptedDrafter(script)


def shapes(steps: Sequence[StepRecord]) -> list[tuple[int, int, tuple[int, ...], int, bool]]:
    return [(len(step.requests), step.rows, step.contexts, step.nodes, step.prefill) for step in steps]


@pytest.mark.parametrize(
    ("prompts", "guessed", "tokens", "expected"),
    [
        ([[3, 1, 4]], 0, 3, [(1, 3, (0,), 0, True), (1, 1, (3,), 0, False), (1, 1, (4,), 0, False)]),
        ([[3]], 2, 4, [(1, 1, (0,), 0, True), (1, 3, (1,), 2, False)]),
        (
            [[i % VOCAB for i in range(600)]],
            2,
            4,
            [(1, 256, (0,), 0, True), (1, 256, (256,), 0, True), (1, 88, (512,), 0, True), (1, 3, (600,), 2, False)],
        ),
        (
            [[3, 1, 4], [2], [5, 6]],
            2,
            7,
            [(3, 6, (0, 0, 0), 0, True), (3, 9, (3, 1, 2), 6, False), (3, 9, (6, 4, 5), 6, False)],
        ),
        (
            [[3, 1, 4]],
            -3,
            4,
            [(1, 3, (0,), 0, True), *((1, 4, (3 + n,), 3, False) for n in (0, 1)), (1, 1, (5,), 0, False)],
        ),
    ],
    ids=["plain", "one token", "in parts", "a ragged batch", "wrong guesses"],
)
def test_what_each_step_feeds(
    target: MarkovModel, prompts: list[list[int]], guessed: int, tokens: int, expected: list[tuple[object, ...]]
) -> None:
    """Also a prompt of one token is a prefill; a batch holds a tree for each request. Those below 0 are wrong guesses
    for one place."""
    drafter = wrong(target, -guessed) if guessed < 0 else right(target, guessed) if guessed else None
    engine = fixed(target, drafter)
    assert engine.listeners == []
    steps = watched(engine)
    engine.generate(prompts, SamplingParams(max_tokens=tokens))
    assert shapes(steps) == expected
    with pytest.raises(AttributeError):
        steps[0].total_s = 2.0  # type: ignore[misc]


def test_a_step_with_one_prefill_among_others_is_a_prefill(target: MarkovModel) -> None:
    engine = fixed(target, right(target, 2))
    steps = watched(engine)
    engine.submit([3, 1, 4], SamplingParams(max_tokens=7))
    engine.step()
    engine.submit([2, 5], SamplingParams(max_tokens=1))
    engine.step()
    engine.step()
    assert shapes(steps) == [(1, 3, (0,), 0, True), (2, 5, (3, 0), 2, True), (1, 3, (6,), 2, False)]


def test_a_budget_of_zero_is_a_step_of_plain_decoding(target: MarkovModel) -> None:
    engine = Engine(target, right(target, 3), controller=ScriptedController([Budget(2), Budget(0), Budget(1)]))
    steps = watched(engine)
    engine.generate([3, 1], SamplingParams(max_tokens=9))
    assert [(step.rows, step.nodes) for step in steps] == [(2, 0), (3, 2), (1, 0), (2, 1), (2, 1)]


@pytest.mark.parametrize("count", [1, 2, 9])
def test_one_call_for_each_forward_of_the_target(target: MarkovModel, count: int) -> None:
    engine = fixed(target, DraftModel(MarkovModel.random(VOCAB, seed=2), 3))
    steps = watched(engine)
    stats = engine.generate([3, 1, 4], SamplingParams(max_tokens=count)).stats
    assert len(steps) == stats.target_calls + stats.prefill_calls
    assert sum(step.nodes for step in steps) == stats.draft_tokens
    assert engine.step() is False
    assert len(steps) == stats.target_calls + stats.prefill_calls, "an idle engine reported a step"


# --- times ---


def test_parts_are_counted_where_they_belong_and_once(target: MarkovModel) -> None:
    """A sleep never ends early, so lower bounds hold on any machine."""
    drafter = right(target, 2)
    slow = altered(target, forward=lambda segments: time.sleep(0.02) or target.forward(segments))
    slow_drafter = altered(drafter, propose=lambda *given: time.sleep(0.01) or drafter.propose(*given))
    engine = fixed(slow, slow_drafter)
    steps = watched(engine)
    started = time.perf_counter()
    engine.generate([[3, 1, 4], [2]], SamplingParams(max_tokens=7))
    whole = time.perf_counter() - started
    for step in steps:
        parts = (step.draft_s, step.target_s, step.verify_s)
        assert min(parts) > 0.0
        assert sum(parts) <= step.total_s
        assert step.target_s >= 0.02
        assert step.draft_s >= (0.0 if step.prefill else 0.01)
    assert sum(step.total_s for step in steps) <= whole


@pytest.mark.plants_failures
def test_a_step_that_fails_for_all_is_told_of_for_each_that_is_tried_alone(target: MarkovModel) -> None:
    """The forward of the pack fails; then one request runs, and the other fails by itself."""

    engine = Engine(raising(target, forward=lambda segments: any(7 in segment.tokens for segment in segments)))
    steps = watched(engine)
    fine, broken = engine.submit([3, 1], SamplingParams(max_tokens=1)), engine.submit([7, 7])
    engine.step()
    assert (fine.finish_reason, broken.finish_reason) == ("length", "error")
    assert shapes(steps) == [(1, 2, (0,), 0, True)]
