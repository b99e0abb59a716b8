"""Long bodies: work on them grows with their length alone, is bounded, and is done where nobody else waits for it."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from server.conftest import Running, serving
from server.test_load import post, wait_for
from truedraft import Engine
from truedraft.server import bodies
from truedraft.server import conversations as server_tools
from truedraft.server.chat import ChatRequest
from truedraft.server.conversations import Conversation, FunctionFields, ToolUse
from truedraft.server.errors import ApiError
from truedraft.server.fields import MOST_ENTRIES
from truedraft.server.front import Front
from truedraft.server.items import Callable as Tool
from truedraft.server.items import Toolbox
from truedraft.text.histories import HistoryForm, plainer
from truedraft.text.notations import UNKNOWN
from truedraft.text.tokenizer import Tokenizer


class Counted(str):
    """A text that counts what it is compared with."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def comparisons(work: Callable[[], object]) -> int:
    Counted.compared = 0
    work()
    return Counted.compared


def names(count: int) -> list[Counted]:
    return [Counted(f"name_{number}") for number in range(count)]


def answered_calls(count: int) -> list[dict[str, Any]]:
    """A message with many calls, and their results, the last first."""
    function = {"name": "f", "arguments": {}}
    calls = [{"id": each, "type": "function", "function": function} for each in names(count)]
    results = [{"role": "tool", "tool_call_id": each, "content": "r"} for each in reversed(names(count))]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


def conversation(count: int) -> object:
    given = ChatRequest.model_validate({"messages": answered_calls(count)})
    for message in given.messages:
        message.tool_call_id = message.tool_call_id and Counted(message.tool_call_id)
        for call in message.tool_calls or ():
            call.id = call.id and Counted(call.id)
    return given.templated


def used(count: int) -> object:
    tools = [FunctionFields.model_construct(name=each, parameters=None) for each in names(count)]
    return ToolUse.of(tools, None, None, UNKNOWN)


def allowed(count: int) -> object:
    found = Toolbox({f"s__{each}": Tool(FunctionFields(name="f"), each, "s", False) for each in names(count)})
    return found._named(*names(count))


@pytest.mark.parametrize(
    "work",
    [used, allowed, conversation, lambda count: HistoryForm(one_call=True).fitted(answered_calls(count), UNKNOWN)],
)
def test_names_and_ids_are_compared_in_proportion_to_their_number(work: Callable[[int], object]) -> None:
    few, many = (comparisons(lambda count=count: work(count)) for count in (200, 800))  # type: ignore[misc]
    assert many <= 4 * few + 100 <= 8_000


def test_calls_and_results_without_ids_go_together_in_order() -> None:
    call = {"function": {"name": "f"}}
    given = [{"role": "assistant", "tool_calls": [call, call]}, *[{"role": "tool", "content": "r"}] * 3]
    found = ChatRequest.model_validate({"messages": given}).templated
    assert [each["tool_call_id"] for each in found[1:]] == ["call_0_0", "call_0_1", "call_3"]


def test_each_result_follows_its_call_once() -> None:
    function = {"name": "f", "arguments": {}}
    calls = [{"id": each, "function": function} for each in ("a", "b", "a")]
    results = [{"role": "tool", "tool_call_id": each, "content": text} for each, text in ("a1", "a2", "b3", "a4")]
    messages = [results[0], {"role": "assistant", "content": "", "tool_calls": calls}, *results[1:], results[0]]
    found = HistoryForm(one_call=True).fitted(messages, UNKNOWN)
    told = [each["content"] if each["role"] == "tool" else each["tool_calls"][0]["id"] for each in found]
    assert told == ["1", "a", "2", "b", "3", "a", "4", "1"]


def test_turns_are_joined_once() -> None:
    """Each text of 4 KB is copied once or twice: to copy what is there with each took minutes."""
    text = "x" * 4096
    turns = [{"role": "user", "content": text}] * MOST_ENTRIES
    (told,) = next(plainer(turns))
    assert told["content"] == "\n\n".join([text] * MOST_ENTRIES)
    assert turns[0]["content"] == text, "what was given stays as it was"


