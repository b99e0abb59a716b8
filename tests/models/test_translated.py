"""Drafts whose tokenizer is not the target's: exact whatever they propose, and as good as their own ids allow."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

sys.path.append(str(Path(__file__).parents[1] / "text"))
from test_translation import permuted
from tiny_tokenizers import byte_level, small_llama

from support import tiny_models
from support.backends import HostRecorder, graph_backend
from support.chi_square import p_value
from support.tiny_models import build
from support.verdicts import TREE, assert_same_entries, read, verdicts
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.token_view import TokenView
from truedraft.core.tree import chain_shape
from truedraft.drafters import DraftModel, ReencodedDraft
from truedraft.drafters.base import DraftRequest
from truedraft.engine import BeamSearch
from truedraft.errors import CompositionError, ModelError, VocabularyMismatchError
from truedraft.models import HuggingFaceModel, Segment, TranslatedModel
from truedraft.models.cache import PagePool, Pages
from truedraft.models.translated import _SpelledCache
from truedraft.text.tokenizer import Tokenizer

PROMPTS = ["the quick brown fox", "def f(x):\n    return", "naïve café — Übung"]


def llama(tokenizer: Tokenizer, seed: int = 2, context: int = 256) -> PreTrainedModel:
    return build(tiny_models.llama(vocab_size=tokenizer.vocab_size, max_position_embeddings=context), seed=seed)


@cache
def target() -> HuggingFaceModel:
    tokenizer = Tokenizer(byte_level(), "byte-level")
    return HuggingFaceModel(llama(tokenizer), tokenizer, "target")


@cache
def other(context: int = 256) -> TranslatedModel:
    tokenizer = Tokenizer(small_llama(), "llama")
    return TranslatedModel(HuggingFaceModel(llama(tokenizer, 1, context), tokenizer, "other"), target())


@cache
def same_in_other_ids() -> TranslatedModel:
    """The target itself, its ids in another order."""
    own, tokenizer = target().tokenizer, Tokenizer(permuted(1), "permuted")
    assert own is not None
    model = llama(own)
    to = [
        tokenizer.backend.convert_tokens_to_ids(own.backend.convert_ids_to_tokens(token))
        for token in range(own.vocab_size)
    ]
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        rows = table.weight.data.clone()
        table.weight.data[to] = rows
    return TranslatedModel(HuggingFaceModel(model, tokenizer, "permuted"), target())


@pytest.mark.parametrize("branching", [(1, 1, 1, 1), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("way", ["greedy", "seeded"])
def test_answers_are_those_of_plain_decoding(way: str, branching: tuple[int, ...]) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0 if way == "greedy" else 1.0, seed=5)
    plain = Engine(target()).generate(PROMPTS, params)
    for model in (other(), same_in_other_ids()):
        engine = Engine(target(), DraftModel(model, branching=branching), controller="fixed")
        answers = engine.generate(PROMPTS, params)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
        assert not any(answer.warnings for answer in answers) and engine.check_idle() == []
        assert sum(answer.stats.draft_tokens for answer in answers) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_in_other_ids_is_always_right(temperature: float) -> None:
    """Nothing is lost on the way there and back, behind characters of several bytes either."""
    params = SamplingParams(max_tokens=40, temperature=temperature, ignore_eos=True)
    engine = Engine(target(), DraftModel(same_in_other_ids(), 4), controller="fixed", entropy=5)
    for answer in engine.generate(PROMPTS, params):
        assert answer.stats.draft_acceptance_rate > 0.97


def test_the_law_of_sampled_answers_is_the_targets() -> None:
    """The first two tokens, over many seeds, drafted in another vocabulary."""
    prompt, temperature, vocab = "the", 0.35, target().vocab_size
    params = SamplingParams(max_tokens=2, temperature=temperature)
    engine = Engine(target(), DraftModel(other(), 3), controller="fixed", entropy=0)
    counts = np.zeros((vocab, vocab + 1))  # the last column: the first token ended the answer
    for answer in engine.generate([prompt] * 3000, params):
        ids = [*answer.token_ids, vocab]
        counts[ids[0], ids[1]] += 1
    assert p_value(counts, law_of_two(prompt, temperature)) > 1e-4


def law_of_two(prompt: str, temperature: float) -> np.ndarray:
    tokenizer, vocab = target().tokenizer, target().vocab_size
    assert tokenizer is not None
    ids = tokenizer.encode(prompt)
    law = np.zeros((vocab, vocab + 1))
    for token, chance in enumerate(distribution(ids, temperature).tolist()):
        if token in target().eos_token_ids or chance < 1e-7:
            law[token, vocab] = chance
        else:
            law[token, :vocab] = chance * distribution([*ids, token], temperature).numpy()
    return law


def distribution(ids: Sequence[int], temperature: float = 1.0, model: HuggingFaceModel | None = None) -> torch.Tensor:
    """The probabilities after a text of a model's own ids, None being the target."""
    model = model or target()
    cache, logits = read(model, ids)
    model.release_cache(cache)
    return torch.softmax(logits.double() / temperature, dim=-1)


