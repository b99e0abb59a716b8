"""Speculative beam search: the beams and scores of transformers' own, whatever was drafted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from support.pairwise import by_turns, pairwise
from support.tiny_models import PROMPTS, build, llama, noisy, packed, stock
from truedraft.engine import BeamSearch
from truedraft.errors import OptionError, PromptError, VocabularyMismatchError
from truedraft.models.huggingface import HuggingFaceModel

COUNT = 24


@cache
@torch.inference_mode()
def by_transformers(
    family: str, prompt: tuple[int, ...], ends: tuple[int, ...] = (), **options: Any
) -> tuple[list[list[int]], list[float]]:
    model = stock(family)
    ids = torch.tensor([list(prompt)])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, pad_token_id=96,
        eos_token_id=list(ends) or None, num_return_sequences=options["num_beams"], output_scores=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist()


def ending(model: HuggingFaceModel, ends: Sequence[int]) -> HuggingFaceModel:
    model.eos_token_ids = tuple(ends)
    return model


def assert_same(found: Any, expected: tuple[list[list[int]], list[float]]) -> None:
    for beam, tokens, score in zip(found.beams, *expected, strict=True):
        assert list(beam.token_ids) == tokens[: len(beam.token_ids)]
        assert all(token == 96 for token in tokens[len(beam.token_ids) :])
        assert beam.score == pytest.approx(score, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("family", "noise"), by_turns(["llama", "gpt2", "mistral"], [None, 0.0, 0.05, 0.5], always=[0.05])
)
def test_beams_are_those_of_plain_search(family: str, noise: float | None) -> None:
    """With a draft that is always right, often, and nearly never."""
    draft = None if noise is None else noisy(family, noise)
    calls = drafted = 0
    for prompt in PROMPTS:
        found = BeamSearch(packed(family), draft, num_beams=3).generate(prompt, COUNT)
        assert_same(found, by_transformers(family, prompt, num_beams=3))
        assert found.steps == COUNT
        calls, drafted = calls + found.target_calls, drafted + found.drafted
    steps = COUNT * len(PROMPTS)
    assert (calls, drafted) == (steps, 0) if noise is None else calls < (0.5 if noise == 0.0 else 1.0) * steps + 1


@pytest.mark.parametrize(
    ("early", "penalty", "prompt"), pairwise([True, False, "never"], [0.0, 1.0, 2.0, -1.0], range(len(PROMPTS)))
)
def test_length_penalty_and_early_stopping_are_kept(early: bool | str, penalty: float, prompt: int) -> None:
    """With several ids that end a beam, so that some end early."""
    family, ends = "llama", (3, 11, 40, 60)
    options: dict[str, Any] = {"num_beams": 4, "length_penalty": penalty, "early_stopping": early}
    target, draft = ending(packed(family), ends), ending(noisy(family, 0.05), ends)
    expected = by_transformers(family, PROMPTS[prompt], ends, **options)
    for guesses in (None, draft):
        found = BeamSearch(target, guesses, **options).generate(PROMPTS[prompt], COUNT)
        assert_same(found, expected)
    assert min(len(beam.token_ids) for beam in found.beams) < COUNT or penalty > 0.0  # then long ones are the best


def test_ties_go_as_in_plain_search() -> None:
    """Two tokens that are one in all but their number: equal logits at every step."""
    model = stock("llama")
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        table.weight.data[50] = table.weight.data[20]
        table.weight.data[51] = table.weight.data[20]
    prompt = list(PROMPTS[0])
    ids = torch.tensor([prompt])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, num_beams=4, pad_token_id=0,
        num_return_sequences=4,
    )[:, len(prompt) :].tolist()  # fmt: skip
    target = HuggingFaceModel(model, None, "tied")
    for draft in (None, noisy("llama", 0.02)):
        found = BeamSearch(target, draft, num_beams=4).generate(prompt, 12)
        assert [list(beam.token_ids) for beam in found.beams] == expected


@pytest.mark.parametrize("family", ["qwen3_next", "mamba"])
def test_layers_that_carry_states_search_too(family: str) -> None:
    from models.test_recurrence import config

    model = HuggingFaceModel(build(config(family), seed=0), None, family)
    draft = HuggingFaceModel(build(config(family), seed=0), None, family)
    for prompt in PROMPTS:
        plain = BeamSearch(model, num_beams=3).generate(prompt, 16)
        found = BeamSearch(model, draft, num_beams=3).generate(prompt, 16)
        assert [beam.token_ids for beam in found.beams] == [beam.token_ids for beam in plain.beams]
        assert found.target_calls < plain.target_calls


def test_long_prompts_are_read_in_parts() -> None:
    prompt = [(7 * place + 3) % 97 for place in range(700)]
    long, other = (
        HuggingFaceModel(build(llama(max_position_embeddings=1024), seed=2), None, name) for name in ("long", "other")
    )
    plain = BeamSearch(long, num_beams=2).generate(prompt, 8)
    found = BeamSearch(long, other, num_beams=2).generate(prompt, 8)
    assert [beam.token_ids for beam in found.beams] == [beam.token_ids for beam in plain.beams]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_beams": 0}, "num_beams must be a whole number of 1 or more, got 0"),
        ({"num_beams": 4, "draft_beams": 3}, "draft_beams must be a whole number of 4 or more, got 3"),
        ({"early_stopping": "soon"}, "early_stopping must be True, False or \"never\", got 'soon'"),
    ],
)
def test_options_drafts_and_prompts_that_cannot_be_searched_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        BeamSearch(packed("llama"), **options)
    with pytest.raises(VocabularyMismatchError):
        BeamSearch(packed("llama"), HuggingFaceModel(build(llama(vocab_size=50), seed=0), None, "small"))
    search = BeamSearch(packed("llama"), num_beams=2)
    for prompt, words in (([], "has no tokens"), ([1] * 256, "a context of 256"), ("text", "no tokenizer")):
        with pytest.raises(PromptError, match=words):
            search.generate(prompt)
