"""A request that cannot start, go on or end costs the others nothing, and nothing of it is left."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from support import tiny_models
from support.answers import finished
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Speculation
from truedraft.drafters import DraftModel, DraftRequest, PromptLookup
from truedraft.errors import OptionError
from truedraft.models.base import LanguageModel
from truedraft.models.cache import PrefixCache, RequestCache
from truedraft.models.cache.buffers import Buffers

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
PARAMS = SamplingParams(max_tokens=12)


@pytest.fixture
def target() -> LanguageModel:
    return tiny_models.packed("llama")


def expected(target: LanguageModel) -> list[list[int]]:
    return [Engine(target).generate(prompt, PARAMS).token_ids for prompt in PROMPTS]


def fail_once(patch: pytest.MonkeyPatch, owner: Any, name: str, at: int, error: Exception) -> None:
    """The `at`-th call of a method raises."""
    calls, before = iter(range(1 << 30)), getattr(owner, name)

    def failing(*given: Any, **named: Any) -> Any:
        if next(calls) == at:
            raise error
        return before(*given, **named)

    patch.setattr(owner, name, failing)


@pytest.mark.parametrize(
    "options", [*({"sample": sample} for sample in (None, "1", 1.5, -1)), {"scope": ["a"]}], ids=repr
)
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
    engine = Engine(target, DraftModel(tiny_models.packed("llama")), controller="fixed")
    fail_once(monkeypatch, engine.target, "new_cache", place, MemoryError("no room"))
    answers = engine.generate(PROMPTS, PARAMS)
    for number, answer in enumerate(answers):
        if number == place:
            assert answer.finish_reason == "error" and "no room" in str(answer.error)
        else:
            assert answer.token_ids == own[number]
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
    def broken(self: PrefixCache, number: int) -> None:
        raise MemoryError("no room for blocks")

    own = expected(target)
    pool = target.pool
    assert pool is not None
    before = pool.in_use
    engine = Engine(
        target, DraftModel(tiny_models.noisy("llama", 0.01)), controller="fixed", prefix_cache_bytes=1 << 20
    )
    monkeypatch.setattr(PrefixCache, "keep", broken)
    assert [answer.token_ids for answer in engine.generate(PROMPTS, PARAMS)] == own
    assert engine.check_idle() == []
    assert pool.in_use == before and not any(each.held.requests for each in engine.drafter.members.values())


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
    engine = Engine(target, PromptLookup(min_ngram=1), controller="fixed")
    fail_once(monkeypatch, engine._drafting, "observe", 0, RuntimeError("broken"))  # behind the prompts' step
    answers = engine.generate(PROMPTS, PARAMS)
    assert [answer.finish_reason for answer in answers] == ["length"] * 3
    assert [answer.token_ids for answer in answers] == own


def test_requests_that_are_over_keep_no_output_of_their_batch(target: LanguageModel) -> None:
    engine = Engine(target, PromptLookup(min_ngram=1), controller="fixed")
    requests = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
    finished(engine, requests)
    assert all(request.last_step is not None and request.last_step.shown is None for request in requests)
    assert all(request.drafting.view is None for request in requests)


class Counting(PromptLookup):
    """Notes for whom it is asked to begin."""

    def __init__(self) -> None:
        super().__init__(min_ngram=1)
        self.begun: list[int] = []

    def begin(self, request: DraftRequest) -> None:
        self.begun.append(request.id)
        super().begin(request)


@pytest.mark.parametrize("limit", [None, 1 << 24])
def test_drafters_that_a_request_does_not_want_hold_nothing_for_it(target: LanguageModel, limit: int | None) -> None:
    drafter = Counting()
    engine = Engine(target, drafter, controller="fixed", max_cache_bytes=limit)
    request = engine.submit([1, 2, 1, 2], PARAMS, speculation=Speculation(()))
    wanted = engine.submit([1, 2, 1, 2], PARAMS)
    without, drafted = finished(engine, [request, wanted])
    assert drafter.begun == [wanted.draft.id]
    assert without.stats.draft_tokens == 0 and without.token_ids == drafted.token_ids


def test_scopes_are_forgotten_with_their_last_block() -> None:
    import torch

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