def test_a_cache_after_any_path_is_a_fresh_one() -> None:
    model = other()
    long = [token for token, ids in enumerate(model.translation.reads) if len(ids) > 1][:6]
    assert len(long) == 6
    drafted = [long[3], 7, long[4], 8, long[5], 9]
    for after, logits, whole in verdicts(model, [*long[:3], 5, 6], TREE, drafted=drafted):
        fresh, expected = read(model, whole)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert_same_entries(after, fresh)
        after.rollback(4)
        assert after.length == 4 and after.entries()[0][0].shape[1] == 1 + sum(
            len(model.translation.reads[token]) for token in whole[:4]
        )
        model.release_cache(fresh)


def test_a_text_that_is_longer_in_the_drafts_ids_is_answered_without_it() -> None:
    short = other(32)
    engine = Engine(target(), DraftModel(short, 3), controller="fixed")
    text = "naïve café — Übung 日本語"
    params = SamplingParams(max_tokens=12)
    answer = engine.generate(text, params)
    assert answer.token_ids == Engine(target()).generate(text, params).token_ids and not answer.warnings
    with pytest.raises(ModelError, match="reads at most 32 tokens of its own"):
        cache = short.new_cache()
        short.forward([Segment(cache, torch.full((40,), 70), chain_shape(40), (39,))])


def test_a_model_without_tokenizer_is_refused() -> None:
    bare = HuggingFaceModel(llama(Tokenizer(small_llama(), "llama")), None, "bare")
    with pytest.raises(VocabularyMismatchError, match="'bare' comes without a tokenizer"):
        TranslatedModel(bare, target())


def test_beams_are_drafted_in_other_ids() -> None:
    """The beams of plain search, by a draft that reads and writes another vocabulary."""
    for prompt in PROMPTS:
        plain = BeamSearch(target(), num_beams=3).generate(prompt, 16)
        for draft in (other(), other(32), same_in_other_ids()):
            found = BeamSearch(target(), draft, num_beams=3).generate(prompt, 16)
            assert [beam.token_ids for beam in found.beams] == [beam.token_ids for beam in plain.beams]
            assert found.target_calls <= plain.target_calls
    assert found.target_calls < 0.5 * plain.target_calls


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(small_llama(), "llama")
    sizes = T5Config(
        vocab_size=tokenizer.vocab_size, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0, eos_token_id=2,
    )  # fmt: skip
    T5ForConditionalGeneration(sizes).save_pretrained(tmp_path)
    tokenizer.backend.save_pretrained(tmp_path)
    reads = load_model(tmp_path, dtype="float32")
    assert reads.sources is not None
    for make in (TranslatedModel, ReencodedDraft):
        with pytest.raises(CompositionError, match="is an encoder-decoder with another tokenizer"):
            make(reads, target())


