"""Calls and reasoning through the server, in notations whose marks are special tokens."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from server.conftest import openai_client, serving
from support.byte_tokenizers import ScriptModel, byte_tokenizer
from truedraft import Engine
from truedraft.drafters.prediction import with_own_drafts
from truedraft.drafters.specs import from_spec
from truedraft.text.notations import notation_of

openai = pytest.importorskip("openai")

TEMPLATES = Path(__file__).parent.parent / "text" / "templates"
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [{"type": "function", "function": {"name": "note", "parameters": PARAMETERS}}]
ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Go."}], "temperature": 0}


@contextlib.contextmanager
def client_of(template: str, writes: str) -> Iterator[Any]:
    """A client of a model with this template, which writes this."""
    file = TEMPLATES / f"{template}.jinja"
    tokenizer = byte_tokenizer(notation_of(file.read_text()).marks + file.read_text())
    model = ScriptModel(tokenizer, writes)
    engine = Engine(model, with_own_drafts(from_spec("prompt-lookup", model)), controller="fixed")
    with serving(engine, chat_template=file) as running:
        yield openai_client(running)


def both_ways(client: Any, **asked: Any) -> tuple[str, str, list[Any], str]:
    """Content, reasoning, calls and why it ended, which are the same streamed and whole."""
    asked = ASKED | {"max_tokens": 300} | asked
    whole = client.chat.completions.create(**asked).choices[0]
    message = whole.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    found = message.content or "", getattr(message, "reasoning_content", None) or "", calls, whole.finish_reason
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    content = "".join(each.delta.content or "" for each in chunks)
    reasoning = "".join(getattr(each.delta, "reasoning_content", None) or "" for each in chunks)
    told: dict[int, list[str]] = {}
    for part in (part for each in chunks for part in each.delta.tool_calls or ()):
        told.setdefault(part.index, [part.function.name, ""])[1] += part.function.arguments or ""
    streamed = content, reasoning, [(name, arguments) for name, arguments in told.values()], chunks[-1].finish_reason
    assert streamed == found
    return found


def test_marks_that_are_special_tokens_are_read() -> None:
    with client_of("unsloth-mistral-Devstral-Small-2507", 'Well.[TOOL_CALLS]note[ARGS]{"text": "é"}') as client:
        assert both_ways(client, tools=TOOLS) == ("Well.", "", [("note", '{"text": "é"}')], "tool_calls")
        call = client.chat.completions.create(**ASKED, tools=TOOLS).choices[0].message.tool_calls[0]
        assert len(call.id) == 9 and call.id.isalnum(), "as these templates insist on"
        about = client.models.retrieve("tiny").speculation
        assert client.models.retrieve("tiny").calls == "mistral-args" and about


def test_the_librarys_answers_show_no_marks() -> None:
    tokenizer = byte_tokenizer("[TOOL_CALLS][ARGS]")
    engine = Engine(ScriptModel(tokenizer, "Well.[TOOL_CALLS]note[ARGS]{}"))
    shown = {number: token for token, number in tokenizer.whole_tokens.items() if token == "[ARGS]"}
    plain, request = engine.generate("Go."), engine.prepare("Go.", shown=shown)
    engine.enqueue(request)
    while not request.closed:
        engine.step()
    assert plain.text == "Well.note{}"
    assert "".join(piece.text for piece in request.pieces) == "Well.note[ARGS]{}"


def test_analysis_never_leaks_into_the_answer() -> None:
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    with client_of("openai-gpt-oss-120b", answer) as client:
        assert both_ways(client) == ("Yes.", "Hm.", [], "stop")
        assert both_ways(client, tools=TOOLS) == ("Yes.", "Hm.", [], "stop")
        response = client.responses.create(model="tiny", input="Go.", max_output_tokens=300, temperature=0)
        assert response.output_text == "Yes."
        cut = client.chat.completions.create(**ASKED, max_tokens=14).choices[0]
        assert (cut.message.content, cut.finish_reason) == ("", "length") and cut.message.reasoning_content == "Hm."


def test_a_form_of_the_answer_stands_in_its_channel() -> None:
    pytest.importorskip("llguidance")
    with client_of("openai-gpt-oss-120b", "something else") as client:
        for form, answer in (
            ({"json": {"const": [1, 2]}}, "[1, 2]"),
            ({"choice": ["one"]}, "one"),
            ({"json": {"enum": [7]}}, "7"),
            ({"regex": "a/b"}, "a/b"),
            ({"grammar": 'start: item item\nitem: "x"'}, "xx"),
        ):
            asked = {"structured_outputs": form, "reasoning_budget": 0}
            assert both_ways(client, extra_body=asked) == (answer, "", [], "stop")


def test_a_call_to_a_channel_ends_the_turn() -> None:
    call = '<|channel|>commentary to=functions.note <|constrain|>json<|message|>{"text": "a"}<|call|>and more'
    with client_of("openai-gpt-oss-120b", call) as client:
        assert both_ways(client, tools=TOOLS) == ("", "", [("note", '{"text": "a"}')], "tool_calls")


def test_an_answer_that_begins_inside_reasoning() -> None:
    with client_of("Qwen3.5-4B", "Hm.\n</think>\n\nYes.") as client:
        assert both_ways(client) == ("Yes.", "Hm.", [], "stop")


FORCED = (
    "moonshotai-Kimi-K2", "mistralai-Mistral-Nemo-Instruct-2407", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "openai-gpt-oss-120b", "GLM-4.6",
)  # fmt: skip


@pytest.mark.parametrize("template", FORCED)
def test_a_call_is_forced_in_the_notation_of_the_template(template: str) -> None:
    pytest.importorskip("llguidance")
    properties = {"kind": {"enum": ["list", "dict"]}}
    parameters = {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "note", "parameters": parameters}}
    named = {"type": "function", "function": {"name": "note"}}
    with client_of(template, "something else") as client:
        thinks = client.models.retrieve("tiny").reasoning is not None
        asked = {"tools": [tool], "tool_choice": named, "extra_body": {"reasoning_budget": 0} if thinks else {}}
        content, reasoning, calls, reason = both_ways(client, **asked)
        assert (content, reasoning, reason) == ("", "", "tool_calls")
        ((name, arguments),) = calls
        assert name == "note" and json.loads(arguments)["kind"] in ("list", "dict")
        spent = client.chat.completions.create(**ASKED, max_tokens=300, **asked).speculation
        assert spent["num_accepted_tokens"] > 5, "what is forced is drafted"


def posted(client: Any, path: str, body: dict[str, Any]) -> str:
    """What the server answers, as it stands."""
    return httpx.post(f"{client.base_url}{path}", json=body, timeout=60).raise_for_status().text


def asked_everywhere(tools: dict[str, Any], required: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Requests for a chat, a response and a message, with tools by their schemas."""
    named = [{"name": name, "parameters": schema} for name, schema in tools.items()]
    choice = {"tool_choice": "required" if required else "auto"}
    chat = ASKED | {"tools": [{"type": "function", "function": each} for each in named]} | choice
    newer = {"temperature": 0, "input": "Go.", "tools": [{"type": "function"} | each for each in named]} | choice
    message = {"temperature": 0, "messages": ASKED["messages"], "tool_choice": {"type": "any" if required else "auto"}}
    message["tools"] = [{"name": name, "input_schema": schema} for name, schema in tools.items()]
    return chat, newer, message


