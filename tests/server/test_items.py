"""Texts of custom tools, read from arguments that come in parts."""

from __future__ import annotations

import itertools
import json

import pytest

from truedraft.server.conversations import FunctionFields, NamedFunction, ToolUse, called
from truedraft.server.errors import ApiError
from truedraft.server.items import Callable, TextReader, Toolbox, flat_name
from truedraft.server.messages import _object
from truedraft.text.notations import NOTATIONS

TEXTS = ("", "a", 'say "x"\n\\n', "caf\u00e9 \U0001f600!", "\u2028}", "*** Begin Patch\n+x\n*** End Patch")


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_the_same_in_whatever_parts_its_arguments_come(text: str) -> None:
    for ascii_alone, most in itertools.product((True, False), (1, 2, 5, 100)):
        arguments = json.dumps({"input": text}, ensure_ascii=ascii_alone)
        reader = TextReader()
        parts = [reader.push(arguments[place : place + most]) for place in range(0, len(arguments), most)]
        assert "".join(parts) == reader.text == text, "all of it is told before the end"
        assert reader.finish(arguments) == "" and reader.text == text
        for part in parts:
            part.encode()  # no half of a character


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x"}', "x"),
        ('{"input": "x", "n": 1}', "x"),
        ("no object", "no object"),
        ('{"input": "cut off\\', "cut off"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "half \\ud800"}', "half ?"),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_what_a_model_wrote_amiss_is_told_as_it_is(arguments: str, text: str) -> None:
    reader = TextReader()
    told = reader.push(arguments)
    assert told + reader.finish(arguments) == reader.text == text


@pytest.mark.parametrize("text", ["[" * 100_000, '{"x": NaN}', '{"x": 1e999}', '{"x": ' + "1" * 5000 + "}", "[1]", ""])
def test_arguments_that_are_no_object_to_send(text: str) -> None:
    assert called("x", "f", text)["function"]["arguments"] == text and _object(text) == {}


def test_arguments_with_half_a_character() -> None:
    assert _object('{"x\\udfff": "\\ud83d\\ude00 \\ud800"}') == {"x?": "\U0001f600 ?"}


def test_a_choice_means_the_plain_function_before_one_of_its_name_in_a_namespace() -> None:
    names = [flat_name(namespace, "read") for namespace in (None, "files", "mcp__files__")]
    assert names == ["read", "files__read", "mcp__files__read"]
    read = FunctionFields(name="read")
    toolbox = Toolbox(
        {"files__read": Callable(read, "read", "files", False), "read": Callable(read, "read", None, False)}
    )
    assert [toolbox._named(name) for name in ("read", "files__read", "x")] == [["read"], ["files__read"], []]
    del toolbox.callables["read"]
    assert toolbox._named("read") == ["files__read"]


def test_errors_tell_the_beginning_of_long_names() -> None:
    tools = [FunctionFields(name="x" * 100_000)]
    for listed, choice in ((tools * 2, None), (tools, NamedFunction(name="y" * 100_000))):
        with pytest.raises(ApiError) as refused:
            ToolUse.of(listed, choice, None, NOTATIONS[0])
        assert "xxxx..." in refused.value.message and len(refused.value.message) < 250
