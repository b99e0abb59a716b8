"""A request that cannot start, go on or end costs the others nothing, and nothing of it is left. What the engine gets
over is counted and told once; see also the fixture for all tests in conftest.py."""

from __future__ import annotations

import itertools
import logging
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from support import tiny_models
from support.answers import finished, fixed
from support.faulty_parts import raising
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Speculation
from truedraft.drafters import DraftModel, PromptLookup
from truedraft.engine import Answer
from truedraft.errors import ModelError, OptionError
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.cache import PrefixCache, RequestCache
from truedraft.models.cache.buffers import Buffers
from truedraft.testing import MarkovModel, ScriptedDrafter, altered

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
PARAMS = SamplingParams(max_tokens=12)
SMALL, FEW = [[3, 1], [1, 1], [2, 5]], SamplingParams(max_tokens=9)


@pytest.fixture
def target() -> LanguageModel:
    return tiny_models.packed("llama")


def expected(target: LanguageModel) -> list[list[int]]:
    return [Engine(target).generate(prompt, PARAMS).token_ids for prompt in PROMPTS]


def fail_once(patch: pytest.MonkeyPatch, owner: Any, name: str, at: int, error: Exception) -> None:
    """The `at`-th call of a method raises."""
    calls, before = itertools.count(), getattr(owner, name)

    def failing(*given: Any, **named: Any) -> Any:
        if next(calls) == at:
            raise error
        return before(*given, **named)

    patch.setattr(owner, name, failing)


# ------------------------------------------------------------------------------------------ one of several


@pytest.mark.parametrize("options", [*({"sample": sample} for sample in (None, "1", 1.5, -1)), {"scope": ["a"]}])
def test_samples_that_are_no_numbers_and_scopes_that_cannot_be_compared_are_refused(
    target: LanguageModel, options: dict[str, Any]
) -> None:
    with pytest.raises(OptionError, match=r"sample must be|scope must be hashable"):
        Engine(target).submit([1], **options)


