"""The whole way: a certificate's questions to our own server, answered as the engine in process answers them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")

from server.conftest import Running, serving
from support.embedded_models import embedded
from truedraft import Engine, SamplingParams
from truedraft.drafters.specs import from_spec
from truedraft.measure.peers import Endpoint, PeerFacts, Question, Reply
from truedraft.models.base import LanguageModel

PROMPTS = ("class Stack:\n    def push(self, item):", "import os\n", "def add(a, b):")


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return embedded()


@pytest.fixture(scope="module")
def running(target: LanguageModel) -> Iterator[Running]:
    with serving(Engine(target, from_spec("draft", target)), served_model_name=("ours",)) as found:
        yield found


@pytest.fixture(scope="module")
def endpoint(running: Running, target: LanguageModel) -> Iterator[Endpoint]:
    with Endpoint.open(running.url, tokenizer=target.tokenizer, vocab_size=target.vocab_size) as found:
        yield found


def asked(target: LanguageModel, *params: SamplingParams) -> list[Question]:
    assert target.tokenizer is not None
    prompts = [tuple(target.tokenizer.encode(prompt)) for prompt in PROMPTS]
    return [Question(prompt, each) for prompt in prompts for each in params]


def test_what_is_known_of_it(endpoint: Endpoint) -> None:
    facts = endpoint.facts
    assert isinstance(facts, PeerFacts) and facts.name == "truedraft" and facts.version
    assert facts.filters == ("temperature", "top_k", "top_p", "min_p") and facts.gives_ids
    assert endpoint.model == "ours"


def test_ids_and_logprobs_are_those_of_the_engine(endpoint: Endpoint, target: LanguageModel) -> None:
    options = (
        SamplingParams(24, logprobs=2),
        SamplingParams(24, 0.8, seed=5, top_p=0.9, logprobs=0, logprobs_mode="processed"),
        SamplingParams(24, 1.0, seed=5, stop=("eturn", "self"), repetition_penalty=1.2),
    )
    questions = asked(target, *options)
    plain = Engine(target)
    for question, reply in zip(questions, endpoint.ask(questions), strict=True):
        assert isinstance(reply, Reply), reply
        expected = plain.generate(list(question.prompt), question.params)
        assert list(reply.token_ids) == expected.token_ids and not reply.unsure
        assert (reply.text, reply.finish_reason) == (expected.text, expected.finish_reason)
        if expected.logprobs is None:
            assert reply.logprobs is None
        else:
            assert reply.logprobs == pytest.approx([each.logprob for each in expected.logprobs])
        if question.params.logprobs and expected.logprobs is not None:
            assert reply.top_logprobs is not None
            for told, known in zip(reply.top_logprobs, expected.logprobs, strict=True):
                assert told == pytest.approx(dict(known.top) | {known.token: known.logprob}) or told == pytest.approx(
                    dict(known.top)
                )


def test_a_server_whose_context_is_too_short_says_so(endpoint: Endpoint) -> None:
    (found,) = endpoint.ask([Question((5,) * 100_000, SamplingParams())])
    assert "answered 400 (" in str(found)
