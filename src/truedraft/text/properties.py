"""What the JSON schema of a function says about one argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from truedraft.text.forms import JSON_LAYOUT
from truedraft.text.schemas import path_of, referred, with_parts

_DEFINITIONS = ("$defs", "definitions")
OF_THE_DOCUMENT = (*_DEFINITIONS, "$schema", "$id")
"""Keywords about a whole document, which move to the top of a schema that includes this one."""

_MOST_OPTIONS = 1000
"""Limit of schemas visited to find the types of one argument, because each may refer to all."""


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
    top = {key: root[key] for key in OF_THE_DOCUMENT if key in root}
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
    """A schema with its references adapted to a position inside another schema.

    Args:
        schema: whole, or a part of it; its document keywords are at the top of the other schema.
        to: reference to the new position of the rest.
    """
    if not isinstance(schema, dict):
        return schema
    found = with_parts(schema, lambda part: part if isinstance(part, dict) and "$id" in part else moved(part, to))
    if isinstance(ref := found.get("$ref"), str) and (path := path_of(ref)) is not None:
        found["$ref"] = ref if path and path[0] in _DEFINITIONS else to + ref[1:]
    return found


def beside_itself(schema: Mapping[str, Any]) -> Mapping[str, Any]:
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
    top, given = {key: rest.pop(key) for key in OF_THE_DOCUMENT if key in rest}, rest.pop("x-guidance", None)
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
