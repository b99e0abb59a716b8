"""Words, prompts and options as callers give them: right ones work in every usual form, wrong ones are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from support.answers import fixed
from support.embedded_models import embedded
from truedraft import Engine, SamplingParams
from truedraft.drafters import DraftModel, NoDrafter, PromptLookup
from truedraft.errors import OptionError, PromptError, UnknownOptionError
from truedraft.testing import MarkovModel
from truedraft.verification import BlockVerification, SpeculativeSampling

FEW = SamplingParams(max_tokens=3)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Put together from words alone."""
    return fixed(embedded(), drafter="prompt-lookup,max_ngram=3", rule="block")


@pytest.fixture
def target() -> MarkovModel:
    return MarkovModel.random(8, seed=1)


def test_words_stand_for_parts(engine: Engine, target: MarkovModel) -> None:
    assert engine.target.name == "embedded:target"
    assert isinstance(engine.drafter, PromptLookup) and isinstance(engine.rule, BlockVerification)
    with pytest.raises(UnknownOptionError, match="did you mean 'prompt-lookup'"):
        fixed(target, "prompt-lookupp")
    with pytest.raises(UnknownOptionError, match="unknown rule 'best'"):
        Engine(target, rule="best")
    assert isinstance(fixed(target, "none").drafter, NoDrafter)
    assert type(Engine(target).rule) is SpeculativeSampling


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"target": 5}, "target must be a LanguageModel, or a name or folder, got int"),
        ({"target": torch.nn.Linear(1, 1)}, "target must be a LanguageModel.*got Linear"),
        ({"drafter": MarkovModel.random(8, seed=1)}, r"drafter must be .*such as DraftModel\(model\).*got Mark"),
        ({"drafter": PromptLookup}, "drafter must be a Drafter.*got the class PromptLookup"),
        ({"drafter": 0}, "drafter must be a Drafter.*got int"),
        ({"rule": DraftModel}, "rule must be a Rule, or its words, got the class DraftModel"),
        ({"controller": 3}, "controller must be a Controller, or its words, got int"),
        ({"coupled_rule": "coupled"}, "coupled_rule must be a Rule, got str"),
        ({"max_batch": "3"}, "max_batch must be a whole number of 1 or more, got '3'"),
        ({"max_batch": True}, "max_batch must be a whole number"),
        ({"max_batch": 0}, "max_batch must be a whole number"),
        *(
            ({"max_cache_bytes": most}, "max_cache_bytes must be a whole number of 1 or more")
            for most in (0, -1, 1.5, True, "512M")
        ),
    ],
)
def test_a_part_of_a_wrong_type_is_named(target: MarkovModel, parts: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Engine(**{"target": target, **parts})


def test_half_a_character_costs_its_own_prompt_alone(engine: Engine) -> None:
    prompts = ["import os", "def f(\ud800):", "class A:"]
    answers = engine.generate(prompts, FEW)
    assert [answer.finish_reason for answer in answers] == ["length", "error", "length"]
    assert "U+D800" in (answers[1].error or "") and "place 6" in (answers[1].error or "")
    assert answers[0].token_ids == engine.generate(prompts[0], FEW).token_ids
    for ask in (engine.generate, engine.submit, engine.stream):
        with pytest.raises(PromptError, match="lone surrogate"):
            ask(prompts[1])


def test_a_tokenizer_that_fails_costs_its_own_prompt_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    encode = type(tokenizer).encode
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text: encode(self, text if text != "bad" else 1 / 0))
    answers = engine.generate(["import os", "bad"], FEW)
    assert [answer.finish_reason for answer in answers] == ["length", "error"]
    assert "the tokenizer of 'embedded:target' failed (ZeroDivisionError" in (answers[1].error or "")


def test_no_prompts_have_no_answers(target: MarkovModel) -> None:
    engine = Engine(target)
    assert engine.generate([]) == []
    assert engine.generate([], []) == []
    assert engine.generate((), FEW) == []
    with pytest.raises(PromptError, match="no tokens"):
        engine.submit([])
    assert [answer.finish_reason for answer in engine.generate([[], [1]], FEW)] == ["error", "length"]


NO_IDS = [
    b"\x01\x02", bytearray(b"\x01"), [True, False], [1, np.True_], torch.tensor([True, False]), [torch.tensor(True)],
    {1: 2}, {1, 2}, 7, None, [1.0], [1, "2"],
]  # fmt: skip


@pytest.mark.parametrize("prompt", NO_IDS, ids=repr)
def test_what_is_no_list_of_ids_is_refused(target: MarkovModel, prompt: Any) -> None:
    engine = Engine(target)
    for ask in (engine.generate, engine.submit, engine.stream):
        with pytest.raises(PromptError, match="a prompt is a text or a list of token ids"):
            ask(prompt)
    sound, answer = engine.generate([[3, 1], prompt], FEW)
    assert (sound.finish_reason, answer.finish_reason) == ("length", "error")


@pytest.mark.parametrize(
    "prompt",
    [np.array([3, 1]), np.array([3, 1], dtype=np.uint8), torch.tensor([3, 1]), (3, 1), [np.int64(3), 1]],
    ids=repr,
)
def test_ids_may_come_in_any_usual_form(target: MarkovModel, prompt: Any) -> None:
    engine = Engine(target)
    expected = engine.generate([3, 1], FEW).token_ids
    assert engine.generate(prompt, FEW).token_ids == expected
    assert [answer.token_ids for answer in engine.generate([prompt, prompt], FEW)] == [expected] * 2


def test_options_of_a_wrong_type_are_named(target: MarkovModel) -> None:
    engine = Engine(target)
    for params in ({"max_tokens": 3}, "3", iter([FEW])):
        with pytest.raises(OptionError, match=f"sampling options are a SamplingParams.*got {type(params).__name__}"):
            engine.generate([[1], [2]], params)  # type: ignore[call-overload]
    with pytest.raises(PromptError, match="one prompt takes one SamplingParams, got a list"):
        engine.generate([1], [FEW])  # type: ignore[call-overload]
