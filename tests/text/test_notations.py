"""Calls of functions in what a model writes: read the same whatever parts it comes in."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from support.embedded_models import embedded
from truedraft.errors import OptionError
from truedraft.text.answers import AnswerReader
from truedraft.text.calls import CallDelta, Reasoning
from truedraft.text.notations import Notation, Parameters, notation_of

TAGS = notation_of("")
MISTRAL = notation_of("[TOOL_CALLS]")
BARE = notation_of('{% if tools %} {"name": function name, "parameters": dictionary} {% endif %}')


def read(notation: Notation, parts: list[str], **options: bool) -> tuple[str, list[tuple[str, str]], list[str]]:
    """The text, the calls, and the order in which they came."""
    reader = AnswerReader(notation, {"f": None, "g": None}, **options)
    text, order = "", list[str]()
    told, ids = dict[int, str](), list[str]()
    for number, part in enumerate(parts):
        for found in reader.push(part, last=number == len(parts) - 1):
            if isinstance(found, CallDelta):
                assert found.begins == (found.index not in told)
                ids += [found.call.id] if found.begins else []
                told[found.index] = told.get(found.index, "") + found.arguments
                kind = f"call {found.index}"
            else:
                assert not isinstance(found, Reasoning)
                text += found
                kind = "text"
            order += [kind] if order[-1:] != [kind] else []
    assert [told[index] for index in sorted(told)] == [call.arguments for call in reader.calls]
    assert ids == [call.id for call in reader.calls]
    return text, [(call.name, call.arguments) for call in reader.calls], order


ONE = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
CASES = {
    "text alone": (TAGS, "No < call > here", "No < call > here", []),
    "space alone": (TAGS, " \n", " \n", []),
    "a call": (TAGS, ONE, "", [("f", '{"x": 1}')]),
    "text before": (TAGS, "Look:\n" + ONE, "Look:\n", [("f", '{"x": 1}')]),
    "text behind": (TAGS, ONE + "\nDone.", "\nDone.", [("f", '{"x": 1}')]),
    "two": (TAGS, f"{ONE}\n{ONE}\n", "", [("f", '{"x": 1}')] * 2),
    "no arguments": (TAGS, '<tool_call>{"name": "g"}</tool_call>', "", [("g", "{}")]),
    "arguments first": (TAGS, '<tool_call>{"arguments": {"a": []}, "name": "g"}</tool_call>', "", [("g", '{"a": []}')]),
    "arguments of another notation": (TAGS, ONE.replace("arguments", "parameters"), "", [("f", '{"x": 1}')]),
    "arguments twice": (TAGS, ONE.replace("}}", '}, "parameters": {"y": 2}}'), "", [("f", '{"x": 1}')]),
    "an object in a text": (TAGS, ONE.replace('{"x": 1}', r'"{\"x\": 1}"'), "", [("f", '{"x": 1}')]),
    "a text": (TAGS, (cut := ONE.replace('{"x": 1}', r'"{\"x"')) + ONE, cut, [("f", '{"x": 1}')]),  # and no object
    "an id behind": (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]',
        "",
        [("f", '{"x": 1}')],
    ),
    "a name nobody knows": (TAGS, '<tool_call>{"name": "h", "arguments": {}}</tool_call>', "", [("h", "{}")]),
    "quotes": (
        TAGS,
        '<tool_call>{"name": "f", "arguments": {"s": "a\\"}b</tool_call>\\\\"}}</tool_call>',
        "",
        [("f", '{"s": "a\\"}b</tool_call>\\\\"}')],
    ),
    "no call behind a tag": (TAGS, f"<tool_call> is a tag. {ONE}", "<tool_call> is a tag. ", [("f", '{"x": 1}')]),
    "an object that is no call": (TAGS, '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    "cut in the arguments": (
        TAGS,
        '<tool_call>\n{"name": "f", "arguments": {"x": [1, "}',
        '<tool_call>\n{"name": "f", "arguments": {"x": [1, "}',
        [],
    ),
    "cut before its name": (TAGS, 'So: <tool_call>\n{"na', 'So: <tool_call>\n{"na', []),
    "cut behind a call": (TAGS, ONE + '\n<tool_call>\n{"na', '\n<tool_call>\n{"na', [("f", '{"x": 1}')]),
    "its last brace is missing": (TAGS, ONE.replace("}}", "}") + ONE, "", [("f", '{"x": 1}')] * 2),
    "cut in a tag": (TAGS, "See <tool_c", "See <tool_c", []),
    "cut in the tag behind": (TAGS, ONE[:-3], "", [("f", '{"x": 1}')]),
    "no tag behind": (TAGS, '<tool_call>{"name": "f", "arguments": {}} so', " so", [("f", "{}")]),
    "bare": (BARE, ' {"name": "f", "parameters": {"x": {}}} ', "", [("f", '{"x": {}}')]),
    "bare, of another notation": (BARE, '{"name": "f", "arguments": {"x": {}}}', "", [("f", '{"x": {}}')]),
    "bare, of no function": (BARE, ' {"name": "h", "parameters": {}}', ' {"name": "h", "parameters": {}}', []),
    "bare, behind text": (BARE, 'So {"name": "f"}', 'So {"name": "f"}', []),
    "bare, cut": (BARE, '{"nam', '{"nam', []),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_are_read_alike_whatever_parts_they_come_in(name: str) -> None:
    use, answer, text, calls = CASES[name]
    whole = read(use, [answer])
    assert whole[:2] == (text, calls)
    assert read(use, list(answer))[:2] == (text, calls)
    assert read(use, [*answer, ""])[:2] == (text, calls)
    chance = random.Random(name)
    for _ in range(30):
        cuts = sorted(chance.sample(range(len(answer) + 1), min(4, len(answer))))
        parts = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        assert read(use, parts) == whole, parts


def test_text_and_calls_come_in_order() -> None:
    assert read(TAGS, [f"One {ONE} two {ONE} three"])[2] == ["text", "call 0", "text", "call 1", "text"]


def test_one_call_where_there_may_be_one() -> None:
    text, calls, _ = read(TAGS, list(f"{ONE}\n{ONE}"), parallel=False)
    assert calls == [("f", '{"x": 1}')] and text == f"\n{ONE}"


@pytest.mark.parametrize(("known", "parallel", "calls"), [("", True, 0), ("f", False, 1), ("f", True, 2)])
def test_channels_hold_no_more_calls_than_there_may_be(known: str, parallel: bool, calls: int) -> None:
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|end|><|start|>assistant"
    for size in (1, 300):
        reader = AnswerReader(notation_of("<|channel|> to= functions."), dict.fromkeys(known), parallel=parallel)
        parts = [f"{call}{call}"[place : place + size] for place in range(0, 2 * len(call), size)]
        found = [part for piece in parts for part in reader.push(piece)] + reader.push("", last=True)
        assert len(reader.calls) == calls and not [part for part in found if isinstance(part, str)]
        assert "".join(part.text for part in found if isinstance(part, Reasoning)).count("{}") == 2 - calls


def test_long_arguments_are_read_once() -> None:
    parts = ['<tool_call>{"name": "f", "arguments": {"s": "', *["x" * 10] * 20_000, '"}}</tool_call>']
    ((_, arguments),) = read(TAGS, parts)[1]
    assert len(json.loads(arguments)["s"]) == 200_000


def test_a_grammar_holds_what_schemas_say_of_the_whole_document() -> None:
    pytest.importorskip("llguidance")
    from truedraft import Engine, SamplingParams

    parameters = {"type": "object", "properties": {"kind": {"$ref": "#/$defs/Kind"}}, "required": ["kind"]}
    kinds = {"additionalProperties": False, "$defs": {"Kind": {"enum": ["list", "dict"]}}}
    form = TAGS.grammar({"f": parameters | kinds}, parallel=False)
    answer = Engine(embedded()).generate("x", SamplingParams(max_tokens=60, structured=form))
    ((name, arguments),) = read(TAGS, [answer.text or ""])[1]
    assert answer.finish_reason == "stop" and name == "f" and json.loads(arguments)["kind"] in ("list", "dict")
    assert (answer.text or "").count("\n") == 2, "one line between the tags"


THINKS = notation_of("<tool_call> <think> </think>")


@pytest.mark.parametrize(
    ("answer", "opened", "reasoning", "text", "calls"),
    [
        ("<think>\nSo it is.\n\nYes\n</think>\n\nDone.", False, "So it is.\n\nYes", "Done.", 0),
        ("So.\n</think>\n\n" + ONE, True, "So.", "", 1),
        ("<think>So</think>Text", True, "So", "Text", 0),
        ("never closed <tool_call> ", True, "never closed <tool_call>", "", 0),
        ("<think>\n</think>\n", False, "", "", 0),
        ("Of <think> tags", False, "", "Of <think> tags", 0),
        (" <thi", False, "", " <thi", 0),
        ("cut in its </thi", True, "cut in its </thi", "", 0),
    ],
)
def test_reasoning_is_told_apart(answer: str, opened: bool, reasoning: str, text: str, calls: int) -> None:
    for size in (1, 3, len(answer)):
        reader = AnswerReader(THINKS, {"f": None}, reasoning_open=opened)
        parts = [answer[place : place + size] for place in range(0, len(answer), size)]
        found = [part for piece in parts for part in reader.push(piece)] + reader.push("", last=True)
        assert "".join(part.text for part in found if isinstance(part, Reasoning)) == reasoning
        assert "".join(part for part in found if isinstance(part, str)) == text
        assert len(reader.calls) == calls


def test_no_more_of_a_form_is_made_than_may_be() -> None:
    notation = notation_of("<tool_call> <function= <parameter=")
    assert isinstance(notation.body, Parameters)
    made, rules = list[str](), notation.body.rules
    schema = {"properties": {f"p{number}": {"type": "integer"} for number in range(1000)}}
    schema |= {"$defs": {"x": {"title": "t" * 9000}}}

    class Counted:
        def rules(self, *given: Any) -> Iterator[str]:
            for line in rules(*given):
                made.append(line)
                yield line

    with pytest.raises(OptionError, match=r"^tools make a form of more than 65536 characters"):
        replace(notation, body=Counted()).grammar({"f": schema}, parallel=False)
    assert sum(map(len, made)) < 100_000
