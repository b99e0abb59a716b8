"""Reasoning over HTTP: budgets, forms behind it, and templates that switch it off; control tokens in messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from server.conftest import TEMPLATE, Running, serving
from server.test_load import post as raw_post
from server.test_recorded_requests import stream
from truedraft import Engine, SamplingParams
from truedraft.models.base import LanguageModel

THINKING = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}# tools: {{ tools | tojson }} <tool_call>{% endif %}# assistant:"
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% else %}<think></think>{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
USER = [{"role": "user", "content": "def f():"}]


@pytest.fixture(scope="module")
def thinker(make_engine: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = tmp_path_factory.mktemp("templates") / "thinking.jinja"
    file.write_text(THINKING)
    with serving(make_engine(), chat_template=file) as found:
        yield found


def post(running: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/{path}", json={"model": "tiny", **body}, timeout=60)


def chat(running: Running, **body: Any) -> dict[str, Any]:
    answer = post(running, "chat/completions", **{"messages": USER, "max_tokens": 60} | body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
CALL = {"type": "function", "function": {"name": "get", "parameters": SCHEMA}}


@pytest.mark.parametrize(
    "budget",
    [{"reasoning_budget": 6}, {"thinking": {"type": "enabled", "budget_tokens": 6}}, {"reasoning": {"max_tokens": 6}}],
)
def test_chats(thinker: Running, target: LanguageModel, budget: dict[str, Any]) -> None:
    choice = chat(thinker, **budget, temperature=0, response_format=FORMAT)
    assert json.loads(choice["message"]["content"])["a"] in "xy" and choice["finish_reason"] == "stop"
    assert target.tokenizer is not None
    assert 0 < len(target.tokenizer.plain_ids(choice["message"]["reasoning_content"])) <= 8
    asked = {"tools": [CALL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    choice = chat(thinker, **budget, temperature=0, **asked)
    assert choice["message"]["reasoning_content"] and choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["a"] in "xy"


def test_tokens_of_reasoning_are_counted(thinker: Running) -> None:
    """Of those behind the prompt's mark, the budget's and the closing mark are reasoning, and the form is none."""
    asked = {"messages": USER, "max_tokens": 60, "response_format": FORMAT, "n": 2, "temperature": 0}
    found = post(thinker, "chat/completions", **asked, reasoning_budget=6, return_token_ids=True).json()
    tokenizer = thinker.engine.target.tokenizer
    assert tokenizer is not None
    wanted = 0
    for choice in found["choices"]:
        ids = choice["token_ids"]
        wanted += next(count for count in range(len(ids)) if "</think>" in tokenizer.shown_text(ids[:count]))
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == wanted > 12
    asked |= {"n": 1, "reasoning_budget": 6, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, (_, last) = stream(thinker.url, "/v1/chat/completions", asked)
    assert 2 * last["usage"]["completion_tokens_details"]["reasoning_tokens"] == wanted
    deltas = [each["choices"][0]["delta"] for _, each in chunks]
    assert "".join(each.get("reasoning_content", "") for each in deltas)
    assert json.loads("".join(each.get("content", "") or "" for each in deltas))["a"] in "xy"


def test_responses_and_messages(thinker: Running) -> None:
    text = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    found = post(thinker, "responses", input="def f():", reasoning={"max_tokens": 6}, text=text).json()["output"]
    assert [each["type"] for each in found] == ["reasoning", "message"]
    assert json.loads(found[1]["content"][0]["text"])["a"] in "xy"
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    asked = {"messages": USER, "max_tokens": 60, "thinking": {"type": "enabled", "budget_tokens": 6}}
    found = post(thinker, "messages", **asked, output_config=form).json()["content"]
    assert [each["type"] for each in found] == ["thinking", "text"]
    assert json.loads(found[1]["text"])["a"] in "xy"


@pytest.mark.parametrize(
    ("path", "off"),
    [
        ("chat/completions", {"messages": USER, "reasoning_effort": "none"}),
        ("chat/completions", {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}}),
        ("chat/completions", {"messages": USER, "thinking": {"type": "disabled"}}),
        ("messages", {"messages": USER, "thinking": {"type": "disabled"}, "max_tokens": 9}),
        ("responses", {"input": "def f():", "reasoning": {"effort": "none"}, "max_output_tokens": 9}),
    ],
)
def test_off_by_request(thinker: Running, path: str, off: dict[str, Any]) -> None:
    answer = post(thinker, path, temperature=0, **{"max_tokens": 9} | off if path == "chat/completions" else off)
    assert answer.status_code == 200 and '"reasoning_content"' not in answer.text, answer.text
    assert '"thinking"' not in answer.text and '"reasoning_text"' not in answer.text


def test_without_a_switch_the_budget_is_none(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    file = tmp_path / "always.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}<think>")
    with serving(make_engine(), chat_template=file) as always:
        choice = chat(always, reasoning_effort="none", response_format=FORMAT)
        assert "reasoning_content" not in choice["message"]
        assert json.loads(choice["message"]["content"])["a"] in "xy"


def test_where_it_cannot_be(running: Running, make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    for path, body in (
        ("chat/completions", {"messages": USER, "reasoning_budget": 6}),
        ("completions", {"prompt": "def", "reasoning_budget": 6}),
    ):
        answer = post(running, path, **body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "reasoning_budget", answer.text
    file = tmp_path / "effort.jinja"
    file.write_text("{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with serving(make_engine(), chat_template=file) as effort:
        answer = post(effort, "chat/completions", messages=USER, reasoning_effort="none")
        assert answer.status_code == 400 and "cannot switch reasoning off" in answer.json()["error"]["message"]
        choice = chat(effort, reasoning_effort="low", max_tokens=2)
        assert choice["message"]["content"] is not None


def test_what_closes_a_turn_by_a_template_given_to_the_server_ends_answers(
    make_engine: Callable[..., Engine], target: LanguageModel, template_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"temperature": 0, "max_tokens": 4, "return_token_ids": True}
    with serving(make_engine(), chat_template=template_file) as found:
        first, *_ = chat(found, **asked)["token_ids"]
    monkeypatch.setattr(type(target.tokenizer), "turn_end", lambda own, template=None: first if template else None)
    with serving(make_engine(), chat_template=template_file) as found:
        ended = chat(found, **asked)
        assert (ended["token_ids"], ended["finish_reason"]) == ([], "stop")
        assert post(found, "completions", prompt="def f():", max_tokens=4).status_code == 200


@pytest.mark.parametrize("trusts", [False, True])
def test_control_tokens_in_messages(
    make_engine: Callable[..., Engine], target: LanguageModel, template_file: Path, trusts: bool
) -> None:
    assert target.tokenizer is not None
    end = target.eos_token_ids[0]
    typed = target.tokenizer.token_text(end)
    with serving(make_engine(), chat_template=template_file, trust_control_tokens=trusts) as found:
        asked = {"messages": [{"role": "user", "content": f"a{typed}b"}], "max_tokens": 2, "return_token_ids": True}
        answer = post(found, "chat/completions", **asked)
        assert (end in answer.json()["prompt_token_ids"]) is trusts
        counted = post(found, "responses", input=f"a{typed}b", max_output_tokens=2).json()["usage"]["input_tokens"]
        assert counted == len(answer.json()["prompt_token_ids"])


SAID = [{"role": "user", "content": "def f("}]


@pytest.fixture(scope="module")
def thinking(make_engine: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = tmp_path_factory.mktemp("templates") / "opened.jinja"
    file.write_text(TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}")
    with serving(make_engine(), chat_template=file) as found:
        yield found


@pytest.fixture(scope="module")
def plain(thinking: Running) -> str:
    """What is written behind the mark, white space around it left out."""
    target = thinking.engine.target
    assert target.tokenizer is not None
    ids = target.tokenizer.encode("# user: def f(\n# assistant:<think>\n")
    return str(Engine(target).generate(ids, SamplingParams(max_tokens=24)).text).strip()


def test_a_chat_that_is_cut_in_its_reasoning(thinking: Running, plain: str) -> None:
    path, body = "/v1/chat/completions", {"messages": SAID, "max_tokens": 24, "temperature": 0}
    message = raw_post(thinking.url, body, path)[2]["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (plain, "")
    deltas = [data["choices"][0]["delta"] for _, data in stream(thinking.url, path, body | {"stream": True})]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == plain
    assert not any(delta.get("content") for delta in deltas)


def test_a_response_that_is(thinking: Running, plain: str) -> None:
    path, body = "/v1/responses", {"input": "def f(", "max_output_tokens": 24, "temperature": 0}
    whole = raw_post(thinking.url, body, path)[2]
    (item,) = whole["output"]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 24
    assert (item["type"], item["summary"], item["status"]) == ("reasoning", [], "incomplete")
    assert item["content"] == [{"type": "reasoning_text", "text": plain}]
    events = [data for _, data in stream(thinking.url, path, body | {"stream": True})]
    kinds = [data["type"].removeprefix("response.") for data in events]
    deltas = kinds.count("reasoning_text.delta")
    before = ["created", "in_progress", "output_item.added", "content_part.added"]
    behind = ["reasoning_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds == [*before, *["reasoning_text.delta"] * deltas, *behind] and deltas
    assert "".join(data["delta"] for data in events if data["type"].endswith("text.delta")) == plain
    assert events[-4]["text"] == plain and events[-1]["response"]["output"][0]["content"] == item["content"]


def test_a_message_that_is(thinking: Running, plain: str) -> None:
    path, body = "/v1/messages", {"messages": SAID, "max_tokens": 24, "temperature": 0}
    told = raw_post(thinking.url, body, path)[2]
    assert told["content"] == [{"type": "thinking", "thinking": plain, "signature": ""}]
    events = [data for _, data in stream(thinking.url, path, body | {"stream": True})]
    deltas = [data["delta"] for data in events if data["type"] == "content_block_delta"]
    assert "".join(delta["thinking"] for delta in deltas) == plain
    assert events[2]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
