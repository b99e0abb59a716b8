"""Requests that begin alike answer as they do alone, and their beginning is computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from support import tiny_models
from support.answers import finished, fixed
from support.chi_square import p_value
from support.head_models import fitted_heads
from support.pairwise import by_turns
from truedraft import Engine, SamplingParams
from truedraft.core.stats import StepRecord
from truedraft.drafters import Cascade, Drafter, DraftModel, Medusa, NoDrafter, Portfolio, PromptLookup
from truedraft.engine.scheduler import FixedParts
from truedraft.models.base import ForwardOutput, LanguageModel, Segment
from truedraft.testing import MarkovModel

SHARED = [(7 * place * place + 3 * place + 5) % 60 for place in range(150)]
DRAFTERS: dict[str, Callable[[LanguageModel], Drafter]] = {
    "none": lambda target: NoDrafter(),
    "draft": lambda target: DraftModel(tiny_models.noisy("llama", 0.01)),
    "tree": lambda target: DraftModel(tiny_models.noisy("llama", 0.01), branching=(2, 2)),
    "lookup": lambda target: PromptLookup(min_ngram=1),
    "heads": lambda target: Medusa(fitted_heads(target, [SHARED])),
    "portfolio": lambda target: Portfolio([DraftModel(tiny_models.noisy("llama", 0.01)), PromptLookup()]),
}


def fed_by(engine: Engine) -> list[int]:
    """Filled with the tokens of prompts that each step of an engine computes."""
    fed: list[int] = []

    def note(record: StepRecord) -> None:
        fed.append(sum(step.rows for step in record.requests if step.prefill))

    engine.listeners.append(note)
    return fed


@pytest.fixture
def target() -> LanguageModel:
    return tiny_models.packed("llama")


@cache
def cold_start(prompt: tuple[int, ...], temperature: float) -> list[int]:
    """What is answered by an engine that shares nothing."""
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=5)
    return Engine(tiny_models.packed("llama"), prefix_cache_bytes=0).generate(list(prompt), params).token_ids


@pytest.mark.parametrize(("name", "temperature"), by_turns(DRAFTERS, [0.0, 0.8]))
def test_a_hit_gives_the_tokens_of_a_cold_start(target: LanguageModel, name: str, temperature: float) -> None:
    prompts = [[*SHARED, 1], [*SHARED, 2, 3], SHARED[:100], [*SHARED[:130], 9, 9, 9]]
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=5)
    cold = [cold_start(tuple(prompt), temperature) for prompt in prompts]
    engine = fixed(target, DRAFTERS[name](target), prefix_cache_bytes=1 << 24)
    fed = fed_by(engine)
    assert [answer.token_ids for answer in engine.generate(prompts, params)] == cold
    assert sum(fed) < len(SHARED) + 60, "what they share was computed once"
    fed.clear()
    assert [engine.generate(prompt, params).token_ids for prompt in prompts] == cold
    assert sum(fed) < 4 * 64 + 40, "and not at all the second time"
    longer = [*prompts[0], *cold[0], 4, 4]
    assert engine.generate(longer, params).token_ids == cold_start(tuple(longer), temperature)
    assert engine.check_idle() == []


def test_prompts_whose_logprobs_are_asked_are_computed(target: LanguageModel) -> None:
    engine = Engine(target, prefix_cache_bytes=1 << 24)
    engine.generate(SHARED, SamplingParams(max_tokens=4))
    params = SamplingParams(max_tokens=4, prompt_logprobs=1)
    shared, cold = engine.generate(SHARED, params), Engine(target, prefix_cache_bytes=0).generate(SHARED, params)
    assert shared.prompt_logprobs == cold.prompt_logprobs and len(shared.prompt_logprobs or ()) == len(SHARED) - 1


def test_scopes_share_nothing(target: LanguageModel) -> None:
    engine = Engine(target, prefix_cache_bytes=1 << 24)
    for scope, copied in (("a", 0), ("b", 0), ("a", 128), ("b", 128)):
        request = engine.submit(SHARED, SamplingParams(max_tokens=2), scope=scope)
        finished(engine, [request])
        assert request.copied_tokens == copied


@pytest.fixture
def table() -> MarkovModel:
    """A model with a context of many parts of a prompt."""
    return MarkovModel.random(60, seed=4, context_length=1200)


def test_a_leader_that_leaves_holds_nobody_up(table: MarkovModel) -> None:
    engine = Engine(table, prefix_cache_bytes=None)
    long = (SHARED * 4)[:500]
    first, second = (engine.submit([*long, last], SamplingParams(max_tokens=3)) for last in (1, 2))
    engine.step()
    assert second.awaits is not None and second.awaits[0] is first
    engine.cancel(first)
    alone = Engine(table, prefix_cache_bytes=0).generate([*long, 2], SamplingParams(max_tokens=3))
    assert [answer.token_ids for answer in finished(engine, [second])] == [alone.token_ids]


def test_kept_bytes_are_bounded_and_counted(target: LanguageModel) -> None:
    most = 200_000
    engine = Engine(target, DraftModel(tiny_models.packed("llama")), prefix_cache_bytes=most)
    before = engine.cache_bytes
    for start in range(6):
        engine.generate([start, *SHARED], SamplingParams(max_tokens=4))
    kept = sum(store.n_bytes for store in engine._sharing.stores)
    assert 0 < kept <= most
    assert engine.cache_bytes >= before + kept


def test_all_models_of_a_cascade_keep_within_the_bound(target: LanguageModel) -> None:
    """The drafts inside share what prompts begin with, too, and what they keep counts."""
    most = 300_000
    models = [tiny_models.noisy("llama", noise) for noise in (0.3, 0.1, 0.01)]
    small, small_too, middle = map(DraftModel, models)
    cascade = Cascade(Cascade(small, small_too, 3), middle, 5)
    engine = fixed(target, Portfolio([cascade, PromptLookup()]), prefix_cache_bytes=most)
    stores = [each.prefixes for each in cascade.held.models]
    assert [id(each) for each in stores] == [id(each.prefixes) for each in (middle, small_too, small)]
    fed: list[int] = []
    for model in models:
        model.forward = fed_to(model, fed)  # type: ignore[method-assign]
    for start in range(6):
        engine.generate([start, *SHARED], SamplingParams(max_tokens=24))
    assert all(0 < store.n_bytes <= store.most_bytes for store in stores)
    assert sum(store.most_bytes for store in engine._sharing.stores) <= most
    assert sum(store.n_bytes for store in stores) < sum(store.n_bytes for store in engine._sharing.stores) <= most
    fed.clear()
    again = engine.generate([5, *SHARED], SamplingParams(max_tokens=24))
    assert again.token_ids == Engine(target).generate([5, *SHARED], SamplingParams(max_tokens=24)).token_ids
    assert max(fed) < len(SHARED), "no model read the prompt again"
    assert not Engine(target, cascade, prefix_cache_bytes=0)._sharing.stores[3].shares


def fed_to(model: LanguageModel, fed: list[int]) -> Callable[[Sequence[Segment]], ForwardOutput]:
    """The model's forward, which notes how many tokens a segment brings."""
    forward = model.forward

    def watched(segments: Sequence[Segment]) -> ForwardOutput:
        fed.extend(len(segment.tokens) for segment in segments)
        return forward(segments)

    return watched


