"""The target as its own draft, with fewer bits or layers: answers, its cache, stored distributions, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from support.backends import native_backend
from support.layer_heads import as_transformers_runs_it
from support.layer_heads import target as tiny
from support.tiny_models import PROMPTS, VOCAB, build
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.probs import probs_from_logits
from truedraft.core.tree import chain_shape
from truedraft.drafters import DraftModel, SelfDraft, from_spec, specs
from truedraft.drafters.base import DraftRequest
from truedraft.drafters.registry import write_record
from truedraft.engine.policy import RoundRobin
from truedraft.errors import CompositionError, OptionError, UnsupportedModelError
from truedraft.models import huggingface
from truedraft.models.backends.base import Backend
from truedraft.models.backends.native.build import built
from truedraft.models.backends.native.memory import Weights
from truedraft.models.backends.sequential import SequentialBackend, WholeTextBackend
from truedraft.models.base import Segment
from truedraft.models.huggingface import HuggingFaceModel

pytestmark = pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)

WORDS = pytest.mark.parametrize("word", ["self:int8", "self:int4"])


def another(seed: int) -> PreTrainedModel:
    """Of the same sizes as the target."""
    return build(as_transformers_runs_it().config, seed=seed)


@pytest.fixture
def target() -> HuggingFaceModel:
    return tiny("native")


def engine_of(target: HuggingFaceModel, word: str) -> Engine:
    return Engine(target, from_spec(word, target), controller="fixed", entropy=1)


@WORDS
def test_greedy_and_seeded_answers_are_those_of_plain_decoding(target: HuggingFaceModel, word: str) -> None:
    prompts = [list(prompt) for prompt in PROMPTS]
    for params in (SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.9, seed=5)):
        plain = Engine(target).generate(prompts, params)
        drafted = engine_of(target, word).generate(prompts, params)
        assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
        assert sum(each.stats.accepted_tokens for each in drafted) > 0
        assert not any(each.warnings for each in drafted)


@WORDS
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_targets_cache_is_bit_for_bit_one_that_never_drafted(
    target: HuggingFaceModel, word: str, temperature: float
) -> None:
    """Looked at after every step, against a forward of the target over the same tokens, one by one."""
    engine, steps = engine_of(target, word), []
    params = SamplingParams(max_tokens=24, temperature=temperature)
    request = engine.submit(list(PROMPTS[0]), params)

    def look(_: object) -> None:
        cache = next(iter(engine._open.values())).cache  # type: ignore[attr-defined]
        tokens = next(iter(engine._open.values())).tokens  # type: ignore[attr-defined]
        assert cache.uncommitted == 0
        steps.append((list(tokens[: cache.length]), [(k.clone(), v.clone()) for k, v in cache.entries()]))

    engine.listeners.append(look)
    while engine.step():
        pass
    assert request is not None
    assert len(steps) > 3
    for tokens, entries in steps:
        fresh = target.new_cache()
        for token in tokens:
            target.forward([Segment(fresh, torch.tensor([token]), chain_shape(1), ())])
            fresh.commit(range(1))
        for ours, theirs in zip(entries, fresh.entries(), strict=True):
            assert ours[0].equal(theirs[0])
            assert ours[1].equal(theirs[1])
        target.release_cache(fresh)


def filled(target: HuggingFaceModel, tokens: Sequence[int]) -> DraftRequest:
    cache = target.new_cache()
    target.forward([Segment(cache, torch.tensor(tokens[:-1]), chain_shape(len(tokens) - 1), ())])
    cache.commit(range(len(tokens) - 1))
    return DraftRequest(0, SamplingParams(temperature=0.8), list(tokens), cache=cache)


@WORDS
def test_stored_distributions_are_those_drawn_from(target: HuggingFaceModel, word: str) -> None:
    """They are those of the cheaper model behind the target's cache; a request without a cache gets the same."""
    request = filled(target, PROMPTS[0])
    drafter = from_spec(f"{word},num_speculative_tokens=5", target)
    assert isinstance(drafter, SelfDraft)
    noise = KeyedNoise(0, len(request.tokens), 1)
    (proposal,) = drafter.propose([request], [Budget(3)], [noise])
    assert len(proposal.tree) == 3
    assert request.cache is not None
    assert (request.cache.uncommitted, request.cache.length) == (0, len(request.tokens) - 1)
    fed = torch.tensor([request.tokens[-1], *proposal.tree.host_ids[:-1]])
    rows = drafter.model.forward([Segment(request.cache, fed, chain_shape(3), range(3))]).logits
    assert proposal.probs is not None
    assert proposal.probs.equal(probs_from_logits(rows, request.params))
    without = DraftRequest(7, request.params, request.tokens)
    (again,) = drafter.propose([without], [Budget(3)], [noise])
    assert again.tree.host_ids == proposal.tree.host_ids
    assert list(drafter.held.requests) == [7]
    drafter.end(without)
    assert not drafter.held.requests


