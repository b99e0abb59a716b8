"""JSON Schema in llguidance's keywords: it rejects all others, even if they have no effect or an equivalent."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any
from urllib.parse import unquote

from truedraft.errors import first_line

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "propertyNames", "contains", "if", "then", "else")
_ANNOTATIONS = {"title", "description", "$comment", "examples", "default", "deprecated"}
_TYPES = ("null", "boolean", "object", "array", "number", "string")
_KINDS = {"$schema": str, "$id": str, "$anchor": str, "$defs": dict, "definitions": dict, "x-guidance": dict}
"""Keywords with a required type that the library does not check."""
_MOST_PROBING_S = 0.5
_DEEPEST = 8
_MOST_PAIRS = 10_000
_MOST_PLACES = 10_000
_MOST_WORK = 10_000_000
_MOST_OPTIONS = 1000  # schemas visited to find the types of one argument, because each may refer to all
# Tokens of a Lark grammar: strings, expressions, comments, and the directive before a schema.
_SCHEMA = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//(?P<comment>[^\n]*)|(?P<json>%json\s*)')
_DEFINITIONS = ("$defs", "definitions")
# About a whole document: they move to the top of a schema that includes this one.
_OF_THE_DOCUMENT = (*_DEFINITIONS, "$schema", "$id")
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Default JSON layout: on one line, as Python's json.dumps writes it.

If whitespace were allowed anywhere, small models would write it endlessly, and little of an answer would be forced.
"""


def simplified(schema: Any, exclusions: _Exclusions | None = None) -> Any:
    """An equivalent schema without keywords that llguidance rejects needlessly; a `ValueError` for a malformed one.

    Unknown formats are annotations. `oneOf` with exclusive branches becomes `anyOf`; any other is kept, because an
    answer that matches two branches is wrong. `exclusions` are those of the whole schema.
    """
    if not isinstance(schema, dict):
        return schema
    known = _Exclusions(schema) if exclusions is None else exclusions
    for key, kind in _KINDS.items():
        if not isinstance(schema.get(key, kind()), kind):
            raise ValueError(f"{key} must be {'a text' if kind is str else 'an object'}, got {schema[key]!r}")
    said = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    found = with_parts(said, lambda part: simplified(part, known))
    form = found.get("format")
    if isinstance(form, str) and not _supports_format(form):
        del found["format"]
    most = found.get("maxItems")
    holds_one = isinstance(most, int | float) and not isinstance(most, bool) and most <= 1
    if found.get("uniqueItems") is False or holds_one:
        found.pop("uniqueItems", None)
    options = found.get("oneOf")
    if isinstance(options, list) and "anyOf" not in found and known.of(options):
        found = {"anyOf" if key == "oneOf" else key: value for key, value in found.items()}
    _name_properties(found)
    return _without_not(found)


