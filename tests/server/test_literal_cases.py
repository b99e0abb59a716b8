"""Cases that broke other servers, word for word."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server.conftest import Running, serving
from server.test_load import post
from server.test_recorded_requests import stream
from support.random_decisions import RandomDecisions
from truedraft import Engine, SamplingParams
from truedraft.drafters import Drafter, DraftModel
from truedraft.errors import OptionError
from truedraft.models.base import LanguageModel
from truedraft.server.options import ServerOptions
from truedraft.server.serving import application

PROMPT = "class Stack:\n    def push(self, item):"


def plain(running: Running, **params: object) -> object:
    return Engine(running.engine.target).generate(PROMPT, SamplingParams(**params))  # type: ignore[arg-type]


def test_an_end_inside_an_accepted_block_ends_the_answer(target: LanguageModel) -> None:
    """The target drafts for itself, so whole blocks are accepted; each token of the answer in turn is made its end."""
    engine = Engine(target, DraftModel(target, num_speculative_tokens=6), controller="fixed")
    whole = Engine(target).generate(PROMPT, SamplingParams(max_tokens=14)).token_ids
    with serving(engine) as running:
        for place, token in enumerate(whole):
            body = {"prompt": PROMPT, "max_tokens": 14, "temperature": 0, "stop_token_ids": [token]}
            _, _, found = post(running.url, body)
            first = whole.index(token)
            assert found["usage"]["completion_tokens"] == first <= place
            assert found["choices"][0]["finish_reason"] == "stop"


def test_a_stop_text_across_tokens_and_blocks(running: Running) -> None:
    whole = Engine(running.engine.target).generate(PROMPT, SamplingParams(max_tokens=60)).text or ""
    for first in range(5, 40, 5):
        stop = whole[first : first + 7]
        expected = whole[: whole.index(stop)]
        body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stop": stop}
        assert post(running.url, body)[2]["choices"][0]["text"] == expected
        events = stream(running.url, "/v1/completions", body | {"stream": True})
        assert "".join(data["choices"][0]["text"] for _, data in events) == expected


def test_a_grammar_whose_tokens_are_drafted_and_committed_is_read_once(running: Running) -> None:
    """A grammar that is fed accepted tokens twice is at its end too early, and the answer has no five of them."""
    body = {"prompt": "1111111111", "max_tokens": 40, "temperature": 0, "structured_outputs": {"regex": "(11){5}x"}}
    _, _, found = post(running.url, body)
    assert found["choices"][0]["text"] == "1111111111x" and found["choices"][0]["finish_reason"] == "stop"


def test_penalties_count_drafted_tokens_as_if_they_stood(running: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 50, "temperature": 0, "frequency_penalty": 1.0, "presence_penalty": 0.5}
    expected = plain(running, max_tokens=50, frequency_penalty=1.0, presence_penalty=0.5)
    assert post(running.url, body)[2]["choices"][0]["text"] == expected.text  # type: ignore[attr-defined]


def test_logprobs_are_those_of_emitted_tokens_however_many_drafts_were_rejected(running: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 1.3, "seed": 5, "logprobs": 1}
    _, _, found = post(running.url, body)
    assert found["speculation"]["num_accepted_tokens"] < found["speculation"]["num_draft_tokens"]
    expected = plain(running, max_tokens=40, temperature=1.3, seed=5, logprobs=1)
    values = [each.logprob for each in expected.logprobs]  # type: ignore[attr-defined]
    assert found["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(values)
    _, _, cooler = post(running.url, body | {"logprobs_mode": "processed"})
    processed = plain(running, max_tokens=40, temperature=1.3, seed=5, logprobs=1, logprobs_mode="processed")
    values = [each.logprob for each in processed.logprobs]  # type: ignore[attr-defined]
    assert cooler["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(values)
    assert cooler["choices"][0]["text"] == found["choices"][0]["text"]


def test_a_chat_template_that_fails(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{{ raise_exception('roles must alternate') }}")
    with serving(make_engine(), chat_template=broken) as running:
        body = {"messages": [{"role": "user", "content": "x"}]}
        status, _, told = post(running.url, body, "/v1/chat/completions")
        assert status == 400 and "roles must alternate" in told["error"]["message"]
        assert post(running.url, {"prompt": "x", "max_tokens": 1})[0] == 200
    with serving(make_engine()) as running:
        status, _, told = post(running.url, body, "/v1/chat/completions")
        assert status == 400 and "has no chat template" in told["error"]["message"]


def test_a_seed_is_a_promise_over_http(target: LanguageModel, drafter: Drafter) -> None:
    """Whatever is decided, drafted and answered beside it; without one answers differ."""
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 1.0, "seed": 7}
    expected = Engine(target).generate(PROMPT, SamplingParams(24, 1.0, seed=7)).text
    engine = Engine(target, drafter, controller=RandomDecisions(3))
    with serving(engine, allow_rule=("block", "typical")) as running, ThreadPoolExecutor(8) as pool:

        def text(more: dict[str, object]) -> str:
            status, _, found = post(running.url, body | more)
            assert status == 200, found
            return str(found["choices"][0]["text"])

        ways = [{}, {"speculation": {"enabled": False}}, {"speculation": {"num_speculative_tokens": 1}}, {"n": 2}]
        beside = [{"seed": 8}, {"seed": None}, {"temperature": 0}, {"seed": None}]
        assert {text(way) for way in ways} == {expected}
        together = list(pool.map(text, [each for pair in zip(ways, beside, strict=True) for each in pair]))
        assert set(together[::2]) == {expected}
        assert len({expected, together[1], together[3], together[7]}) == 4
        for wrong, field in (({"speculation": {"rule": "typical"}}, "seed"), ({"coupled": True}, "coupled")):
            status, _, found = post(running.url, body | wrong)
            assert status == 400 and found["error"]["param"] == field


def test_an_engine_whose_noise_is_fixed_is_not_served(target: LanguageModel) -> None:
    with pytest.raises(OptionError, match="entropy fixes the noise of requests") as caught:
        application(Engine(target, entropy=7), ServerOptions(), "tiny")
    assert caught.value.field == "entropy"
