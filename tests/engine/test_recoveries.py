"""A failure that the engine gets over is counted and told once; see also the fixture for all tests in conftest.py."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import pytest

from truedraft import Engine, SamplingParams
from truedraft.engine import Answer
from truedraft.errors import ModelError
from truedraft.models.base import ForwardOutput
from truedraft.testing import MarkovModel, ScriptedDrafter

VOCAB = 8
PROMPTS = [[3, 1], [1, 1], [2, 5]]
PARAMS = SamplingParams(max_tokens=9)


class Together(ScriptedDrafter):
    """Fails whenever it is asked for several requests at once, as one whose catch-up is broken may."""

    failed = 0

    def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
        if len(batch) > 1:
            self.failed += len(batch)
            raise RuntimeError("out of place")
        return super().propose(batch, budgets, noise)


class Fails(MarkovModel):
    """Its second forward fails, and every one that a predicate names."""

    def __init__(self, broken: Callable[[int], bool]) -> None:
        super().__init__(MarkovModel.random(VOCAB, seed=1).probs)
        self.calls = 0
        self._broken = broken

    def forward(self, segments) -> ForwardOutput:  # type: ignore[no-untyped-def]
        self.calls += 1
        if self._broken(self.calls):
            raise RuntimeError("out of memory")
        return super().forward(segments)


def engine_told(engine: Engine) -> tuple[list[Answer], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answers = engine.generate(PROMPTS, PARAMS)
    return answers, [str(warning.message) for warning in caught]


def plain() -> list[list[int]]:
    return [answer.token_ids for answer in Engine(MarkovModel.random(VOCAB, seed=1)).generate(PROMPTS, PARAMS)]


@pytest.mark.plants_failures
def test_proposals_asked_for_again_are_counted_for_each_request_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    drafter = Together(lambda tokens: [[5]], depth=1)
    answers, told = engine_told(Engine(MarkovModel.random(VOCAB, seed=1), drafter, controller="fixed"))
    assert [answer.token_ids for answer in answers] == plain()
    assert sum(answer.stats.recoveries for answer in answers) == drafter.failed
    assert min(answer.stats.recoveries for answer in answers) > 1
    assert all(answer.stats.draft_tokens >= answer.stats.recoveries for answer in answers)  # alone it was answered
    assert len(told) == 1
    assert "drafter 'scripted' failed for 3 requests together (RuntimeError: out of place)" in told[0]
    assert [record.message for record in caplog.records] == ["drafter 'scripted' failed (RuntimeError: out of place)"]
    assert all(answer.warnings == () for answer in answers)  # nothing happened to the answers


@pytest.mark.plants_failures
def test_a_step_done_again_is_counted_and_told_once() -> None:
    answers, told = engine_told(Engine(Fails(lambda call: call in (2, 7))))
    assert [answer.token_ids for answer in answers] == plain()
    assert [answer.stats.recoveries for answer in answers] == [2, 2, 2]
    assert len(told) == 1
    assert "the step failed for 3 requests together (RuntimeError: out of memory)" in told[0]


class Crowded(MarkovModel):
    """Its forwards fail for more than two requests, as where memory is short, and for one that it cannot bear."""

    def __init__(self, unbearable: int) -> None:
        super().__init__(MarkovModel.random(VOCAB, seed=1).probs)
        self.ran: list[int] = []
        self.failed = 0
        self._unbearable = unbearable

    def forward(self, segments) -> ForwardOutput:  # type: ignore[no-untyped-def]
        if len(segments) > 2 or any(int(segment.tokens[0]) == self._unbearable for segment in segments):
            self.failed += 1
            raise RuntimeError("out of memory")
        self.ran.append(len(segments))
        return super().forward(segments)


@pytest.mark.plants_failures
def test_a_step_that_fails_is_done_again_in_halves() -> None:
    prompts = [[1, 2], [1, 3], [1, 4], [1, 5], [6, 7], [1, 1], [1, 6], [1, 7]]
    params = SamplingParams(max_tokens=1)
    plain = Engine(MarkovModel.random(VOCAB, seed=1)).generate(prompts, params)
    model = Crowded(unbearable=6)
    answers = Engine(model).generate(prompts, params)
    for place, (answer, wanted) in enumerate(zip(answers, plain, strict=True)):
        assert answer.finish_reason == ("error" if place == 4 else "length")
        assert place == 4 or answer.token_ids == wanted.token_ids
    assert model.ran == [2, 2, 1, 2]
    assert model.failed == 5  # for 8, 4, 4 and 2 requests, and for one


@pytest.mark.plants_failures
def test_one_request_alone_is_not_asked_again() -> None:
    class Broken(ScriptedDrafter):
        asked = 0

        def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
            self.asked += 1
            raise RuntimeError("no idea")

    drafter = Broken(lambda tokens: [])
    answer = Engine(MarkovModel.random(VOCAB, seed=1), drafter, controller="fixed").generate(PROMPTS[0], PARAMS)
    assert answer.token_ids == plain()[0]
    assert (drafter.asked, answer.stats.recoveries, len(answer.warnings)) == (1, 0, 1)


@pytest.mark.plants_failures
def test_failures_are_logged_once_with_their_traceback(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedDrafter):
        def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
            if self.outcomes[-1][1].tokens[-1] % 2:
                raise RuntimeError("odd")
            raise LookupError("even")

    drafter = Broken(lambda tokens: [])
    engine = Engine(MarkovModel.random(VOCAB, seed=1), drafter, controller="fixed")
    for _ in range(2):
        answers = engine.generate([*PROMPTS, *PROMPTS], PARAMS)
        assert all("went on undrafted" in answer.warnings[0] for answer in answers)
    engine.generate(PROMPTS, PARAMS)
    assert {record.name for record in caplog.records} == {"truedraft.engine.failures"}
    kinds = [record.exc_info[0] for record in caplog.records if record.exc_info is not None]
    assert len(kinds) == len(set(kinds)) == len(caplog.records) > 0
    assert "in propose" in caplog.text and "drafter 'scripted' failed (" in caplog.text


def test_an_error_of_the_target_is_logged_and_is_the_cause_of_what_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match="out of memory") as caught:
        Engine(Fails(lambda call: call == 2)).generate(PROMPTS[0], PARAMS)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "in forward" in caplog.text


def test_without_logging_set_up_nothing_is_printed() -> None:
    """Python prints to standard error what no handler takes; a traceback is not for the users of a command."""
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("truedraft").handlers)
