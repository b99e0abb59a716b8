"""Drafts that write their own tokens, whose text is encoded again: exact whatever comes of it."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("text", "models")]
from test_translated import PROMPTS, law_of_two, llama, other, same_in_other_ids, target
from tiny_tokenizers import small_llama

from support.chi_square import p_value
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.token_view import TokenView
from truedraft.drafters import ReencodedDraft
from truedraft.drafters.base import DraftRequest
from truedraft.errors import VocabularyMismatchError
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.text.tokenizer import Tokenizer


@cache
def drafter(permuted: bool = False, count: int = 4) -> ReencodedDraft:
    model = same_in_other_ids() if permuted else other()
    return ReencodedDraft(model._draft, target(), count)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("way", ["greedy", "seeded"])
def test_answers_are_those_of_plain_decoding(way: str, permuted: bool) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0 if way == "greedy" else 1.0, seed=5)
    plain = Engine(target()).generate(PROMPTS, params)
    engine = Engine(target(), drafter(permuted), controller="fixed")
    answers = engine.generate(PROMPTS, params)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
    assert not any(answer.warnings for answer in answers) and engine.check_idle() == []
    assert sum(answer.stats.draft_tokens for answer in answers) > 0


def test_the_target_in_other_ids_is_often_right() -> None:
    """Not always: a random model writes what no tokenizer would have written so."""
    engine = Engine(target(), drafter(True), controller="fixed")
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True))
    assert sum(answer.stats.accepted_tokens for answer in answers) > 10


def test_the_law_of_sampled_answers_is_the_targets() -> None:
    prompt, temperature, vocab = "the", 0.35, target().vocab_size
    params = SamplingParams(max_tokens=2, temperature=temperature)
    engine = Engine(target(), drafter(), controller="fixed", entropy=0)
    counts = np.zeros((vocab, vocab + 1))
    for answer in engine.generate([prompt] * 3000, params):
        ids = [*answer.token_ids, vocab]
        counts[ids[0], ids[1]] += 1
    assert p_value(counts, law_of_two(prompt, temperature)) > 1e-4


def test_what_is_proposed_is_the_drafts_own_text() -> None:
    """By its own greedy answer to the text, as its tokenizer encodes it."""
    model = other()._draft
    assert model.tokenizer is not None and target().tokenizer is not None
    for prompt in PROMPTS:
        tokens = target().tokenizer.encode(prompt)  # type: ignore[union-attr]
        guesses = drafter()
        request = DraftRequest(-5, SamplingParams(), TokenView(tokens))
        guesses.begin(request)
        try:
            noise = KeyedNoise(0, len(tokens), 0)
            proposal = guesses.propose([request], [Budget(4, 1, 4)], [noise])[0]
            read = list(guesses.held.models[0].prefixes.text(request.id))
        finally:
            guesses.end(request)
        own = Engine(model).generate(read, SamplingParams(max_tokens=4, ignore_eos=True)).token_ids
        written = guesses._read.text_of(own)
        proposed = guesses._written.text_of(proposal.tree.host_ids)
        assert written.startswith(proposed) and (proposed or not written.decode(errors="ignore"))


def test_a_split_that_does_not_fit_is_refused() -> None:
    bare = HuggingFaceModel(llama(Tokenizer(small_llama(), "llama")), None, "bare")
    with pytest.raises(VocabularyMismatchError, match="'bare' comes without a tokenizer"):
        ReencodedDraft(bare, target())
    with pytest.raises(VocabularyMismatchError, match="another tokenizer than that of 'other'"):
        Engine(other()._draft, drafter())