def calls_everywhere(client: Any, tools: dict[str, Any], required: bool) -> Iterator[tuple[str, Any, list[str]]]:
    """Text, calls and warnings of each endpoint for tools by their schemas, whole and streamed."""
    chat, newer, message = asked_everywhere(tools, required)
    chat["max_tokens"] = newer["max_output_tokens"] = message["max_tokens"] = 300
    found = json.loads(posted(client, "chat/completions", chat))
    said = found["choices"][0]["message"]
    calls = [each["function"] for each in said.get("tool_calls", [])]
    yield said["content"] or "", [(f["name"], f["arguments"]) for f in calls], found.get("warnings", [])
    chunks = events(posted(client, "chat/completions", chat | {"stream": True}))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    told: dict[int, list[str]] = {}
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        told.setdefault(part["index"], [part["function"].get("name", ""), ""])[1] += part["function"]["arguments"]
    warnings = [warning for chunk in chunks for warning in chunk.get("warnings", ())]
    yield "".join(delta.get("content") or "" for delta in deltas), list(map(tuple, told.values())), warnings

    found = json.loads(posted(client, "responses", newer))
    last = events(posted(client, "responses", newer | {"stream": True}))
    for each in (found, last[-1]["response"]):
        calls = [item for item in each["output"] if item["type"] == "function_call"]
        texts = [part["text"] for item in each["output"] if item["type"] == "message" for part in item["content"]]
        yield "".join(texts), [(call["name"], call["arguments"]) for call in calls], each["warnings"]
    pieces = [event for event in last if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(each["delta"] for each in pieces) == "".join(call["arguments"] for call in calls)

    found = json.loads(posted(client, "messages", message))
    blocks = [each for each in found["content"] if each["type"] == "tool_use"]
    texts = [each["text"] for each in found["content"] if each["type"] == "text"]
    yield "".join(texts), [(each["name"], json.dumps(each["input"])) for each in blocks], found["warnings"]
    got = events(posted(client, "messages", message | {"stream": True}))
    starts = [event["content_block"] for event in got if event["type"] == "content_block_start"]
    names = [each["name"] for each in starts if each["type"] == "tool_use"]
    inputs: dict[int, str] = {}
    for event in (event for event in got if event.get("delta", {}).get("type") == "input_json_delta"):
        inputs[event["index"]] = inputs.get(event["index"], "") + event["delta"]["partial_json"]
    text = "".join(event["delta"].get("text", "") for event in got if event["type"] == "content_block_delta")
    begun = next(event["message"]["warnings"] for event in got if event["type"] == "message_start")
    ended = next(event for event in got if event["type"] == "message_delta")
    yield text, list(zip(names, inputs.values(), strict=True)), ended.get("warnings", begun)


def events(stream: str) -> list[dict[str, Any]]:
    """The data of a stream's events."""
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("streams", [False, True])
def test_a_forced_call_that_is_cut_is_no_text_and_no_whole_call(streams: bool) -> None:
    pytest.importorskip("llguidance")
    chat, newer, message = (each | {"stream": streams} for each in asked_everywhere({"note": PARAMETERS}, True))
    message["max_tokens"] = 90
    with client_of("Qwen-Qwen2.5-7B-Instruct", "so") as client:
        told = partial(posted, client)
        for most in (3, 15, 22):
            found = told("chat/completions", chat | {"max_tokens": most})
            found += told("messages", message | {"max_tokens": most})
            found += told("responses", newer | {"max_output_tokens": most})
            assert "<" not in found and '\\"name' not in found
        found = told("chat/completions", chat | {"stop": ["text"]})
        assert '"tool_calls"' in found and '"finish_reason":"stop"' in found.replace(" ", "")
        found = told("messages", message | {"stop_sequences": ["text"]}).replace(" ", "")
        assert '"stop_reason":"stop_sequence"' in found and '"stop_sequence":"text"' in found
        found = told("responses", newer | {"stop": ["text"]}).replace(" ", "")
        assert '"status":"incomplete"' in found and '"status":"completed"' in found


A, B = ("note", '{"text": "a"}'), ("note", '{"text": "b"}')


@pytest.mark.parametrize(
    ("broken", "left", "calls"),
    [
        ('{"name": "note", "arguments": {"text": "a"}\n</tool_call>', "", [A, B]),  # all but its last brace is there
        ('{"name": "note", "arguments": {"te', '{"name": "note", "arguments": {"te', [B]),
        ('{"name": "note", "arguments": {"text": "a\nb"\n</tool_call>', '"arguments": {"text": "a\nb"', [B]),
        ('{"name": "note", "arguments": [1, 2]}\n</tool_call>', '"arguments": [1, 2]}', [B]),  # JSON, and no object
        ('{"name": "note", "arguments": [1, 2}}\n</tool_call>', '"arguments": [1, 2}}', [B]),
    ],
)
def test_a_broken_call_takes_no_other_with_it(broken: str, left: str, calls: list[tuple[str, str]]) -> None:
    whole = '\n<tool_call>\n{"name": "note", "arguments": {"text": "b"}}\n</tool_call>'
    with client_of("Qwen-Qwen2.5-7B-Instruct", f"So. <tool_call>\n{broken}{whole}") as client:
        found = list(calls_everywhere(client, {"note": PARAMETERS}, required=False))
        assert len(found) == 6
        for text, told, _ in found:
            assert told == calls and text.startswith("So. ") and left in text, (text, told)
            assert left or text.strip() == "So.", text


FREE = {"type": "object", "properties": {"id": {"type": "string", "not": {"const": ""}}}, "required": ["id"]}


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize(("value", "wrong"), [('""', 'at #/id: {"const":""} is not allowed for ""'), ('"é"', "")])
def test_a_schema_that_no_form_holds_leaves_arguments_free_and_checks_them(
    value: str, wrong: str, required: bool
) -> None:
    pytest.importorskip("llguidance")
    pytest.importorskip("jsonschema_rs")
    call = '<tool_call>\n{"name": "find", "arguments": {"id": ' + value + "}}\n</tool_call>"
    with client_of("Qwen-Qwen2.5-7B-Instruct", call) as client:
        for text, calls, warnings in calls_everywhere(client, {"find": FREE, "note": PARAMETERS}, required):
            assert text == "" and [(name, json.loads(given)) for name, given in calls] == [
                ("find", {"id": json.loads(value)})
            ]
            told = warnings[1:] if required else warnings
            assert not required or ('"not" cannot be held to' in warnings[0] and "find" in warnings[0]), warnings
            assert [each.partition("its schema: ")[2] for each in told] == ([wrong] if wrong else []), warnings
        named = {"type": "function", "function": {"name": "find"}}
        tools = [{"type": "function", "function": {"name": "find", "parameters": FREE}}]
        for choice in ("required", named):  # where the form is what is asked for
            with pytest.raises(openai.BadRequestError, match='"not" cannot be held to'):
                client.chat.completions.create(**ASKED, tools=tools, tool_choice=choice)


def test_histories_go_through_templates_that_join_arguments() -> None:
    function = {"name": "note", "arguments": '{"text": "a"}'}
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    asked = ASKED | {
        "messages": [*ASKED["messages"], turn, {"role": "tool", "tool_call_id": "c", "content": "done"}],
        "extra_body": {"return_token_ids": True},
    }
    for template in ("minimal-deepseek-v3", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"):
        with client_of(template, "Yes.") as client:
            ids = client.chat.completions.create(**asked, max_tokens=50).prompt_token_ids
        text = (TEMPLATES / f"{template}.jinja").read_text()
        shown = byte_tokenizer(notation_of(text).marks + text).shown_text(ids)
        assert '<｜tool▁sep｜>note\n```json\n{"text": "a"}\n```<｜tool▁call▁end｜>' in shown
        assert "<｜Assistant｜><｜end▁of▁sentence｜>" not in shown, "no empty turn behind the calls"
