"""Calls and reasoning in the notation of each family, by its real chat template: recognised, read, forced."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.byte_tokenizers import byte_tokenizer
from truedraft.text.answers import AnswerReader
from truedraft.text.calls import CallDelta, Reasoning, words_of
from truedraft.text.forms import Forms
from truedraft.text.notations import NOTATIONS, Notation, Parameters, notation_of
from truedraft.text.schemas import types_of
from truedraft.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Family:
    """What a template shows."""

    template: str  # name of its file
    notation: str
    header: str  # what it writes before an assistant's turn with calls
    end: str  # what it writes behind that
    thinks: str | None = None  # the mark before its reasoning
    several: bool = True  # whether it takes several calls in a turn


IM = "<|im_start|>assistant\n", "<|im_end|>\n"
SENTENCE, ROLE = "<｜end▁of▁sentence｜>", "<|start_header_id|>"
FAMILIES = [
    Family("Qwen-Qwen2.5-7B-Instruct", "hermes", *IM),
    Family("Qwen-Qwen3-0.6B", "hermes", *IM, "<think>"),
    Family("Qwen-QwQ-32B", "hermes", *IM, "<think>"),
    Family("Qwen3-Coder", "qwen3-coder", *IM),
    Family("Qwen3.5-4B", "qwen3-coder", *IM, "<think>"),
    Family("GLM-4.6", "glm-4.5", "<|assistant|>", "", "<think>"),
    Family("GLM-4.7-Flash", "glm-4.7", "<|assistant|></think>", "", "<think>"),
    Family("mistralai-Mistral-Nemo-Instruct-2407", "mistral", "", "</s>"),
    Family("Mistral-Small-3.2-24B-Instruct-2506", "mistral-call-id", "", "</s>"),
    Family("unsloth-mistral-Devstral-Small-2507", "mistral-args", "", "</s>"),
    Family("mistralai-Ministral-3-14B-Reasoning-2512", "mistral-args", "", "</s>", "[THINK]"),
    Family("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-v3", "<｜Assistant｜>", SENTENCE, "<think>"),
    Family("deepseek-ai-DeepSeek-V3.1", "deepseek-v3.1", "<｜Assistant｜><think></think>", SENTENCE, "<think>"),
    Family("moonshotai-Kimi-K2", "kimi-k2", "<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
    Family("ByteDance-Seed-OSS", "seed-oss", "<seed:bos>assistant\n", "<seed:eos>", "<seed:think>"),
    Family("openai-gpt-oss-120b", "gpt-oss", "<|start|>assistant", "<|call|>", "<|channel|>analysis<|message|>", False),
    Family("minimal-llama-3.1", "llama", f"{ROLE}assistant<|end_header_id|>\n\n", "<|eot_id|>", several=False),
]

PARAMETERS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"$ref": "#/$defs/Where"},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city", "days"],
        "$defs": {"Where": {"type": "object", "properties": {"at": {"type": "array"}}}},
    },
    "note": {"type": "object", "properties": {"text": {"type": "string"}, "kept": {"type": "boolean"}}},
}
CALLS = [
    ("weather", {"city": 'Zürich "old"\nand <new>', "days": 3, "where": {"at": [1.5, "x", None]}, "unit": "C"}),
    ("note", {"text": "  7 ", "kept": True}),
]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]


def template_of(family: Family) -> str:
    return (TEMPLATES / f"{family.template}.jinja").read_text()


def known(family: Family) -> tuple[Notation, Tokenizer]:
    template = template_of(family)
    made = byte_tokenizer(notation_of(template).marks)
    return notation_of(template, made.whole_tokens), made


def rendered(family: Family, calls: list[tuple[str, Any]]) -> str:
    """The assistant's turn, as the template writes it into a history."""
    template, (_, made) = template_of(family), known(family)
    records = [
        {"id": f"abcdefgh{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    asked = [{"role": "user", "content": "Do it."}]
    turn = {"role": "assistant", "content": "", "tool_calls": records}
    how: dict[str, Any] = {"tools": TOOLS, "chat_template": template, "tokenize": False}
    before = str(made.backend.apply_chat_template(asked, **how))
    whole = str(made.backend.apply_chat_template([*asked, turn], **how))
    place = whole.rindex("Do it.") + len("Do it.")
    place = whole.index(family.header, place) + len(family.header) if family.header else len(before)
    text = whole[place:]
    return text.partition(family.end)[0] if family.end else text


def read(family: Family, answer: str, size: int, **options: bool) -> tuple[str, str, list[tuple[str, Any]]]:
    """Text, reasoning and calls of an answer that comes in parts of so many characters."""
    reader = AnswerReader(known(family)[0], PARAMETERS, **options)
    parts = [answer[place : place + size] for place in range(0, len(answer), size)]
    found = [part for piece in parts for part in reader.push(piece)] + reader.push("", last=True)
    told: dict[int, str] = {}
    for part in found:
        if isinstance(part, CallDelta):
            told[part.index] = told.get(part.index, "") + part.arguments
    assert [told[index] for index in sorted(told)] == [call.arguments for call in reader.calls]
    text = "".join(part for part in found if isinstance(part, str))
    reasoning = "".join(part.text for part in found if isinstance(part, Reasoning))
    return text, reasoning, [(call.name, json.loads(call.arguments)) for call in reader.calls]


def accepts(made: Tokenizer, grammar: str, text: str) -> bool:
    """Whether a grammar allows a text to its end."""
    llguidance = pytest.importorskip("llguidance")
    from llguidance.hf import from_tokenizer

    guide = from_tokenizer(made.backend, eos_token=made.eos_token_ids[0])
    matcher = llguidance.LLMatcher(guide, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(made.plain_ids(text))
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def test_every_notation_has_its_template() -> None:
    assert {family.notation for family in FAMILIES} == {notation.name for notation in NOTATIONS}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.template)
def test_a_family(family: Family) -> None:
    notation, made = known(family)
    named = {"note": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}}
    assert notation.name == family.notation
    assert (notation.reasoning.opening if notation.reasoning is not None else None) == family.thinks
    calls_of_all = CALLS
    if family.notation == "seed-oss":  # its template writes objects in Python's notation, which no grammar asks for
        calls_of_all = [(name, {key: each for key, each in given.items() if key != "where"}) for name, given in CALLS]
    for calls in [calls_of_all] if family.several else [calls_of_all[:1], calls_of_all[1:]]:
        answer = rendered(family, calls)
        for size in (1, 3, len(answer)):
            text, reasoning, found = read(family, answer, size)
            assert (text.strip(), reasoning, found) == ("", "", calls), answer
        forced = answer.rpartition("</think>")[2].lstrip()
        if family.notation == "gpt-oss":
            forced = " " + forced
        grammar = notation.grammar(PARAMETERS, parallel=True).value
        assert accepts(made, grammar, forced.rstrip()), (grammar, forced)
        assert not accepts(made, grammar, forced.replace(calls[0][0], "other", 1))
        assert not accepts(made, grammar, forced + "more")
    drafted = Forms(made, made.vocab_size, made.eos_token_ids).start(notation.grammar(named, parallel=False), [0], 1)
    beginning = made.shown_text(drafted.forced())
    assert "note" in beginning or family.notation == "gpt-oss", "whose models write the head of a call in two ways"


APART = [family for family in FAMILIES if isinstance(known(family)[0].body, Parameters)]


@pytest.mark.parametrize("family", APART, ids=lambda family: family.template)
def test_a_missing_mark_costs_no_argument(family: Family) -> None:
    notation, body = known(family)[0], known(family)[0].body
    assert isinstance(body, Parameters)
    answer = rendered(family, CALLS[1:] * 2)
    for mark in (body.closing.rstrip(), *words_of(notation.closing)[:-1]):
        for place in re.finditer(re.escape(mark), answer):
            slip = answer[: place.start()] + answer[place.end() :] + "Done."
            for size in (1, 3, len(slip)):
                text, _, calls = read(family, slip, size)
                assert (text.strip(), calls) == ("Done.", CALLS[1:] * 2), slip
    said = f"Within a line {body.opening}x and {' '.join(words_of(notation.closing))} are text."
    if "\n" in body.closing:
        assert read(family, rendered(family, [("note", {"text": said})]), 1)[2] == [("note", {"text": said})]


DAMAGES: dict[str, Callable[[str], str]] = {
    "cut in a key": lambda call: call[: call.index("text") + 2],
    "cut in a value": lambda call: call[: call.index("Hello") + 3],
    "without the last brace": lambda call: "".join(call.rsplit("}", 1)),
    "with a raw line end": lambda call: call.replace("Hello", "Hel\nlo"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("notation", NOTATIONS, ids=lambda notation: notation.name)
def test_a_broken_call_leaves_those_behind_it(notation: Notation, damage: Callable[[str], str]) -> None:
    begin = "" if notation.bare else notation.begin
    first, second = (notation.written([(name, {"text": "Hello"})]) for name in ("note", "weather"))
    first, second = (each.removeprefix(begin).removesuffix(notation.end) for each in (first, second))
    answer = begin + damage(first) + notation.separator + second + notation.end
    if notation.channels:
        answer = begin + damage(first) + "<|call|><|start|>assistant" + second + "<|call|>"
    found = []
    for parts in ([answer], list(answer), [answer[place : place + 7] for place in range(0, len(answer), 7)]):
        reader = AnswerReader(notation, PARAMETERS)
        told = [part for piece in parts for part in reader.push(piece)] + reader.push("", last=True)
        text = "".join(part for part in told if isinstance(part, str))
        deltas = [part for part in told if isinstance(part, CallDelta)]
        calls = [(call.name, json.loads(call.arguments)) for call in reader.calls]
        assert [part.call.name for part in deltas if part.begins] == [name for name, _ in calls]
        found.append((text, calls))
    assert all(each == found[0] for each in found), found
    text, calls = found[0]
    assert calls[-1] == ("weather", {"text": "Hello"}), found
    if len(calls) == 1:
        assert damage(first).strip() in text, "nothing of what is no call is lost"
    else:
        assert calls[0][0] == "note" and calls[0][1]["text"].replace("\n", "") == "Hello" and not text.strip()


WORDS = {"$defs": {"Unit": {"enum": ["C", "F"]}, "Temp/Unit": {"$ref": "#/$defs/Unit"}, "Other": {"type": "object"}}}


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"$ref": "#/$defs/Unit"}, ["C", "F"], ["K", "null"]),
        ({"allOf": [{"$ref": "#/$defs/Temp~1Unit"}], "default": "C"}, ["F"], ["K"]),
        ({"const": "C"}, ["C"], ["F"]),
        ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}, ["C", "null"], ["K"]),
        ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "integer"}]}, ["C", "12"], ["K", "1.5"]),
        ({"type": "string", "oneOf": [{"const": "C"}, {"const": "F"}]}, ["F"], ["K"]),
        ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "string"}]}, ["C", "K"], []),
        ({"type": "array", "items": {"$ref": "#/$defs/Temp~1Unit"}}, ['["C"]'], ['["K"]', "C"]),
    ],
)
@pytest.mark.parametrize("family", [APART[0], APART[3]], ids=lambda family: family.template)
def test_forced_arguments_are_values_that_the_schema_lists(
    family: Family, schema: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    notation, made = known(family)
    grammar = notation.grammar({"f": WORDS | {"properties": {"a": schema}}}, parallel=False).value
    assert "Other" not in grammar, "of definitions those alone that are referred to"
    for value in (*allowed, *refused):
        assert accepts(made, grammar, notation.written([("f", {"a": value})])) == (value in allowed), grammar


OF_ITSELF = {
    "type": "object",
    "properties": {
        "name": {"enum": ["bob"]},
        "alias": {"$ref": "#/properties/name"},
        "all": {"type": "array", "items": {"$ref": "#/properties/name"}},
        "inner": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name"],
    "additionalProperties": False,
}
BOB = {"name": "bob"}


WITHOUT_IDS = [family for family in FAMILIES if not known(family)[0].id_pattern]


@pytest.mark.parametrize("family", WITHOUT_IDS, ids=lambda family: family.template)
def test_references_mean_the_schema_of_the_function(family: Family) -> None:
    """And not what its notation puts around that."""
    notation, made = known(family)
    for form in (OF_ITSELF, {"$defs": {"f": OF_ITSELF["properties"]["name"]}, **OF_ITSELF}):
        grammar = notation.grammar({"f": form}, parallel=False).value
        for more in ({"alias": "bob"}, {"all": ["bob"]}, {"inner": BOB}, {"inner": {"name": "bob", "inner": None}}):
            assert accepts(made, grammar, notation.written([("f", {**BOB, **more})])), grammar
        wrong = {"alias": "f"}, {"all": ["f"]}, {"inner": {"name": "f"}}, {"inner": {"name": "f", "arguments": BOB}}
        for more in wrong:
            assert not accepts(made, grammar, notation.written([("f", {**BOB, **more})])), grammar


def test_references_are_followed_once_and_not_without_end() -> None:
    circle = {"$defs": {"A": {"anyOf": [*[{"$ref": "#/$defs/A"}] * 500, {"type": "string"}, {"type": "null"}]}}}
    assert types_of({"$ref": "#/$defs/A"}, circle) == {"string", "null"}
    assert types_of({"anyOf": [{"type": "string"}] * 500}, {}) == {"string"}
    assert types_of({"anyOf": [{"type": "string"}] * 100_000}, {}) == frozenset()


@pytest.mark.parametrize(
    "odd",
    [
        {"properties": {"a": {"type": None}}},
        {"properties": {"a": {"type": 1, "enum": 1, "anyOf": 1}}, "required": True},
        {"properties": {"a": None, "b": {"anyOf": [None, True]}}, "required": [None, []]},
        {"properties": {"a": {"$ref": "#/$defs/A/b"}}, "$defs": {"A": 1}},
        {"properties": 1, "$defs": 1, "x-guidance": "x"},
    ],
)
@pytest.mark.parametrize("notation", NOTATIONS, ids=lambda notation: notation.name)
def test_odd_schemas_are_refused_by_nothing_here(notation: Notation, odd: dict[str, Any]) -> None:
    assert notation.grammar({"f": odd}, parallel=False).kind == "grammar"
    reader = AnswerReader(notation, {"f": odd})
    reader.push(notation.written([("f", {"a": "[" * 20_000})]), last=True)
    assert len(reader.calls) == 1