@pytest.mark.plants_failures
@pytest.mark.parametrize("place", range(3))
def test_one_that_gets_no_memory_fails_alone(
    target: LanguageModel, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = expected(target)
    engine = fixed(target, DraftModel(tiny_models.packed("llama")))
    fail_once(monkeypatch, engine.target, "new_cache", place, MemoryError("no room"))
    answers = engine.generate(PROMPTS, PARAMS)
    failed = answers.pop(place)
    assert failed.finish_reason == "error" and "no room" in str(failed.error)
    assert [answer.token_ids for answer in answers] == own[:place] + own[place + 1 :]
    assert engine.check_idle() == []
    assert [answer.token_ids for answer in engine.generate(PROMPTS, PARAMS)] == own


@pytest.mark.plants_failures
def test_where_memory_is_for_two_one_of_three_fails(target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it held is given back before the next one is tried alone, and its error, which is kept, keeps none of it."""

    def scarce(self: Buffers, start: int, end: int, limit: int) -> None:
        if pool.in_use > 2 or pool.kept_bytes:
            failed.append(weakref.ref(self))
            raise MemoryError("no room")
        reserve(self, start, end, limit)

    own, pool, reserve = expected(target), target.pool, Buffers.reserve
    failed: list[weakref.ref[Buffers]] = []
    assert pool is not None
    monkeypatch.setattr(Buffers, "reserve", scarce)
    answers = Engine(target).generate(PROMPTS, PARAMS)
    assert [answer.finish_reason for answer in answers] == ["error", "length", "length"]
    assert [answer.token_ids for answer in answers[1:]] == own[1:]
    assert failed and not any(buffers() for buffers in failed)


@pytest.mark.plants_failures
def test_one_whose_beginning_cannot_be_kept_ends_all_the_same(
    target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, pool, draft = expected(target), target.pool, DraftModel(tiny_models.noisy("llama", 0.01))
    assert pool is not None
    before = pool.in_use
    engine = fixed(target, draft, prefix_cache_bytes=1 << 20)
    monkeypatch.setattr(PrefixCache, "keep", lambda *_: 1 / 0)
    assert [answer.token_ids for answer in engine.generate(PROMPTS, PARAMS)] == own
    assert engine.check_idle() == []
    assert pool.in_use == before and not draft.held.requests


@pytest.mark.plants_failures
def test_what_failed_is_kept_for_nobody(target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(target, prefix_cache_bytes=1 << 20)
    long = [(5 * place) % 50 for place in range(100)]
    fail_once(monkeypatch, engine._verifier, "verify", 3, RuntimeError("broken"))
    with pytest.raises(Exception, match="broken"):
        engine.generate(long, PARAMS)
    assert engine._sharing.stores[0].n_bytes == 0
    engine.generate(long, PARAMS)
    assert engine._sharing.stores[0].n_bytes > 0


@pytest.mark.plants_failures
def test_a_step_that_fails_behind_its_commit_goes_on_from_there(
    target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = expected(target)
    engine = fixed(target, PromptLookup(min_ngram=1))
    fail_once(monkeypatch, engine._drafting, "observe", 0, RuntimeError("broken"))  # behind the prompts' step
    answers = engine.generate(PROMPTS, PARAMS)
    assert [(answer.finish_reason, answer.token_ids) for answer in answers] == [("length", tokens) for tokens in own]


def test_requests_that_are_over_keep_no_output_of_their_batch(target: LanguageModel) -> None:
    engine = fixed(target, PromptLookup(min_ngram=1))
    requests = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
    finished(engine, requests)
    assert all(request.last_step is not None and request.last_step.shown is None for request in requests)
    assert all(request.drafting.view is None for request in requests)


@pytest.mark.parametrize("limit", [None, 1 << 24])
def test_drafters_that_a_request_does_not_want_hold_nothing_for_it(target: LanguageModel, limit: int | None) -> None:
    lookup, begun = PromptLookup(min_ngram=1), list[int]()
    drafter = altered(lookup, begin=lambda request: begun.append(request.id) or lookup.begin(request))
    engine = fixed(target, drafter, max_cache_bytes=limit)
    request = engine.submit([1, 2, 1, 2], PARAMS, speculation=Speculation(()))
    wanted = engine.submit([1, 2, 1, 2], PARAMS)
    without, drafted = finished(engine, [request, wanted])
    assert begun == [wanted.draft.id]
    assert without.stats.draft_tokens == 0 and without.token_ids == drafted.token_ids


def test_scopes_are_forgotten_with_their_last_block() -> None:
    store = PrefixCache(most_bytes=1)
    for scope in range(50):
        cache = RequestCache(256)
        cache.reserve(64)
        cache.write(0, torch.zeros(1, 64, 8), torch.zeros(1, 64, 8))
        cache.commit(range(64))
        store.join(scope, cache, list(range(64)), scope)
        store.keep(scope)
        store.leave(scope)
    assert store.n_bytes == 0 and not store._roots


# ------------------------------------------------------------------------------------------ tried again


def markov() -> MarkovModel:
    return MarkovModel.random(8, seed=1)


def plain(prompts: Sequence[list[int]] = SMALL, params: SamplingParams = FEW) -> list[list[int]]:
    return [answer.token_ids for answer in Engine(markov()).generate(list(prompts), params)]


def failing_forwards(*numbers: int) -> MarkovModel:
    calls = itertools.count(1)
    return raising(markov(), "out of memory", forward=lambda segments: next(calls) in numbers)


def engine_told(engine: Engine) -> tuple[list[Answer], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answers = engine.generate(SMALL, FEW)
    return answers, [str(warning.message) for warning in caught]


@pytest.mark.plants_failures
def test_proposals_asked_for_again_are_counted_for_each_request_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """As of a drafter whose catch-up is broken: it fails whenever it is asked for several requests at once."""
    asked: list[int] = []
    drafter = raising(
        ScriptedDrafter(lambda tokens: [[5]], depth=1),
        propose=lambda batch, *_: asked.append(len(batch) if len(batch) > 1 else 0) or len(batch) > 1,
    )
    answers, told = engine_told(fixed(markov(), drafter))
    assert [answer.token_ids for answer in answers] == plain()
    assert sum(answer.stats.recoveries for answer in answers) == sum(asked)
    assert min(answer.stats.recoveries for answer in answers) > 1
    assert all(answer.stats.draft_tokens >= answer.stats.recoveries for answer in answers)  # alone it was answered
    (warning,) = told
    assert "drafter 'scripted' failed for 3 requests together (RuntimeError: no idea)" in warning
    assert [record.message for record in caplog.records] == ["drafter 'scripted' failed (RuntimeError: no idea)"]
    assert all(answer.warnings == () for answer in answers)  # nothing happened to the answers


@pytest.mark.plants_failures
def test_a_step_done_again_is_counted_and_told_once() -> None:
    answers, told = engine_told(Engine(failing_forwards(2, 7)))
    assert [answer.token_ids for answer in answers] == plain()
    assert [answer.stats.recoveries for answer in answers] == [2, 2, 2]
    (warning,) = told
    assert "the step failed for 3 requests together (RuntimeError: out of memory)" in warning


@pytest.mark.plants_failures
def test_a_step_that_fails_is_done_again_in_halves() -> None:
    """Where memory is for two requests, and one is more than it can bear."""
    prompts, params = [[1, 2], [1, 3], [1, 4], [1, 5], [6, 7], [1, 1], [1, 6], [1, 7]], SamplingParams(max_tokens=1)
    tried: list[int] = []

    def crowded(segments: Sequence[Segment]) -> bool:
        fails = len(segments) > 2 or any(int(segment.tokens[0]) == 6 for segment in segments)
        tried.append(-len(segments) if fails else len(segments))
        return fails

    answers = Engine(raising(markov(), forward=crowded)).generate(prompts, params)
    unbearable = answers.pop(4)
    wanted = plain(prompts, params)
    assert unbearable.finish_reason == "error"
    assert [answer.token_ids for answer in answers] == wanted[:4] + wanted[5:]
    assert [count for count in tried if count > 0] == [2, 2, 1, 2]
    assert sorted(count for count in tried if count < 0) == [-8, -4, -4, -2, -1]


@pytest.mark.plants_failures
def test_one_request_alone_is_not_asked_again() -> None:
    asked: list[int] = []
    drafter = raising(ScriptedDrafter(lambda tokens: []), propose=lambda batch, *_: asked.append(len(batch)) or True)
    answer = fixed(markov(), drafter).generate(SMALL[0], FEW)
    assert answer.token_ids == plain()[0]
    assert (asked, answer.stats.recoveries, len(answer.warnings)) == ([1], 0, 1)


@pytest.mark.plants_failures
def test_failures_are_logged_once_with_their_traceback(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedDrafter):
        def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
            if self.outcomes[-1][1].tokens[-1] % 2:
                raise RuntimeError("odd")
            raise LookupError("even")

    engine = fixed(markov(), Broken(lambda tokens: []))
    for _ in range(2):
        answers = engine.generate([*SMALL, *SMALL], FEW)
        assert all("went on undrafted" in answer.warnings[0] for answer in answers)
    assert {record.name for record in caplog.records} == {"truedraft.engine.failures"}
    kinds = [record.exc_info[0] for record in caplog.records if record.exc_info is not None]
    assert len(kinds) == len(set(kinds)) == len(caplog.records) > 0
    assert "in propose" in caplog.text and "drafter 'scripted' failed (" in caplog.text
    # Python prints to standard error what no handler takes; a traceback is not for the users of a command.
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("truedraft").handlers)


def test_an_error_of_the_target_is_logged_and_is_the_cause_of_what_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match="out of memory") as caught:
        Engine(failing_forwards(2)).generate(SMALL[0], FEW)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "in called" in caplog.text