def with_parts(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A schema with `change` applied to each direct subschema."""
    found = schema.copy()
    for (key, *names), part in _parts(schema):
        if not names:
            found[key] = change(part)
            continue
        if found[key] is schema[key]:
            found[key] = schema[key].copy()
        found[key][int(names[0]) if isinstance(found[key], list) else names[0]] = change(part)
    return found


def _parts(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            yield from (((key, name), part) for name, part in value.items())
        elif key in (*_LISTS, "items") and isinstance(value, list):
            yield from (((key, str(number)), part) for number, part in enumerate(value))
        elif key in _SINGLE:
            yield (key,), value


def _name_properties(found: dict[str, Any]) -> None:
    names = found.get("propertyNames")
    if names is True or (
        isinstance(names, dict) and _says(names) <= {"type"} and names.get("type", "string") == "string"
    ):
        del found["propertyNames"]
        return
    if not isinstance(names, dict) or "properties" in found or "patternProperties" in found:
        return
    values, says = found.get("additionalProperties", True), _says(names) - {"type"}
    if names.get("type", "string") != "string" or len(says) != 1:
        return
    if says == {"pattern"}:
        found["patternProperties"] = {names["pattern"]: values}
    elif says <= {"enum", "const"}:
        allowed = names["enum"] if "enum" in says else [names["const"]]
        if not isinstance(allowed, list):
            return
        found["properties"] = {name: values for name in allowed if isinstance(name, str)}
    else:
        return
    found["additionalProperties"] = False
    del found["propertyNames"]


def _without_not(found: dict[str, Any]) -> Any:
    denied = found.get("not")
    if denied is True or denied == {}:
        return False
    if denied is False:
        del found["not"]
    if not isinstance(denied, dict) or _says(denied) != {"type"}:
        return found
    types, own = _types(denied), _types(found) or set(_TYPES)
    if types is None or ("integer" in types and "number" not in types and "number" in own):
        return found
    left = [each for each in own if each not in types and not (each == "integer" and "number" in types)]
    del found["not"]
    return {**found, "type": sorted(left)} if left else False


def _says(schema: dict[str, Any]) -> set[str]:
    return {key for key in schema if key not in _ANNOTATIONS}


def _types(schema: dict[str, Any]) -> set[str] | None:
    given = schema.get("type")
    types = [given] if isinstance(given, str) else given
    return set(types) if isinstance(types, list) and all(isinstance(each, str) for each in types) else None


class _Exclusions:
    """Which parts of a schema exclude each other; after many compared pairs this is always uncertain."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MOST_PAIRS
        self._targets: dict[str, Any] = {}  # of references
        self._known: dict[int, tuple[Any, set[str] | None]] = {}  # values by id() of a part, kept alive here
        self._found: dict[tuple[int, int], bool] = {}  # by id() of two parts; False while being computed

    def of(self, options: list[Any]) -> bool:
        """Whether it is certain that no value matches two of these schemas."""
        options = [self._resolved(each) for each in options]
        known = [self._values(each) if isinstance(each, dict) else None for each in options]
        values = {number: found for number, found in enumerate(known) if found is not None}
        rest, distinct = options, list[Any]()
        if sum(map(len, values.values())) == len(set().union(*values.values())):  # no two of these share a value
            rest = [each for number, each in enumerate(options) if number not in values]
            distinct = [options[number] for number in values]
        return all(
            self._disjoint(one, other, _DEEPEST)
            for number, one in enumerate(rest)
            for other in chain(rest[number + 1 :], distinct)
        )

    def _resolved(self, schema: Any) -> Any:
        """The target of a schema that is only a reference, otherwise the schema."""
        for _ in range(_DEEPEST):
            if not isinstance(schema, dict) or _says(schema) != {"$ref"} or not isinstance(schema["$ref"], str):
                return schema
            name = schema["$ref"]
            if name not in self._targets:
                self._targets[name] = referred(name, self._root)
            schema = self._targets[name]
        return None

    def _values(self, schema: dict[str, Any]) -> set[str] | None:
        """The only values that can match, as text; None if these are not listed, or contain lists or objects."""
        if id(schema) not in self._known:
            given, found = values_of(schema), None
            if given is not None and all(each is None or isinstance(each, str | int | float) for each in given):
                whole = (int(each) if isinstance(each, float) and each.is_integer() else each for each in given)
                found = set(map(json.dumps, whole))
            self._known[id(schema)] = (schema, found)
        return self._known[id(schema)][1]

    def _disjoint(self, one: Any, other: Any, depth: int) -> bool:
        self._left -= 1
        one, other = self._resolved(one), self._resolved(other)
        if not depth or self._left < 0 or not isinstance(one, dict) or not isinstance(other, dict):
            return False
        pair = id(one), id(other)
        if pair not in self._found:
            self._found[pair] = False
            self._found[pair] = self._differ(one, other, depth)
        return self._found[pair]

    def _differ(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        kinds, values = (_types(one), _types(other)), (self._values(one), self._values(other))
        if kinds[0] and kinds[1] and not (_widened(kinds[0]) & _widened(kinds[1])):
            return True
        if values[0] is not None and values[1] is not None:
            return values[0].isdisjoint(values[1])
        if {"object"} not in kinds:
            return False
        required: set[str] = set()
        for each in (one, other):
            names = each.get("required", [])
            required |= {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
        properties = [each["properties"] if isinstance(each.get("properties"), dict) else {} for each in (one, other)]
        both = required & properties[0].keys() & properties[1].keys()
        return any(self._disjoint(properties[0][name], properties[1][name], depth - 1) for name in both)


def _widened(types: set[str]) -> set[str]:
    return types - {"integer"} | ({"number"} if "integer" in types else set())


def path_of(reference: str) -> list[str] | None:
    """The keys of a reference into its own document; None for other references."""
    start, mark, pointer = reference.partition("#")
    if start or not mark or not (pointer + "/").startswith("/"):
        return None
    return [unquote(name).replace("~1", "/").replace("~0", "~") for name in pointer.split("/")[1:]]


def referred(reference: str, root: Any) -> Any:
    """The target of a reference into its own document; None if there is none."""
    path = path_of(reference)
    found = None if path is None else root
    for name in path or ():
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


@lru_cache(1024)
def _supports_format(name: str) -> bool:
    return not _problem({"type": "string", "format": name})


def _problem(schema: Any) -> str:
    from llguidance import LLMatcher

    found: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(f"start: %json {json.dumps(schema)}"))
    first = gist_of(found)
    return first.partition("failed to compile JSON schema: ")[2] or first


def gist_of(message: str) -> str:
    """An error message of the library in one line; "" for an empty one."""
    if "NoExtensionBias" in message:
        return "a reference leads to itself alone; let it lead to a schema"
    first, *rest = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    reason = next((line for line in rest if line.startswith("error: ")), "")
    if not first.endswith("regex parse error:") or not reason:
        return first
    return first.removesuffix("regex parse error:") + f"the expression {rest[0]}: {reason.removeprefix('error: ')}"


def problem_of(schema: Any) -> str:
    """Why llguidance rejects a schema, and where in it; "" for an accepted schema."""
    problem = _problem(schema)
    if not problem:
        return ""
    place, here, end = list[str](), schema, time.monotonic() + _MOST_PROBING_S
    whole = {key: schema[key] for key in ("$defs", "definitions", "x-guidance", "$schema") if key in schema}
    while isinstance(here, dict):
        for names, part in _parts(here):
            if isinstance(part, dict) and time.monotonic() < end and _problem(whole | part) == problem:
                place, here = [*place, *names], part
                break
        else:
            break
    path = "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in place)
    return f"at #{path}: {_in_words(problem)}"


def unheld(schema: Any) -> str:
    """Why no form can enforce a valid schema; "" if a form can, or if the schema is invalid."""
    try:
        _validator(schema)
        return problem_of(simplified(schema))
    except (ValueError, RecursionError):  # an invalid schema, which is reported when its form is made
        return ""


def misfit(schema: Any, value: Any) -> str:
    """How a JSON value violates a schema; "" if it does not. Nothing is fetched, and expressions take linear time.

    A `ValueError` says why a schema cannot be checked, or not in reasonable time.
    """
    if _places(schema) * len(json.dumps(value)) > _MOST_WORK:
        raise ValueError("the schema leads to itself, or is too large")
    for wrong in _validator(schema).iter_errors(value):
        path = "".join(f"/{name}" for name in wrong.instance_path)
        return f"at #{path}: {first_line(wrong)}"
    return ""


def _validator(schema: Any) -> Any:
    import jsonschema_rs

    options = jsonschema_rs.RegexOptions()
    try:
        return jsonschema_rs.validator_for(schema, retriever=_fetch_nothing, pattern_options=options)
    except (ValueError, RecursionError, jsonschema_rs.ReferencingError) as error:
        raise ValueError(first_line(error)) from None


def _places(schema: Any) -> int:
    """Number of schemas in a schema, with targets of references counted at each use, up to a limit."""
    count, open_ = 0, [schema]
    while open_ and count < _MOST_PLACES:
        count += 1
        here = open_.pop()
        if isinstance(here, dict):
            open_ += [part for _, part in _parts(here)]
            if isinstance(here.get("$ref"), str):
                open_.append(referred(here["$ref"], schema))
            if here.keys() & {"$dynamicRef", "$recursiveRef"}:
                return _MOST_WORK
    return _MOST_WORK if open_ else count


def _fetch_nothing(address: str) -> Any:
    raise ValueError(f"{address} is not known here, and nothing is fetched")


def _in_words(problem: str) -> str:
    if problem.startswith("oneOf constraints"):
        return (
            "an answer might match two branches of this oneOf, which it forbids; let the branches exclude each other, "
            'as by a required property of other "const", or make it anyOf'
        )
    if problem.startswith("Unimplemented keys: "):
        keys = problem.partition("[")[2].rstrip("]")
        return f"{keys} cannot be held to by a mask over tokens; leave it out"
    if problem.startswith("Unknown format: "):  # unknown formats are annotations here
        return f"the schema that a $ref leads to has the {problem[8:]}, which no mask can hold; write its parts here"
    if problem.startswith("Resource ") and "registry" in problem:
        return f"{problem.split()[1]} is not known here, and nothing is fetched; name another $schema or $ref"
    return problem


def map_schemas(grammar: str, change: Callable[[Any, str], Any]) -> str:
    """A Lark grammar with every schema changed; `change` gets the schema and the comment before it, or ""."""
    found, place, kept, comment = list[str](), 0, 0, ""
    while match := _SCHEMA.search(grammar, place):
        place = match.end()
        if match["comment"] is not None:
            comment = match["comment"].strip()
        if match["json"] is None:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, place)
        except (ValueError, RecursionError):  # the library reports the error
            continue
        found += [grammar[kept:place], json.dumps(change(schema, comment))]
        kept = place = end
        comment = ""
    return "".join([*found, grammar[kept:]])


def property_of(schema: Mapping[str, Any], key: str) -> Any:
    """The schema of one argument; None if there is none."""
    known = schema.get("properties")
    return known.get(key) if isinstance(known, Mapping) else None


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema allows; empty if it does not restrict them."""
    each = [_own_types(option) for option in options_of(schema, root)]
    return frozenset().union(*each) if all(each) else frozenset()


def options_of(schema: Any, root: Mapping[str, Any]) -> list[Any]:
    """The alternatives that a value may match: targets of references, and the branches of `anyOf` and `oneOf`.

    If there are too many, a single None, which restricts nothing.
    """
    waiting, seen, found = [schema], set[str](), list[Any]()
    for _ in range(_MOST_OPTIONS):
        if not waiting:
            return found
        one = waiting.pop()
        if isinstance(one, Mapping) and isinstance(ref := one.get("$ref"), str):
            if ref not in seen:
                seen.add(ref)
                waiting.append(referred(ref, root))
            continue
        options = _choices(one) if isinstance(one, Mapping) and values_of(one) is None else None
        if options is None:
            found.append(one)
        else:
            own, some = ({"type": one["type"]} if "type" in one else {}), options[:_MOST_OPTIONS]
            waiting += [{**own, **each} if isinstance(each, Mapping) else each for each in reversed(some)]
    return [None]


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The only values that a schema allows; None if it does not list them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def type_of(value: Any) -> str:
    """The JSON Schema type of a value."""
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def referred_in(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """The document keywords of `root` for a part of it, with only those definitions that the part refers to."""
    top = {key: root[key] for key in _OF_THE_DOCUMENT if key in root}
    found = {key: value for key, value in top.items() if key not in _DEFINITIONS}
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, Mapping):
            waiting += one.values()
            if isinstance(ref := one.get("$ref"), str):
                if (path := path_of(ref)) is None:  # a reference by id or anchor
                    return top
                key, name, *_ = *path, "", ""
                known = top[key] if key in _DEFINITIONS and isinstance(top.get(key), Mapping) else {}
                if name in known and name not in found.setdefault(key, {}):
                    found[key][name] = known[name]
                    waiting.append(known[name])
    return found


def moved(schema: Any, to: str) -> Any:
    """A schema, or a part of it, for use inside another schema: references begin with `to`, the position of the rest.

    Its document keywords are at the top of the other schema.
    """
    if not isinstance(schema, dict):
        return schema
    found = with_parts(schema, lambda part: part if isinstance(part, dict) and "$id" in part else moved(part, to))
    if isinstance(ref := found.get("$ref"), str) and (path := path_of(ref)) is not None:
        found["$ref"] = ref if path and path[0] in _DEFINITIONS else to + ref[1:]
    return found


def self_contained(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema that also contains itself as a definition, so that its parts' references work elsewhere."""
    defined, name = schema.get("$defs", {}), "arguments"
    if not isinstance(defined, dict):
        return schema
    while name in defined:
        name += "_"
    found = moved(schema, f"#/$defs/{name}")
    return schema if found == schema else {**found, "$defs": {**found.get("$defs", {}), name: parts_of(found)[1]}}


def parts_of(schema: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split a schema into document keywords, the rest, and the layout."""
    rest = dict(schema)
    top, given = {key: rest.pop(key) for key in _OF_THE_DOCUMENT if key in rest}, rest.pop("x-guidance", None)
    return top, rest, {**JSON_LAYOUT, **(given if isinstance(given, Mapping) else {})}


def _choices(schema: Mapping[str, Any]) -> list[Any] | None:
    given = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    every = schema.get("allOf")  # with a single schema, which some use around a reference
    return next(iter(given), every if isinstance(every, list) and len(every) == 1 else None)


def _own_types(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    if (named := schema.get("type")) is not None:
        return frozenset([named] if isinstance(named, str) else map(str, named) if isinstance(named, list) else ())
    return frozenset(map(type_of, values_of(schema) or ()))
