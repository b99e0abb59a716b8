"""Cases that broke other servers, word for word."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from server.conftest import Running, serving
from server.test_load import open_stream, post
from support.random_decisions import RandomDecisions
from truedraft import Engine, SamplingParams
from truedraft.core.params import Structured
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
        stream = open_stream(running.url, body)
        raw = b""
        while b"[DONE]" not in raw:
            raw += stream.recv(4096)
        stream.close()
        events = [json.loads(line[6:]) for line in raw.decode().split("\n") if line.startswith("data: {")]
        assert "".join(each["choices"][0]["text"] for each in events) == expected


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


def test_two_forms_at_once_and_forms_that_cannot_be(running: Running) -> None:
    both = {"prompt": "x", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    assert post(running.url, both)[0] == 400
    for form in ({}, {"regex": "a", "choice": ["b"]}, {"json": {"type": "nonsense"}}, {"grammar": "x" * 70_000}):
        status, _, told = post(running.url, {"prompt": "x", "structured_outputs": form})
        assert status == 400, told
    assert Structured("choice", ["a"]).value == ("a",)


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


FUNCTION = {"name": "a", "parameters": {"type": "object"}}
BAD = {"name": "a", "parameters": {"type": "object", "properties": {"x": {"uniqueItems": True}}}}
HOSTED = [{"type": "web_search_20250305", "name": "web_search"}]


def tools_of(*functions: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": each} for each in functions]


def test_what_is_sent_amiss_is_told_by_the_name_that_the_client_has_for_it(plain_server: Running) -> None:
    for path, more, told, field in (
        ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens must", "max_completion_tokens"),
        ("responses", {"max_output_tokens": 0}, "max_output_tokens must", "max_output_tokens"),
        ("messages", {"stop_sequences": [""]}, "stop_sequences ", None),
        ("messages", {"output_config": {"format": {"schema": {"type": "foo"}}}}, "output_config cannot", None),
        ("completions", {"structured_outputs": {"choice": []}}, "structured_outputs ", "structured_outputs"),
        ("chat/completions", {"functions": [BAD], "function_call": {"name": "a"}}, "functions cannot", "functions"),
        ("chat/completions", {"functions": [BAD], "function_call": {"name": "z"}}, "function_call n", "function_call"),
        ("completions", {"speculation": {"drafter": "nope"}}, "unknown drafter 'nope'", "speculation.drafter"),
        ("completions", {"speculation": {"drafter": []}}, "speculation.drafter: ", "speculation.drafter"),
        ("completions", {"speculation": {"rule": "block"}}, "but the server's own", "speculation.rule"),
        ("completions", {"prompt": ["a"] * 20}, "asks for 20 answers", "prompt"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a \U0001f600 \ud800"}]},
            "messages[0].content has half a character (U+D800)",
            "messages[0].content",
        ),
        (
            "chat/completions",
            {"tools": tools_of(FUNCTION | {"description": "\udc00"})},
            "tools[0].function.description has half a character (U+DC00)",
            "tools[0].function.description",
        ),
        ("responses", {"input": "\ud800"}, "input has half a character (U+D800)", "input"),
        ("responses", {"metadata": {"a": "\ud800"}}, "metadata.a has half a character", "metadata.a"),
        ("messages", {"tools": [{"name": "a", "type": "\ud800"}]}, "tools[0].type has half a character", None),
        ("messages", {"messages": [{"role": "assistant", "content": ""}]}, "messages is empty", None),
        ("responses", {"include": ["zzz"]}, "include[0]: Input should be 'message.output_text", "include[0]"),
        ("responses", {"reasoning": {"foo": 1}}, "unrecognized request argument: reasoning.foo", "reasoning.foo"),
        (
            "completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$schema": 3}}}},
            "$schema",
            "response_format",
        ),
        ("completions", {"structured_outputs": {"json": {"$defs": []}}}, "$defs", "structured_outputs"),
        ("completions", {"structured_outputs": {"json": {"x-guidance": 3}}}, "x-guidance", "structured_outputs"),
        ("completions", {"prompt": ""}, "", "prompt"),
        ("completions", {"prompt": [[]]}, "", "prompt"),
        ("completions", {"prompt": [-1]}, "", "prompt"),
        ("completions", {"prompt": "ab " * 3000}, "", "prompt"),
        ("completions", {"stop_token_ids": [10**30]}, "stop_token_ids names token id", "stop_token_ids"),
        ("completions", {"allowed_token_ids": []}, "allowed_token_ids: ", "allowed_token_ids"),
        ("chat/completions", {"thinking": {"type": "zzz"}}, "thinking.type cannot be 'zzz'", "thinking.type"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens cannot", None),
        ("chat/completions", {"reasoning": {"max_tokens": -5}}, "reasoning.max_tokens", "reasoning.max_tokens"),
        ("chat/completions", {"reasoning": {"max_tokens": "x"}}, "reasoning.max_tokens", "reasoning.max_tokens"),
        (
            "chat/completions",
            {"tools": tools_of({"name": "a", "parameters": {"type": "string"}})},
            "tools[0].function.parameters must be the schema of an object, got one of type 'string'",
            "tools[0].function.parameters",
        ),
        ("chat/completions", {"tools": tools_of({"name": ""})}, "tools[0].function.name", "tools[0].function.name"),
        ("chat/completions", {"tools": tools_of(FUNCTION, FUNCTION)}, "tools has two functions called 'a'", "tools"),
        ("messages", {"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name", None),
        ("messages", {"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema", None),
        (
            "messages",
            {"tools": HOSTED, "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice asks for web_search_20250305, a tool that this server has not",
            None,
        ),
    ):
        prompt = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}.get(path)
        body = prompt or {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        status, _, found = post(plain_server.url, body | more, f"/v1/{path}")
        error = found.get("error", {})
        assert status == 400 and told in error["message"] and error.get("param") == field, found


@pytest.fixture(scope="module")
def plain_server(make_engine: Callable[..., Engine], template_file: Any) -> Iterator[Running]:
    with serving(make_engine(), chat_template=template_file) as found:
        yield found