def test_ids_that_write_the_same_are_summed_before_anything_is_drawn() -> None:
    """What is drawn from, and judged by: the sums of the draft's ids, over what both know."""
    model, text = other(), "the end"
    tokenizer = target().tokenizer
    assert tokenizer is not None and len(model.translation.rounds) > 1
    ids = tokenizer.encode(text)
    spelled = [*model.translation.begin, *(own for token in ids for own in model.translation.reads[token])]
    raw = distribution(spelled, model=model._draft).tolist()
    sums: dict[int, float] = {}
    for mine, theirs in model.translation.rounds:
        for own, token in zip(mine.tolist(), theirs.tolist(), strict=True):
            sums[token] = sums.get(token, 0.0) + raw[own]
    several = [token for token in sums if sum(token in theirs.tolist() for _, theirs in model.translation.rounds) > 1]
    assert len(several) > 20
    drafter, params = DraftModel(model, 1), SamplingParams(temperature=1.0)
    request = DraftRequest(-1, params, TokenView(ids))
    drafter.begin(request)
    proposal = drafter.propose([request], [Budget(1, 1, 1)], [KeyedNoise(1, len(ids), 0)])[0]
    drafter.end(request)
    assert proposal.probs is not None
    whole = sum(sums.values())
    for token, mass in enumerate(proposal.probs[0].tolist()):
        assert mass == pytest.approx(sums.get(token, 0.0) / whole, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("way", ["greedy", "sampled", "seeded"])
@pytest.mark.parametrize("branching", [(1, 1), (3, 2)], ids=str)
def test_where_no_token_of_the_draft_may_follow_nothing_is_proposed(way: str, branching: tuple[int, ...]) -> None:
    """All that is allowed is what the draft cannot write; beside it a request that is drafted for."""
    model = other()
    assert model.shared_ids is not None
    foreign = sorted(set(range(target().vocab_size)) - set(model.shared_ids.tolist()) - set(target().eos_token_ids))
    assert len(foreign) > 3
    how = {"temperature": 0.0 if way == "greedy" else 1.0, "seed": 5 if way == "seeded" else None, "max_tokens": 12}
    params = [SamplingParams(**how, allowed_token_ids=foreign, ignore_eos=True), SamplingParams(**how)]
    engine = Engine(target(), DraftModel(model, branching=branching), controller="fixed")
    none, some = engine.generate(["the quick", "the quick"], params)
    assert none.stats.draft_tokens == 0 < some.stats.draft_tokens and not none.warnings
    assert len(none.token_ids) == 12 and set(none.token_ids) <= set(foreign)
    if way != "sampled":
        plain = Engine(target()).generate(["the quick", "the quick"], params)
        assert [each.token_ids for each in (none, some)] == [each.token_ids for each in plain]


def test_forwards_of_the_draft_that_are_recorded_are_counted() -> None:
    tokenizer, recorder = Tokenizer(small_llama(), "llama"), HostRecorder()
    draft = HuggingFaceModel(llama(tokenizer, 1), tokenizer, "other", lambda model: graph_backend(model, recorder))
    model = TranslatedModel(draft, target())
    counts = []
    with model.trying() as cache:
        for _ in range(4):
            model.forward([Segment(cache, torch.tensor([72]), chain_shape(1), (0,))])
            cache.rollback(cache.length)
            counts.append(model.warmups)
    assert counts[1:] == [2, 2, 2] and len(recorder.made) == 1


def test_a_cache_of_a_translated_draft_lies_in_the_pages_of_its_own() -> None:
    pool = PagePool(Pages(1, 1, 4, torch.float32, torch.device("cpu")), 64)
    cache = _SpelledCache(pool.acquire())
    assert pool.bytes_for([(20, cache)]) == pool.bytes_for_one(20)