def test_short_memory_takes_from_what_is_kept(target: LanguageModel) -> None:
    position = Engine(target, prefix_cache_bytes=0)
    answer = position.generate(SHARED, SamplingParams(max_tokens=8))
    one = position.cache_bytes  # of a request, whose buffers wait for the next
    engine = Engine(target, max_cache_bytes=int(1.2 * one), prefix_cache_bytes=1 << 24)
    for start in range(4):
        engine.generate([start, *SHARED], SamplingParams(max_tokens=8))
        assert engine.cache_bytes <= int(1.2 * one)
    assert engine.generate(SHARED, SamplingParams(max_tokens=8)).token_ids == answer.token_ids


@pytest.mark.parametrize("drafted", [False, True])
def test_samples_are_independent_and_each_follows_its_law(drafted: bool) -> None:
    """Joint counts of the first two tokens of two samples against the product of their exact distributions.

    False alarms: once in a million runs of each case.
    """
    target = MarkovModel.random(3, seed=1)
    drafter = DraftModel(MarkovModel.random(3, seed=2), num_speculative_tokens=2) if drafted else None
    engine = fixed(target, drafter, max_batch=64)
    prompt, runs = [1, 2], 3000
    counts = np.zeros((9, 9))
    params = [SamplingParams(max_tokens=2, temperature=1.0, seed=seed, n=2) for seed in range(runs)]
    for answer in engine.generate([prompt] * runs, params):
        first, second = (3 * a + b for a, b in (answer.token_ids, answer.others[0].token_ids))
        counts[first, second] += 1
    one = np.array(
        [float(target.probs_after(prompt)[a] * target.probs_after([*prompt, a])[b]) for a in range(3) for b in range(3)]
    )
    assert p_value(counts.flatten(), np.outer(one, one).flatten()) > 1e-6


def test_samples_are_those_that_their_numbers_name(target: LanguageModel) -> None:
    engine = fixed(target, DraftModel(tiny_models.noisy("llama", 0.01)))
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3)
    answer = engine.generate(SHARED, params)
    texts = [answer.token_ids, *(each.token_ids for each in answer.others)]
    assert len({tuple(each) for each in texts}) == 3
    alone = finished(engine, [engine.submit(SHARED, params, sample=sample) for sample in range(3)])
    assert [each.token_ids for each in alone] == texts
    many: Sequence[list[int]] = [SHARED, SHARED[:20]]
    assert [len(each.others) for each in engine.generate(list(many), params)] == [2, 2]
    with pytest.raises(Exception, match="n must be 1 for a stream, got 3"):
        next(engine.stream(SHARED, params))


@pytest.mark.parametrize(("read_s", "decode_s", "most"), [(0.7, 0.01, 2), (1.6, 0.1, 2)])
def test_running_answers_wait_for_20_steps_worth_of_reading_and_three_seconds_at_most(
    table: MarkovModel, read_s: float, decode_s: float, most: int
) -> None:
    """Reading takes six times as long as decoding: 1.2 seconds for steps of 0.01, so two that read 0.7 each."""

    class Clocked(FixedParts):
        def observe(self, record: StepRecord) -> None:
            super().observe(replace(record, total_s=read_s if record.prefill else decode_s))

    engine = Engine(table, prefix_cache_bytes=0)
    engine._scheduler.reading = Clocked()
    running = engine.submit([1, 2, 3], SamplingParams(max_tokens=40))
    engine.step()
    engine.step()
    for start in range(3):
        engine.submit([start, *(SHARED * 9)[:1000]], SamplingParams(max_tokens=2))
    fed = fed_by(engine)
    waited = [0]
    while not running.closed:
        emitted = running.emitted
        engine.step()
        waited.append(0 if running.emitted > emitted else waited[-1] + 1)
    assert max(waited) == most and max(fed) <= 512