def test_budgets_of_zero_do_no_work_and_the_context_ends_a_chain(target: HuggingFaceModel) -> None:
    drafter = SelfDraft(target, target.quantized(8), 6)
    near = filled(target, [3] * (target.context_length - 2))
    nothing, few = drafter.propose([near, near], [Budget(0), Budget(9)], [KeyedNoise(0, 1, 1), KeyedNoise(0, 1, 2)])
    assert (len(nothing.tree), len(few.tree)) == (0, 3)


def test_words_make_it_and_wrong_ones_are_refused(target: HuggingFaceModel) -> None:
    drafter = from_spec("self:int4,num_speculative_tokens=7", target)
    assert isinstance(drafter, SelfDraft)
    assert drafter.limits.depth == 7
    for word, said in {
        "self": "self:int8 or self:int4",
        "self:int3": "self:int8 or self:int4, got 'int3'",
        "self:int8,num_speculative_tokens=0": "num_speculative_tokens must be 1 or more",
    }.items():
        with pytest.raises(OptionError, match=said) as refused:
            from_spec(word, target)
        assert "\n" not in str(refused.value)
    with pytest.raises(OptionError, match="bits must be 8 or 4, got 2"):
        SelfDraft(target, target.quantized(2))
    other = HuggingFaceModel(another(4), None, "other", native_backend)
    with pytest.raises(CompositionError, match="make one of 'other' to draft for that"):
        Engine(other, drafter)
    with pytest.raises(CompositionError, match="does not read the caches of 'other'"):
        SelfDraft(other, target.quantized(4))


@pytest.mark.parametrize("kind", [SequentialBackend, WholeTextBackend])
def test_forwards_that_run_all_layers_are_refused_in_a_sentence(kind: Callable[[PreTrainedModel], Backend]) -> None:
    alone = HuggingFaceModel(another(4), None, "alone", kind)
    for word in ("self:int8", "self:int4"):
        with pytest.raises(UnsupportedModelError, match=r"^alone cannot draft for itself with .*; use another"):
            from_spec(word, alone)


