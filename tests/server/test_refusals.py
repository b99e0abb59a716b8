"""What is sent amiss is refused with status 400, the field by the client's name for it, and what to do."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError

from server.conftest import Running, serving
from server.test_load import get, post
from server.test_recorded_requests import recorded
from truedraft import Engine
from truedraft.core.params import Structured
from truedraft.server import bodies
from truedraft.server.chat import ChatRequest
from truedraft.server.completions import CompletionRequest
from truedraft.server.conversations import MOST_TOOLS
from truedraft.server.fields import MOST_ENTRIES

CHAT, TEXT, NEWER, ANTHROPIC = "chat/completions", "completions", "responses", "messages"
USER = {"role": "user", "content": "x"}
BODIES: dict[str, dict[str, Any]] = {TEXT: {"prompt": "x", "max_tokens": 2}, NEWER: {"input": "x"}}
FUNCTION = {"name": "a", "parameters": {"type": "object"}}
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
BAD = {"name": "a", "parameters": UNIQUE}
CHOICE = {"type": "tool", "name": "web_search"}
HOSTED = [{"type": "web_search_20250305", "name": "web_search"}]
NAMED = {"name": "n", "schema": UNIQUE}
ODD = {"name": "n", "schema": {"$schema": 3}}
PART = {"type": "text", "text": "x"}
OBJECT, SCHEMA, TEXTS = {"type": "json_object"}, {"type": "json_schema"}, {"type": "string"}
HALF = "has half a character (U+D800)"
FORMER = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend")
VARIABLES = ("tokenize", "messages", "padding", "max_length", "truncation", "chat_template", "return_tensors")


def tools_of(*functions: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": each} for each in functions]


REFUSED: tuple[tuple[str, dict[str, Any], str, str | None], ...] = (
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens must", "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 100_000}, "max_completion_tokens must be at most 2048", "max_completion_tokens"),
    (CHAT, {"max_tokens": 100_000}, "max_tokens must be at most 2048, ", "max_tokens"),
    (NEWER, {"max_output_tokens": 0}, "max_output_tokens must", "max_output_tokens"),
    (NEWER, {"max_output_tokens": 100_000}, "max_output_tokens must be at most 2048", "max_output_tokens"),
    (TEXT, {"max_tokens": 2049}, "max_tokens must be at most 2048, the context of 'tiny' for prompt and", "max_tokens"),
    (TEXT, {"max_tokens": "many"}, "max_tokens", "max_tokens"),
    (TEXT, {"temperature": -1.0}, "temperature must be a number, 0 or more, got -1.0", "temperature"),
    (ANTHROPIC, {"temperature": -1.0}, "temperature must be a number", None),
    (TEXT, {"logit_bias": {"x": 1.0}}, "logit_bias must be a mapping", "logit_bias"),
    (TEXT, {"logit_bias": {str(number): 1 for number in range(2000)}}, "logit_bias holds 2000", "logit_bias"),
    (TEXT, {"metadata": {str(number): "x" for number in range(2000)}}, "metadata holds 2000", "metadata"),
    (TEXT, {"logprobs": 21}, "logprobs must lie in 0 to 20, got 21", "logprobs"),
    (TEXT, {"prompt_logprobs": 100_000}, "prompt_logprobs must lie in 0 to 20, got 100000", "prompt_logprobs"),
    (TEXT, {"logprobs_mode": "odd"}, "logprobs_mode", "logprobs_mode"),
    (TEXT, {"n": 17}, "asks for 17 answers, and this server gives 16", "n"),
    (TEXT, {"prompt": ["a"] * 20}, "asks for 20 answers", "prompt"),
    (TEXT, {"prompt": ["x"] * 9000, "suffix": "x" * 9000}, "asks for 9000 answers, and this server", "prompt"),
    (TEXT, {"prompt": []}, "prompt", "prompt"),
    (TEXT, {"prompt": ""}, "", "prompt"),
    (TEXT, {"prompt": [[]]}, "", "prompt"),
    (TEXT, {"prompt": [-1]}, "", "prompt"),
    (TEXT, {"prompt": [True]}, "prompt[0]", "prompt[0]"),
    (TEXT, {"prompt": [10**9]}, "token id 1000000000 is outside", "prompt"),
    (TEXT, {"prompt": "ab " * 3000}, "the prompt has", "prompt"),
    (TEXT, {"prompt": "x" * 200_000}, "the prompt has", "prompt"),
    (TEXT, {"prediction": {"content": "x y " * 5000}}, "and this model's context holds", "prediction"),
    (TEXT, {"suffix": "end"}, "suffix needs tokens for a text in the middle", "suffix"),
    (TEXT, {"reasoning_budget": 6}, "reasoning_budget needs a chat", "reasoning_budget"),
    (CHAT, {"reasoning_budget": 6}, "reasoning_budget needs a chat", "reasoning_budget"),
    (TEXT, {"stop": ["x"] * 65}, "stop holds 65 entries, of at most 64", "stop"),
    (TEXT, {"stop": ["x"] * (MOST_ENTRIES + 1)}, "stop holds 8193 entries, of at most", "stop"),
    (TEXT, {"stop": [""]}, "holds an empty text", "stop"),
    (ANTHROPIC, {"stop_sequences": [""]}, "stop_sequences ", None),
    (TEXT, {"stop_token_ids": [10**30]}, "stop_token_ids names token id", "stop_token_ids"),
    (TEXT, {"allowed_token_ids": []}, "allowed_token_ids: ", "allowed_token_ids"),
    (TEXT, {"coupled": True}, "unrecognized request argument: coupled", "coupled"),
    *((TEXT, {name: "x"}, "response_format, or structured_outputs", name) for name in FORMER),
    (TEXT, {"speculation": {"drafter": "nope"}}, "unknown drafter 'nope'", "speculation.drafter"),
    (TEXT, {"speculation": {"drafter": []}}, "speculation.drafter: ", "speculation.drafter"),
    (TEXT, {"speculation": {"rule": "block"}}, "but the server's own", "speculation.rule"),
    # Halves of characters.
    (CHAT, {"messages": [{"role": "user", "content": "a \U0001f600 \ud800"}]}, HALF, "messages[0].content"),
    (CHAT, {"tools": tools_of(FUNCTION | {"description": "\udc00"})}, "(U+DC00)", "tools[0].function.description"),
    (TEXT, {"prompt": "\ud800"}, HALF, "prompt"),
    (TEXT, {"prediction": {"content": "\ud800"}}, HALF, "prediction.content"),
    (NEWER, {"input": "\ud800"}, HALF, "input"),
    (NEWER, {"metadata": {"a": "\ud800"}}, HALF, "metadata.a"),
    (ANTHROPIC, {"tools": [{"name": "a", "type": "\ud800"}]}, f"tools[0].type {HALF}", None),
    (TEXT, {"bad_words": ["\ud800"]}, HALF, "bad_words[0]"),
    (TEXT, {"\ud800": 1}, f"the body {HALF}", None),
    # Forms.
    (TEXT, {"structured_outputs": {"regex": "a"}, "response_format": OBJECT}, "another form", "structured_outputs"),
    (TEXT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "got 2", "structured_outputs"),
    (TEXT, {"structured_outputs": {}}, "got 0", "structured_outputs"),
    (TEXT, {"structured_outputs": {}, "response_format": OBJECT}, "got 0", "structured_outputs"),
    (TEXT, {"structured_outputs": {"choice": []}}, "structured_outputs ", "structured_outputs"),
    (TEXT, {"structured_outputs": {"regex": "("}}, "expression (: unclosed group", "structured_outputs"),
    (TEXT, {"structured_outputs": {"grammar": "x" * 70_000}}, "of at most 65536", "structured_outputs"),
    (TEXT, {"structured_outputs": {"json": {"type": "nonsense"}}}, "structured_outputs cannot", "structured_outputs"),
    (TEXT, {"structured_outputs": {"json": {"$defs": []}}}, "$defs", "structured_outputs"),
    (TEXT, {"structured_outputs": {"json": {"x-guidance": 3}}}, "x-guidance", "structured_outputs"),
    (TEXT, {"response_format": SCHEMA | {"json_schema": ODD}}, "$schema", "response_format"),
    (CHAT, {"response_format": SCHEMA | {"json_schema": NAMED}}, 'at #/properties/a: "uniqueItems"', "response_format"),
    (NEWER, {"text": {"format": SCHEMA | NAMED}}, 'at #/properties/a: "uniqueItems"', "text"),
    (ANTHROPIC, {"output_config": {"format": {"schema": {"type": "foo"}}}}, "output_config cannot", None),
    # Tools.
    (CHAT, {"tools": tools_of(BAD), "tool_choice": "required"}, 'function "a" at #/', "tools"),
    (CHAT, {"functions": [BAD], "function_call": {"name": "a"}}, "functions cannot", "functions"),
    (CHAT, {"functions": [BAD], "function_call": {"name": "z"}}, "function_call n", "function_call"),
    (CHAT, {"tools": tools_of({"name": "a", "parameters": TEXTS})}, "of type 'string'", "tools[0].function.parameters"),
    (CHAT, {"tools": tools_of({"name": ""})}, "tools[0].function.name", "tools[0].function.name"),
    (CHAT, {"tools": tools_of(FUNCTION, FUNCTION)}, "tools has two functions called 'a'", "tools"),
    (CHAT, {"tools": tools_of(*[FUNCTION] * (MOST_TOOLS + 1))}, "tools holds 1025 functions, of at most 1024", "tools"),
    (ANTHROPIC, {"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name", None),
    (ANTHROPIC, {"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema", None),
    (ANTHROPIC, {"tools": HOSTED, "tool_choice": CHOICE}, "asks for web_search_20250305, a tool that this", None),
    # Conversations.
    (ANTHROPIC, {"messages": []}, "messages is empty", None),
    (ANTHROPIC, {"messages": [{"role": "assistant", "content": ""}]}, "messages is empty", None),
    (ANTHROPIC, {"messages": [USER | {"content": 1}]}, "messages[0].content: must be a text or", None),
    (CHAT, {"messages": [USER] * (MOST_ENTRIES + 1)}, "messages holds 8193 entries, of at most 8192", "messages"),
    (CHAT, {"messages": [USER | {"content": [PART] * 8193}]}, "holds 8193 entries, of", "messages[0].content"),
    (ANTHROPIC, {"messages": [USER] * (MOST_ENTRIES + 1)}, "messages holds 8193 entries", None),
    (NEWER, {"input": [USER] * (MOST_ENTRIES + 1)}, "input holds 8193 entries, of at most 8192", "input"),
    (NEWER, {"include": ["zzz"]}, "include[0]: Input should be 'message.output_text", "include[0]"),
    (NEWER, {"reasoning": {"foo": 1}}, "unrecognized request argument: reasoning.foo", "reasoning.foo"),
    (CHAT, {"thinking": {"type": "zzz"}}, "thinking.type cannot be 'zzz'", "thinking.type"),
    (ANTHROPIC, {"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens cannot", None),
    (CHAT, {"reasoning": {"max_tokens": -5}}, "reasoning.max_tokens", "reasoning.max_tokens"),
    (CHAT, {"reasoning": {"max_tokens": "x"}}, "reasoning.max_tokens", "reasoning.max_tokens"),
    *((CHAT, {"chat_template_kwargs": {name: 1}}, name, "chat_template_kwargs") for name in VARIABLES),
)  # fmt: skip
RAW = {
    b"{": "the body is no JSON",
    b"[]": "cannot be used",
    b"": "cannot be used",
    b"\xff\xfe": "body",
    b'{"prompt": "x", "temperature": NaN}': "temperature",
    b'{"prompt": "x", "temperature": 1e999}': "temperature",
    json.dumps({"prompt": "x", "metadata": [[]] * 40_000}).encode(): "more than 40000 values",
    json.dumps({"prompt": "x", "metadata": [0] * 40_000}).encode(): "more than 40000 values",
}


@pytest.fixture(scope="module")
def plain_server(make_engine: Callable[..., Engine], template_file: Any) -> Iterator[Running]:
    with serving(make_engine(), chat_template=template_file) as found:
        yield found


def test_what_is_sent_amiss(plain_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, more, message, field in REFUSED:
        body = BODIES.get(path) or {"messages": [USER], "max_tokens": 4}
        status, _, told = post(plain_server.url, body | more, f"/v1/{path}")
        error = told.get("error", {})
        assert status == 400 and message in error["message"] and error.get("param") == field, (path, more, told)
        assert told.get("type") == ("error" if path == ANTHROPIC else None)
        assert "Traceback" not in str(told) and "/truedraft/" not in str(told)
    monkeypatch.setattr(bodies, "MOST_VALUES", 40_000)
    for raw, message in RAW.items():
        status, _, told = post(plain_server.url, raw)
        assert status == 400 and message in told["error"]["message"], (raw[:40], told)
    variables = {"template": 1, "variables": {}, "enable_thinking": False}
    fine = {"chat_template_kwargs": variables, "messages": [USER], "max_tokens": 1}
    assert post(plain_server.url, fine, f"/v1/{CHAT}")[0] == 200
    assert post(plain_server.url, {"prompt": "\ud800"}, "/tokenize")[0] == 400
    assert Structured("choice", ["a"]).value == ("a",)


def test_other_paths(plain_server: Running) -> None:
    assert get(plain_server.url, "/v1/completions")[0] == 405
    status, told = get(plain_server.url, "/../../etc/passwd")
    assert status == 404 and "root:" not in told
    status, _, found = post(plain_server.url, {"input": "x", "model": "tiny"}, "/v1/embeddings")
    assert status == 404 and found["error"]["type"] == "not_found_error"
    status, _, other = post(plain_server.url, {"prompt": "x", "model": "gpt"})
    assert status == 404 and other["error"]["param"] == "model"
    assert other["error"]["message"].startswith("there is no model 'gpt' here")
    assert "'/v1/embeddings'" in found["error"]["message"] and "/v1/chat/completions" in found["error"]["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_bodies_that_are_not_sent_as_json_are_told_their_header(plain_server: Running, kind: str | None) -> None:
    at = urlsplit(plain_server.url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)
    for path in (CHAT, TEXT):
        headers = {} if kind is None else {"Content-Type": kind}
        connection.request("POST", f"/v1/{path}", json.dumps({"prompt": "x"}).encode(), headers)
        reply = connection.getresponse()
        told = json.loads(reply.read())["error"]
        assert reply.status == 400 and told["param"] == "Content-Type"
        shown = "missing" if kind is None else repr(kind)
        assert told["message"] == f"the header Content-Type is {shown}; send JSON as application/json"
    connection.close()


def test_one_mistake_is_told_of_a_million() -> None:
    """A body of some megabytes may hold millions of them, and each that is looked for takes time and memory."""
    fields = {f"field_{number}": number for number in range(5000)}
    message = {"role": "robot", "content": [5] * 50} | fields
    for model, body in (
        (CompletionRequest, {"prompt": [None] * 5000}),
        (CompletionRequest, {"prompt": [[None] * 50] * 100}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * 5000}),
        (CompletionRequest, {"prompt": "x", "allowed_token_ids": ["a"] * 5000}),
        (CompletionRequest, {"prompt": "x"} | fields),
        (ChatRequest, {"messages": [message] * 50}),
    ):
        with pytest.raises(ValidationError) as refused:
            model.model_validate(body)
        assert refused.value.error_count() <= 6


DICTIONARY = ": Input should be a valid dict"
ARGUMENTS = ".function.arguments: Input should be a valid string or a valid dictionary, got 5"
WRONG: tuple[tuple[str, list[Any], Any, str], ...] = (
    ("codex", ["input"], 5, "input: must be a text or a list of items, got 5"),
    ("codex", ["input", 1], {"type": "ghost"}, "input[1].type is 'ghost', which is not known here; known are 'messa"),
    ("codex", ["input", 1], "x", "input[1] must be an object with a type, got 'x'"),
    ("codex", ["input", 0, "content", 0, "text"], 7, "input[0].content[0].text: Input should be a valid string, got 7"),
    ("codex", ["input", 0, "content", 0], {"type": "input_file"}, "input[0].content[0].type is 'input_file'"),
    ("codex_later", ["input", 5, "arguments"], {}, "input[5].arguments: Input should be a valid string, got {}"),
    ("codex_later", ["input", 5], {"type": "function_call", "name": "f"}, "input[5].call_id: Field required"),
    ("codex", ["tools", 3, "name"], None, "tools[3].name: Input should be a valid string, got None"),
    ("codex", ["tools", 6, "tools", 0, "parameters"], "x", f"tools[6].tools[0].parameters{DICTIONARY}"),
    ("codex", ["tools", 1, "name"], "exec_command", "tools[1] has the name 'exec_command' of a tool before it"),
    ("codex", ["reasonning"], {}, "unrecognized request argument: reasonning"),
    ("cline", ["messages", 2, "tool_calls", 0, "function", "arguments"], 5, f"messages[2].tool_calls[0]{ARGUMENTS}"),
    ("cline", ["messages", 1, "content"], 5, "messages[1].content: must be a text or a list of parts, got 5"),
    ("cline", ["messages", 1, "content", 0], {"type": "video"}, "messages[1].content[0].type is 'video'"),
    ("cline", ["messages", 1, "role"], "robot", "messages[1].role: Input should be 'system', 'developer', 'user'"),
    ("claude_code", ["messages", 1, "content", 2, "input"], "x", f"messages[1].content[2].input{DICTIONARY}"),
    ("claude_code", ["messages", 0, "content", 0, "type"], "x", "messages[0].content[0].type is 'x'"),
    ("claude_code", ["tool_choice"], {"type": "tool", "name": "Write"}, "tool_choice names 'Write'; tools has 'Read'"),
)  # fmt: skip


def test_the_part_that_is_wrong_is_named(plain_server: Running) -> None:
    for name, place, value, message in WRONG:
        path, body = recorded(name)
        here: Any = body
        for part in place[:-1]:
            here = here[part]
        here[place[-1]] = value
        status, _, told = post(plain_server.url, body, path)
        assert status == 400 and told["error"]["message"].startswith(message), told
        if path == "/v1/messages":
            assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"
        else:
            param = told["error"]["param"]
            assert param and told["error"]["message"].startswith((param, "unrecognized"))
