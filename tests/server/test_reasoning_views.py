"""Reasoning in the forms of the three endpoints: the template opens it, and the model writes on in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from server.conftest import TEMPLATE, Running, serving
from server.test_load import post
from server.test_recorded_requests import stream
from truedraft import Engine, SamplingParams

USER = {"role": "user", "content": "def f("}
ASKED: dict[str, Any] = {"temperature": 0}


@pytest.fixture(scope="module")
def thinking(make_engine: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = tmp_path_factory.mktemp("templates") / "thinking.jinja"
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


def test_a_chat(thinking: Running, plain: str) -> None:
    path, body = "/v1/chat/completions", ASKED | {"messages": [USER], "max_tokens": 24}
    message = post(thinking.url, body, path)[2]["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (plain, "")
    deltas = [data["choices"][0]["delta"] for _, data in stream(thinking.url, path, body | {"stream": True})]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == plain
    assert not any(delta.get("content") for delta in deltas)


def test_a_response(thinking: Running, plain: str) -> None:
    path, body = "/v1/responses", ASKED | {"input": "def f(", "max_output_tokens": 24}
    whole = post(thinking.url, body, path)[2]
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


def test_a_message(thinking: Running, plain: str) -> None:
    path, body = "/v1/messages", ASKED | {"messages": [USER], "max_tokens": 24}
    told = post(thinking.url, body, path)[2]
    assert told["content"] == [{"type": "thinking", "thinking": plain, "signature": ""}]
    events = [data for _, data in stream(thinking.url, path, body | {"stream": True})]
    deltas = [data["delta"] for data in events if data["type"] == "content_block_delta"]
    assert "".join(delta["thinking"] for delta in deltas) == plain
    assert events[2]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