def test_auto_falls_back_on_it_where_it_could_pay(target: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was trained for this target, which is far too small; the copy is made when a step first drafts."""
    assert list(from_spec("auto", target).members) == ["prompt-lookup"]
    monkeypatch.setattr(specs, "_LEAST_OWN_BYTES", target.weight_bytes)
    made: list[int] = []
    whole = Weights.quantized
    monkeypatch.setattr(Weights, "quantized", lambda *given: made.append(1) or whole(*given))  # type: ignore[func-returns-value]
    drafter = from_spec("auto", target)
    assert list(drafter.members) == ["self", "prompt-lookup"]
    assert [each.model.note for each in drafter.members.values() if each.model is not None] == [None]
    assert not made
    answer = Engine(target, drafter, controller=RoundRobin()).generate(list(PROMPTS[0]), SamplingParams(max_tokens=30))
    assert made and answer.stats.by_drafter["self"].accepted_tokens > 0
    assert answer.token_ids == Engine(target).generate(list(PROMPTS[0]), SamplingParams(max_tokens=30)).token_ids
    alone = HuggingFaceModel(another(4), None, "alone", SequentialBackend)
    monkeypatch.setattr(specs, "_LEAST_OWN_BYTES", 0)
    assert list(from_spec("auto", alone).members) == ["prompt-lookup"]


@pytest.mark.parametrize(("tokens", "taken"), [(2.1, True), (1.24, False), (None, True)])
def test_auto_keeps_it_beside_what_was_trained_and_leaves_out_what_brought_too_little(
    target: HuggingFaceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: float | None, taken: bool
) -> None:
    """A drafter that was hardly trained made the default worse, for it took the place of the copy.

    Beside one that brings something the copy is made of larger targets alone.
    """
    monkeypatch.setattr(specs, "_LEAST_OWN_BYTES", target.weight_bytes)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(f'{{"vocab_size": {VOCAB}}}')
    served = [
        {"temperature": 0.0, "mean_acceptance_length": tokens},
        {"temperature": 1.0, "mean_acceptance_length": 1.0},
    ]
    figures = {} if tokens is None else {"served": served}
    write_record(tmp_path / "own", "draft", "tiny", target.fingerprint, figures)
    small = HuggingFaceModel(another(5), None, "small", native_backend)
    monkeypatch.setattr(specs, "_draft_model", lambda words, target: DraftModel(small, 4))
    told: list[str] = []
    draft = ["draft"] if taken else []
    own = [] if taken else ["self"]
    found = from_spec("auto", target, [tmp_path], tell=told.append)
    assert list(found.members) == [*own, *draft, "prompt-lookup"]
    assert len(told) == (not taken) and all("it brought 1.24 tokens per target call" in each for each in told)
    monkeypatch.setattr(specs, "_LEAST_OWN_BYTES_BESIDE", target.weight_bytes)
    found = from_spec("auto", target, [tmp_path], tell=told.append)
    assert list(found.members) == ["self", *draft, "prompt-lookup"]


def test_auto_makes_no_copy_that_finds_no_room(target: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as the copy's and a third are enough; with fewer it says so and takes the others."""
    monkeypatch.setattr(specs, "_LEAST_OWN_BYTES", 0)
    copied = target.quantized(4).weight_bytes
    told: list[str] = []
    monkeypatch.setattr(huggingface, "free_memory", lambda device: 4 * copied // 3 + 2)
    assert list(from_spec("auto", target, tell=told.append).members) == ["self", "prompt-lookup"]
    assert not told
    monkeypatch.setattr(huggingface, "free_memory", lambda device: copied)
    assert list(from_spec("auto", target, tell=told.append).members) == ["prompt-lookup"]
    (sentence,) = told
    assert sentence.startswith("the drafter self:int4 is left out: tiny in 4 bits takes ")
    assert "are free" in sentence and "\n" not in sentence
    monkeypatch.setattr(huggingface, "free_memory", lambda device: None)
    assert list(from_spec("auto", target, tell=told.append).members) == ["self", "prompt-lookup"]


@pytest.mark.parametrize("why", ["memory went", "making fails"])
def test_a_copy_that_could_not_be_made_is_not_tried_again(
    target: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The answer goes on with the others, later requests never ask for it, and nor does another `auto`."""
    monkeypatch.setattr(specs, "_LEAST_OWN_BYTES", 0)
    tries: list[int] = []

    def fail(*given: object) -> None:
        tries.append(1)
        raise RuntimeError("not enough memory: you tried to allocate 7 bytes")

    monkeypatch.setattr(Weights, "quantized", fail)
    drafter = from_spec("auto", target)
    if why == "memory went":
        monkeypatch.setattr(huggingface, "free_memory", lambda device: tries.append(1) or 10)
    engine = Engine(target, drafter, controller=RoundRobin())
    params = SamplingParams(max_tokens=30)
    plain = Engine(target).generate(list(PROMPTS[0]), params)
    first = engine.generate(list(PROMPTS[0]), params)
    asked = len(tries)
    assert asked == 1
    second = engine.generate(list(PROMPTS[0]), params)
    assert first.token_ids == second.token_ids == plain.token_ids
    assert second.stats.draft_tokens > 0 and not second.warnings, "the others draft"
    said = "10 bytes are free" if why == "memory went" else "its weights could not be made (not enough memory"
    assert any(said in each for each in first.warnings)
    told: list[str] = []
    assert list(from_spec("auto", target, tell=told.append).members) == ["prompt-lookup"]
    assert said in told[0] and len(tries) == asked
    assert target.quantized(8).failure is None


def test_memory_counts_no_second_cache(target: HuggingFaceModel) -> None:
    """With room for one request's cache of the target alone it drafts still."""
    params = SamplingParams(max_tokens=20)
    engine = Engine(target, SelfDraft(target, target.quantized(8)), controller="fixed", max_cache_bytes=2**20)
    answer = engine.generate(list(PROMPTS[0]), params)
    assert answer.stats.draft_tokens > 0
    assert not engine.drafter.held.models
    assert answer.token_ids == Engine(target).generate(list(PROMPTS[0]), params).token_ids
