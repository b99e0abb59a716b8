"""JSON Schema in the words of llguidance: it means the same, and where it cannot be had the place is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from truedraft.core.params import Structured
from truedraft.errors import OptionError
from truedraft.models.embedded import embedded_folder
from truedraft.text import schemas
from truedraft.text.forms import Forms
from truedraft.text.notations import notation_of
from truedraft.text.schemas import map_schemas, misfit, problem_of, simplified, unheld
from truedraft.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")

KIND = {"type": "object", "required": ["kind"], "additionalProperties": False}
CAT = KIND | {"properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}}
DOG = KIND | {"properties": {"kind": {"enum": ["dog", "puppy"]}, "name": {"type": "string"}}}
LISTS = {"type": "array", "items": {"type": "integer"}}
NAMED = {"type": "object", "additionalProperties": {"type": "integer"}}

MEANS: dict[str, tuple[Any, list[str], list[str]]] = {
    "an unknown format": ({"type": "string", "format": "color"}, ['"red"'], ["7"]),
    "a known format": ({"type": "string", "format": "ipv4"}, ['"1.2.3.4"'], ['"red"']),
    "a property called format": (
        {"type": "object", "properties": {"format": {"type": "string", "format": "binary"}}, "required": ["format"]},
        ['{"format": "x"}'],
        ['{"format": 7}', "{}"],
    ),
    "a format among values": ({"enum": [{"format": "color"}]}, ['{"format": "color"}'], ["{}"]),
    "uniqueItems that say nothing": (LISTS | {"uniqueItems": False}, ["[1, 1]"], ['["a"]']),
    "uniqueItems of one": (LISTS | {"uniqueItems": True, "maxItems": 1}, ["[1]", "[]"], ["[1, 1]"]),
    "propertyNames of any text": (NAMED | {"propertyNames": {"type": "string", "title": "t"}}, ['{"b": 7}'], ["[]"]),
    "propertyNames by pattern": (
        NAMED | {"propertyNames": {"pattern": "^a+$"}},
        ['{"aa": 7}'],
        ['{"b": 7}', '{"a": ""}'],
    ),
    "propertyNames by choice": (NAMED | {"propertyNames": {"enum": ["a", "b"]}}, ['{"b": 7}', "{}"], ['{"c": 7}']),
    "not of a type": ({"not": {"type": ["null", "number"]}}, ['"a"', "{}", "true"], ["null", "7", "7.5"]),
    "not of one of its types": ({"type": ["string", "null"], "not": {"type": "null"}}, ['"a"'], ["null"]),
    "not of nothing": ({"type": "integer", "not": False}, ["7"], ['"a"']),
    "a property that is never there": (
        {"type": "object", "properties": {"a": {"not": {}}, "b": {"const": 1}}, "additionalProperties": False},
        ['{"b": 1}', "{}"],
        ['{"a": 1}'],
    ),
    "oneOf told apart by a constant": ({"oneOf": [CAT, DOG]}, ['{"kind": "puppy"}'], ['{"kind": "cow"}']),
    "oneOf of references": (
        {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG}},
        ['{"kind": "cat", "lives": 9}'],
        ['{"kind": "dog", "lives": 9}'],
    ),
    "oneOf of values": ({"oneOf": [{"enum": [1, 2]}, {"const": 3}]}, ["1", "3"], ["4"]),
    "oneOf of types": ({"oneOf": [{"type": "string"}, {"type": ["integer", "null"]}]}, ['"a"', "7", "null"], ["[]"]),
}
"""A schema, what it allows, and what it does not."""

REFUSED: dict[str, tuple[Any, str]] = {
    "uniqueItems": ({"properties": {"tags": LISTS | {"uniqueItems": True}}}, 'at #/properties/tags: "uniqueItems"'),
    "not": ({"anyOf": [{}, {"type": "string", "not": {"const": "a"}}]}, 'at #/anyOf/1: "not"'),
    "not an integer": ({"type": "number", "not": {"type": "integer"}}, 'at #: "not"'),
    "propertyNames beside names": (
        {"items": {"properties": {"a/b": {}}, "propertyNames": {"pattern": "^a"}}},
        'at #/items: "propertyNames"',
    ),
    "in a definition": (
        {"$ref": "#/$defs/x", "$defs": {"x": {"items": {"contains": {"const": 1}}}}},
        'at #/$defs/x/items: "contains"',
    ),
    "a name with a slash": ({"properties": {"a/b~": {"not": {"const": 1}}}}, "at #/properties/a~1b~0"),
    "oneOf that overlaps": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "an answer might match two branches"),
    "oneOf that overlaps by a missing type": (
        {"oneOf": [{"properties": {"k": {"const": key}}, "required": ["k"]} for key in "ab"]},
        "an answer might match two branches",
    ),
    "a reference to itself": ({"$ref": "#"}, "a reference leads to itself alone"),
    "an expression": ({"items": {"pattern": "("}}, "at #/items: the expression (: unclosed group"),
    "an expression that looks ahead": ({"pattern": "^(?=a)b$"}, "look-ahead and look-behind, is not supported"),
    "a schema of schemas": ({"$schema": "http://zzz/"}, "'http://zzz/' is not known here, and nothing is fetched"),
    "oneOf of a true and a 1": ({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0, 3]}]}, "might match two branches"),
}


def _of_itself(width: int) -> Any:
    each = {"$ref": "#/$defs/a"}
    properties = {f"p{number}": each for number in range(width)}
    loop = {"type": "object", "required": list(properties), "properties": properties}
    return {"oneOf": [each, each], "$defs": {"a": loop}}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (_of_itself(5), "oneOf"),
        ({"oneOf": [{"const": number} for number in range(3000)]}, "anyOf"),
        ({"oneOf": [{"const": 0}, *({"const": number} for number in range(3000))]}, "oneOf"),
        ({"oneOf": [{"const": 1}, {"type": "string"}, *({"const": number} for number in range(2, 99))]}, "oneOf"),
        ({"oneOf": [{"type": "string"}, *({"type": "integer", "const": number} for number in range(99))]}, "anyOf"),
    ],
)
def test_branches_are_told_apart_in_few_steps(schema: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, differ = list[int](), schemas._Exclusions._differ

    def counted(self: Any, *given: Any) -> bool:
        pairs.append(1)
        assert len(pairs) <= 20_000, "no bound"
        return differ(self, *given)

    monkeypatch.setattr(schemas._Exclusions, "_differ", counted)
    assert told in simplified(schema)


@pytest.fixture(scope="module")
def forms() -> Forms:
    tokenizer = Tokenizer.load(str(embedded_folder("target")))
    assert tokenizer is not None
    return Forms(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


def matches(forms: Forms, schema: Any, text: str) -> bool:
    ids = [*forms._tokenizer.plain_ids(text), forms._tokenizer.eos_token_ids[0]]
    return forms.start(Structured("json_schema", schema), [0], 1).legal(ids) == len(ids)


@pytest.mark.parametrize("name", MEANS)
def test_what_the_library_does_not_know_is_said_otherwise(forms: Forms, name: str) -> None:
    schema, allowed, refused = MEANS[name]
    assert [matches(forms, schema, text) for text in allowed] == [True] * len(allowed)
    assert [matches(forms, schema, text) for text in refused] == [False] * len(refused)


def test_what_cannot_be_said_is_refused_by_its_place(forms: Forms) -> None:
    for name in REFUSED:
        schema, told = REFUSED[name]
        with pytest.raises(OptionError, match="structured cannot be read") as refused:
            forms.prepare(Structured("json_schema", schema))
        assert told in str(refused.value) and "\n" not in str(refused.value)


def test_oneOf_that_overlaps_is_anyOf_only_where_the_schema_says_so(forms: Forms) -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}}
    assert matches(forms, schema, "7")


def test_schemas_of_a_grammar_are_read_like_any_other(forms: Forms) -> None:
    call = {"type": "object", "properties": {"tags": LISTS | {"uniqueItems": True}}}
    grammar = f'start: "%json {{}}" "//" call\n// function "find"\ncall: %json {json.dumps(call, indent=1)}\n'
    with pytest.raises(OptionError) as refused:
        forms.prepare(Structured("grammar", grammar))
    assert 'function "find" at #/properties/tags: "uniqueItems"' in str(refused.value)
    tools = {"find": {"properties": {"x": LISTS | {"uniqueItems": True}}}, "see": {"properties": {"y": LISTS}}}
    with pytest.raises(OptionError, match='function "find" at #/properties/x: "uniqueItems"'):
        forms.prepare(notation_of("<tool_call> arguments").grammar(tools, parallel=True))
    seen: list[tuple[Any, str]] = []
    assert map_schemas(grammar, lambda schema, comment: seen.append((schema, comment)) or {}).endswith(
        "call: %json {}\n"
    )
    assert seen == [(call, 'function "find"')]


def test_what_is_fine_stays_and_is_found_fine() -> None:
    for schema in (CAT, DOG, LISTS, True, {"$ref": "#"}):
        assert simplified(schema) == schema and (schema == {"$ref": "#"} or problem_of(schema) == "")
    assert simplified({"title": "t", "properties": {"title": {"description": "d"}}}) == {"properties": {"title": {}}}


def test_what_no_form_holds_is_told_of_right_schemas_alone() -> None:
    pytest.importorskip("jsonschema_rs")
    denied = {"type": "object", "properties": {"id": {"not": {"const": ""}}}}
    assert unheld(denied) == 'at #/properties/id: "not" cannot be held to by a mask over tokens; leave it out'
    for elsewhere in ("urn:x", "http://127.0.0.1:9/schema.json"):  # is not asked
        assert unheld(denied | {"$schema": elsewhere}) == "" == unheld(denied | {"$ref": elsewhere})
    assert unheld(CAT) == "" == unheld({"type": "objct", "not": {"const": ""}}) == unheld(denied | {"$schema": 7})


def test_a_text_is_checked_against_a_schema() -> None:
    pytest.importorskip("jsonschema_rs")
    schema = {"$defs": {"id": {"type": "string", "not": {"const": ""}}}, "properties": {"id": {"$ref": "#/$defs/id"}}}
    assert misfit(schema, {"id": "a"}) == "" == misfit(schema, {})
    assert misfit(schema, {"id": ""}) == 'at #/id: {"const":""} is not allowed for ""'


HALF = {"$defs": {f"{n}": {"allOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(40)} | {"40": {"not": {}}}}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {"x": {"$ref": "#"}}}, "leads to itself"),
        ({"properties": {"x": {"$dynamicRef": "#"}}}, "leads to itself"),
        (HALF | {"$ref": "#/$defs/0"}, "too large"),  # 2 ** 40 places
        ({"anyOf": [{"const": n} for n in range(20_000)]}, "too large"),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "nothing is fetched"),
        ({"$ref": "file:///etc/hostname"}, "nothing is fetched"),
        ({"$schema": "urn:x"}, "meta-schema"),
        ({"properties": {"x": {"pattern": "(?=a)b"}}}, "regex"),
    ],
)
def test_a_schema_that_is_not_checked_says_why(schema: dict[str, Any], why: str) -> None:
    pytest.importorskip("jsonschema_rs")
    with pytest.raises(ValueError, match=why):
        misfit(schema, {"x": 1})


def test_expressions_take_linear_time() -> None:
    pytest.importorskip("jsonschema_rs")
    schema = {"properties": {"x": {"pattern": "^(a+)+$"}}}
    assert "does not match" in misfit(schema, {"x": "a" * 60 + "b"}), "not in 2 ** 60 steps"
