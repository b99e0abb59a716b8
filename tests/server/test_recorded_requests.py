"""What agents send, replayed: requests written from the public documentation of each, and the answers in their form."""

from __future__ import annotations

import copy
import json
import logging
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.conftest import Running, serving
from server.test_load import post
from text.test_histories import NO_SYSTEM
from truedraft import Engine

RECORDED = {file.stem: json.loads(file.read_text()) for file in sorted((Path(__file__).parent / "recorded").glob("*"))}
MOST = {"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}


def recorded(name: str, **more: Any) -> tuple[str, dict[str, Any]]:
    """Path and body of a request, for a short answer."""
    found = copy.deepcopy(RECORDED[name])
    return found["path"], found["body"] | {MOST.get(found["path"], "max_tokens"): 12} | more


def stream(url: str, path: str, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each event but the closing [DONE] of chats and completions, which has to be there."""
    asked = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        blocks = answer.read().decode().strip().split("\n\n")
    if path in ("/v1/chat/completions", "/v1/completions"):
        assert blocks.pop() == "data: [DONE]"
    found = []
    for block in blocks:
        *names, data = block.split("\n")
        found.append(("".join(names).removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def whole_text(path: str, told: dict[str, Any]) -> str:
    """The text of a whole answer."""
    if path == "/v1/responses":
        assert told["object"] == "response" and told["status"] in ("completed", "incomplete")
        assert told["usage"]["total_tokens"] == told["usage"]["input_tokens"] + told["usage"]["output_tokens"]
        return "".join(part["text"] for item in told["output"] if item["type"] == "message" for part in item["content"])
    if path == "/v1/messages":
        assert (told["type"], told["role"]) == ("message", "assistant") and told["usage"]["output_tokens"]
        assert told["stop_reason"] in ("end_turn", "max_tokens")
        return "".join(block["text"] for block in told["content"] if block["type"] == "text")
    (choice,) = told["choices"]
    assert choice["finish_reason"] in ("stop", "length") and told["usage"]["completion_tokens"]
    return str(choice["message"]["content"] if path == "/v1/chat/completions" else choice["text"])


def streamed_text(path: str, events: list[tuple[str, dict[str, Any]]]) -> str:
    """The text of a stream of events."""
    data = [each for _, each in events]
    if path == "/v1/responses":
        assert all(name == each["type"] for name, each in events)
        assert [each["sequence_number"] for each in data] == list(range(len(data)))
        assert data[-1]["type"] in ("response.completed", "response.incomplete")
        return "".join(each["delta"] for each in data if each["type"] == "response.output_text.delta")
    if path == "/v1/messages":
        kinds = [each["type"] for each in data]
        assert kinds == [name for name, _ in events]
        assert kinds[:3] == ["message_start", "ping", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        return "".join(each["delta"]["text"] for each in data if each["type"] == "content_block_delta")
    choices = [each["choices"][0] for each in data if each["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] in (["stop"], ["length"])
    key = (lambda choice: choice["delta"].get("content") or "") if "chat" in path else (lambda choice: choice["text"])
    return "".join(map(key, choices))


@pytest.mark.parametrize("name", RECORDED)
def test_what_agents_send_is_answered(running: Running, name: str) -> None:
    path, body = recorded(name, temperature=0)
    status, _, told = post(running.url, body | {"stream": False}, path)
    assert status == 200, told
    text = whole_text(path, told)
    assert streamed_text(path, stream(running.url, path, body | {"stream": True})) == text and text


def test_agents_are_answered_by_templates_that_want_turns_to_alternate(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    file = tmp_path / "alternating.jinja"
    file.write_text(NO_SYSTEM)
    with serving(make_engine(), chat_template=file) as found:
        for name in ("codex", "open_webui"):
            path, body = recorded(name, stream=False, tools=[])
            status, _, told = post(found.url, body, path)
            assert status == 200, told
        twice = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
        status, _, told = post(found.url, {"messages": twice}, "/v1/chat/completions")
        assert status == 400 and "roles must alternate" in told["error"]["message"]


def test_tools_that_no_server_here_runs_are_left_out_with_a_warning(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    path, body = recorded("codex_later", stream=False)
    with caplog.at_level(logging.WARNING, "truedraft.server.requests"):
        logging.getLogger("truedraft.server").propagate = True
        found = post(running.url, body, path)[2]["warnings"]
    assert "left out of a request: 2 tools or items" in caplog.text and "web_search" not in caplog.text
    assert found == [
        "tools[4] is left out: web_search is a tool that this server has not",
        "input[9] is left out: web_search_call is of a tool that this server has not",
    ]
    status, _, told = post(running.url, body | {"tool_choice": {"type": "web_search"}}, path)
    assert status == 400 and "tool_choice asks for web_search, a tool that" in told["error"]["message"]
    only = {"tools": [{"type": "web_search"}], "tool_choice": "required"}
    assert "this server has none of the tools" in post(running.url, body | only, path)[2]["error"]["message"]
    path, body = recorded("claude_code", stream=False)
    (warning,) = post(running.url, body, path)[2]["warnings"]
    assert warning.startswith("tools[1] is left out: web_search_20250305 has no input_schema")