@pytest.mark.parametrize("quick_values", [0, bodies._QUICK_VALUES])
def test_a_long_body_means_what_a_short_one_does(quick_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_QUICK_VALUES", quick_values)
    for value in ([1, -2.5, True, None, "\u00e9\n", {"a": [], "b": {}}], {"x": [[1], [1]], "y": "\U0001f600"}, 1, "x"):
        text = json.dumps(value)
        assert bodies._decoded(text) == json.loads(text)
    for wrong in ("[1,", '{"a" 1}', "[1 2]", "[1]x", '["a', "", "[1,]", '{"a":1,}', "[NaN"):
        with pytest.raises(json.JSONDecodeError) as expected:
            json.loads(wrong)
        with pytest.raises(json.JSONDecodeError) as found:
            bodies._decoded(wrong)
        assert (found.value.msg, found.value.pos) == (expected.value.msg, expected.value.pos)
    read_by_3_13 = b"[" * 2_000 + rb'"\ud83d\ude00"' + b"]" * 2_000
    for deep in (b"[" * 20_000, read_by_3_13):
        with pytest.raises(ApiError, match="nested too deeply"):
            bodies.read_body(deep, ChatRequest)


def test_no_work_on_a_long_body_is_done_in_the_event_loop(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[str, set[str]] = {}

    def watch(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            ran.setdefault(name, set()).add(threading.current_thread().name)
            return work(*given, **named)

        monkeypatch.setattr(owner, name, watched)

    watch(bodies, "read_body")
    watch(bodies, "_decoded")
    watch(Tokenizer, "chat")
    watch(Tokenizer, "encode")
    watch(Conversation, "_templated")
    watch(Conversation, "_urls")
    watch(server_tools, "Counter")  # that names are counted by
    watch(Front, "_reasoned")
    watch(Front, "_prepared")
    watch(ChatRequest, "sampling")
    said = [{"role": "user", "content": "x"}]
    more = {"metadata": {"a": "x" * 5000}, "temperature": 0}
    function = {"name": "f", "parameters": {"type": "object"}}
    chat = {"messages": said, "max_tokens": 2}
    for path, body in (
        ("chat/completions", chat | {"tools": [{"type": "function", "function": function}]}),
        ("responses", {"input": "x", "max_output_tokens": 2, "tools": [{"type": "function", **function}]}),
        ("messages", chat),
        ("completions", {"prompt": "x", "max_tokens": 2}),
    ):
        status, _, told = post(running.url, body | more, f"/v1/{path}")
        assert status == 200, told
    assert len(ran) == 10
    for name, threads in ran.items():
        assert all(each.startswith("truedraft-bodies") for each in threads), (name, threads)


def test_one_client_takes_few_of_the_threads(
    make_engine: Callable[..., Engine], template_file: Any, tmp_path: Any
) -> None:
    """What many long bodies of one client take holds nobody else up."""
    file = tmp_path / "keys"
    file.write_text("a secret-a\nb secret-b\n")
    begun, continues = itertools.count(), threading.Event()
    with (
        serving(make_engine(), chat_template=template_file, api_key_file=file) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        chat = Tokenizer.chat

        def slow(self: Tokenizer, messages: Any, **how: Any) -> list[int]:
            if "slow" in messages[0]["content"]:
                next(begun)
                continues.wait(60)
            return chat(self, messages, **how)

        patch.setattr(Tokenizer, "chat", slow)

        def ask(word: str, key: str) -> int:
            body = {"messages": [{"role": "user", "content": word}], "max_tokens": 1, "metadata": {"a": "x" * 5000}}
            return post(running.url, body, "/v1/chat/completions", Authorization=f"Bearer {key}")[0]

        threads = [threading.Thread(target=ask, args=("slow", "secret-a")) for _ in range(12)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: repr(begun) == "count(2)")
            assert ask("quick", "secret-b") == 200
            assert repr(begun) == "count(2)", "the others of that client wait"
        finally:
            continues.set()
            for thread in threads:
                thread.join(60)
