"""Anthropic's own client against `/v1/messages`: what it gets is what the engine answers in process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.conftest import Running, serving
from server.test_openai_client import chat_prompt, expected
from truedraft import Engine

anthropic = pytest.importorskip("anthropic")

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["x"]}
TOOLS = [{"name": name, "description": "d", "input_schema": SCHEMA | {"additionalProperties": False}} for name in "ab"]
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "extra_body": {"temperature": 0}}
USER = {"role": "user", "content": "Write a stack."}


@pytest.fixture(scope="module")
def client(running: Running) -> Any:
    return anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)


def test_a_message_whole_and_streamed(running: Running, client: Any) -> None:
    go, text = {"role": "user", "content": "go"}, [{"type": "text", "text": "ok"}]
    turns = [USER, {"role": "assistant", "content": text}, go]
    told = [{"role": "system", "content": "be brief"}, USER, {"role": "assistant", "content": "ok"}, go]
    plain = expected(running, chat_prompt(running, *told), max_tokens=20)
    found = client.messages.create(**ASKED, messages=turns, system="be brief")
    assert found.content[0].text == plain.text and found.model == "tiny"
    assert found.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[plain.finish_reason]
    assert found.usage.input_tokens + found.usage.cache_read_input_tokens == plain.prompt_tokens
    assert found.usage.output_tokens == len(plain.token_ids)
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    with client.messages.stream(**ASKED, messages=turns, system=system) as stream:
        assert "".join(stream.text_stream) == plain.text
        final = stream.get_final_message()
    assert final.content[0].text == plain.text and final.stop_reason == found.stop_reason
    assert final.usage.output_tokens == found.usage.output_tokens
    counted = client.messages.count_tokens(model="tiny", messages=turns, system="be brief")
    assert counted.input_tokens == plain.prompt_tokens


def test_stop_sequences_are_told(running: Running, client: Any) -> None:
    turns = [USER, {"role": "assistant", "content": "class Stack:\n    def push"}]
    plain = expected(running, chat_prompt(running, *turns, continues=True), max_tokens=20).text
    stop = next(plain[at : at + 4] for at in range(10, len(plain)) if plain.index(plain[at : at + 4]) == at)
    asked = ASKED | {"messages": turns, "stop_sequences": ["never there", stop]}
    found = client.messages.create(**asked)
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == plain[: plain.index(stop)]
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)


def test_tools(client: Any) -> None:
    asked = ASKED | {"messages": [USER], "tools": TOOLS, "max_tokens": 120}
    one = client.messages.create(**asked, tool_choice={"type": "tool", "name": "b"})
    (block,) = one.content
    assert (block.type, block.name, one.stop_reason) == ("tool_use", "b", "tool_use") and 0 <= block.input["x"] <= 9
    choice = {"type": "any", "disable_parallel_tool_use": True}
    whole = client.messages.create(**asked, tool_choice=choice).content
    with client.messages.stream(**asked, tool_choice=choice) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert "".join(parts) and final.stop_reason == "tool_use"
    assert [(each.name, each.input) for each in final.content] == [(each.name, each.input) for each in whole]
    answered = [USER, {"role": "assistant", "content": [each.model_dump() for each in one.content]}]
    answered.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "1"}]})
    assert client.messages.create(**ASKED | {"messages": answered, "tools": TOOLS}).content
    none = client.messages.create(**asked, tool_choice={"type": "none"})
    assert [each.type for each in none.content] == ["text"]


@pytest.mark.parametrize("content", ["", []])
def test_an_answer_to_an_empty_last_message_of_the_assistants_begins_anew(client: Any, content: Any) -> None:
    def counted(*messages: Any) -> int:
        return int(client.messages.count_tokens(model="tiny", messages=messages).input_tokens)

    assert counted(USER, {"role": "assistant", "content": content}) == counted(USER)


def test_a_last_message_of_the_assistants_is_continued(running: Running, client: Any) -> None:
    begun = {"role": "assistant", "content": "class Stack"}
    prompt = chat_prompt(running, USER, begun, continues=True)
    found = client.messages.create(**ASKED, messages=[USER, begun])
    assert found.content[0].text == expected(running, prompt, max_tokens=20).text
    with pytest.raises(anthropic.BadRequestError, match="the last message is the assistant's to go on with"):
        client.messages.create(**ASKED, messages=[USER, begun], tools=TOOLS, tool_choice={"type": "any"})


def test_forms_and_errors(client: Any) -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "integer", "minimum": 0, "maximum": 9}}}
    assert client.messages.create(**ASKED, messages=[USER], output_config=form).content[0].text.isdigit()
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'claude' here") as refused:
        client.messages.create(model="claude", max_tokens=4, messages=[USER])
    assert refused.value.body["type"] == "error" and refused.value.body["error"]["message"]


def test_keys_come_by_either_header(make_engine: Callable[..., Engine], template_file: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("me sk-right\n")
    with serving(make_engine(), chat_template=template_file, api_key_file=keys) as found:
        asked = {"model": "tiny", "max_tokens": 2, "messages": [USER]}
        for given in ({"api_key": "sk-right"}, {"auth_token": "sk-right", "api_key": None}):
            assert anthropic.Anthropic(base_url=found.url, max_retries=0, **given).messages.create(**asked).content
        with pytest.raises(anthropic.AuthenticationError, match="the API key is not known here") as refused:
            anthropic.Anthropic(base_url=found.url, api_key="sk-wrong", max_retries=0).messages.create(**asked)
        assert refused.value.body["error"]["type"] == "authentication_error"
