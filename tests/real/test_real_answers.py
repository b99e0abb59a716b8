"""What SmolLM2 answers: as transformers does, with every drafter the same, in English, and in the form asked for."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from server.conftest import serving
from support.embedded_models import share_embedded
from support.head_models import random_heads
from support.ngram_tables import table_of
from support.quick_costs import measure_quickly
from support.real_models import assert_answers_as_transformers
from truedraft import Engine, SamplingParams
from truedraft.cli.main import main
from truedraft.core.params import Structured
from truedraft.drafters import Cascade, Drafter, DraftModel, Medusa, NgramDrafter, PromptLookup
from truedraft.drafters.prediction import with_own_drafts
from truedraft.drafters.specs import from_spec
from truedraft.models.embedded import smollm2_file
from truedraft.models.huggingface import HuggingFaceModel

QUESTION = "What is the capital of France? Answer in one sentence."
ABOUT_FRANCE = {
    "type": "object",
    "properties": {"country": {"type": "string", "maxLength": 20}, "capital": {"type": "string", "maxLength": 20}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}
AS_JSON = "What is the capital of France? Answer as JSON with country and capital."
EDIT = "Copy this and add docstrings:\n\ndef area(a, b):\n    return a * b\n\ndef half(a):\n    return a / 2"


def asked(model: HuggingFaceModel, text: str) -> list[int]:
    assert model.tokenizer is not None
    return model.tokenizer.chat([{"role": "user", "content": text}])


@pytest.mark.slow
def test_its_weights_answer_as_transformers_reads_them(model: HuggingFaceModel) -> None:
    file = smollm2_file()
    assert file is not None
    prompts = [asked(model, text) for text in (QUESTION, EDIT, "Why is the sky blue?")]
    assert_answers_as_transformers(file, prompts, max_tokens=32, most_kl=0.01)


DRAFTERS: dict[str, Callable[[HuggingFaceModel], Drafter]] = {
    "itself": lambda model: DraftModel(model, num_speculative_tokens=3),
    "itself, a tree": lambda model: DraftModel(model, branching=(2, 2, 1)),
    "a cascade over itself": lambda model: Cascade(PromptLookup(), DraftModel(model), num_speculative_tokens=4),
    "Medusa heads": lambda model: Medusa(random_heads(model, spread=0.01, heads=2, tied=True)),
    "n-grams": lambda model: NgramDrafter(table_of(model, texts=2, length=24)),
    **{
        words: lambda model, words=words: from_spec(words, model)  # type: ignore[misc]
        for words in (
            "auto",
            "draft",
            "prompt-lookup",
            "suffix",
            "lookahead,window=3,ngram=3,candidates=2",
            "reencoded:embedded:draft",
            "portfolio(prompt-lookup;suffix)",
        )
    },
}
PARAMS = (
    SamplingParams(max_tokens=32, ignore_eos=True),
    SamplingParams(max_tokens=32, ignore_eos=True),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=3),
)


@pytest.fixture(scope="module")
def plain(model: HuggingFaceModel) -> list[list[int]]:
    return tokens(Engine(model), model)


def tokens(engine: Engine, model: HuggingFaceModel) -> list[list[int]]:
    prompts = [asked(model, EDIT), asked(model, QUESTION), asked(model, EDIT)]
    return [answer.token_ids for answer in engine.generate(prompts, PARAMS)]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_leaves_its_answers(drafter: str, model: HuggingFaceModel, plain: Sequence[list[int]]) -> None:
    engine = Engine(model, DRAFTERS[drafter](model), controller="fixed")
    drafted: list[int] = []
    engine.listeners.append(lambda record: drafted.extend(each.nodes for each in record.requests))
    assert tokens(engine, model) == plain
    assert sum(drafted) > 0


def test_its_trained_draft_is_found_and_often_right(model: HuggingFaceModel) -> None:
    """Two tokens for each call of the target; a draft of another tokenizer gives 1.04 on the first of these."""
    texts = (
        "Why is the sky blue?",
        "Write a Python function that reverses a list.",
        "Janet has 3 boxes of 12 eggs and eats 5 of them. How many eggs are left? Explain.",
    )
    engine = Engine(model, from_spec("draft", model), controller="fixed")
    answers = engine.generate([asked(model, text) for text in texts], SamplingParams(max_tokens=48))
    calls = sum(answer.stats.target_calls for answer in answers)
    assert sum(len(answer.token_ids) for answer in answers) / calls > 1.6


def test_it_answers_in_the_form_that_is_asked_for(model: HuggingFaceModel) -> None:
    params = SamplingParams(max_tokens=40, structured=Structured("json_schema", ABOUT_FRANCE))
    plain, drafted = (Engine(model, words, controller="fixed") for words in (None, "prompt-lookup"))
    answer = drafted.generate(asked(model, AS_JSON), params)
    assert answer.token_ids == plain.generate(asked(model, AS_JSON), params).token_ids
    assert answer.finish_reason == "stop" and json.loads(answer.text)["capital"] == "Paris"


def test_it_is_talked_with(
    model: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    share_embedded(monkeypatch)
    measure_quickly(monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\nAnd of Italy? Answer in one sentence.\n"))
    assert main(["chat", "--max-tokens", "24", "--temperature", "0", "--json"]) == 0
    said = capsys.readouterr()
    assert "no --model is named: smollm2, which is installed, is taken" in said.err
    record = json.loads(said.out.splitlines()[-1])
    first, second = (turn["text"] for turn in record["turns"])
    assert record["model"] == "smollm2" and "Paris" in first and "Rome" in second


def test_it_is_served_to_openais_client(model: HuggingFaceModel) -> None:
    openai = pytest.importorskip("openai")
    engine = Engine(model, with_own_drafts(from_spec("prompt-lookup", model)), controller="fixed")
    with serving(engine, served_model_name=("smollm2",)) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        ask: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 40}
        messages = [{"role": "user", "content": QUESTION}]
        answer = client.chat.completions.create(messages=messages, **ask).choices[0]
        assert answer.message.content == "The capital of France is Paris." and answer.finish_reason == "stop"
        pieces = client.chat.completions.create(messages=messages, stream=True, **ask)
        assert "".join(each.choices[0].delta.content or "" for each in pieces if each.choices) == answer.message.content
        form = {"type": "json_schema", "json_schema": {"name": "about", "schema": ABOUT_FRANCE, "strict": True}}
        found = client.chat.completions.create(
            messages=[{"role": "user", "content": AS_JSON}], response_format=form, **ask
        )
        assert json.loads(found.choices[0].message.content)["capital"] == "Paris"
    assert engine.check_idle() == []
