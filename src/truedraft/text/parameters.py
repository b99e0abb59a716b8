"""Arguments that models write one by one between marks, converted to JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from truedraft.text.calls import behind, overlap
from truedraft.text.properties import property_of, type_of, types_of

_LONGEST_LITERAL = 1 << 14
"""Most characters of a value in Python's notation; longer ones are text."""

_STRING = {"string"}


class ParametersText:
    """Parser of arguments written one by one between marks, converted to JSON.

    Strings are verbatim and streamed as they arrive; other values are JSON. A value without its closing mark ends where
    the next key or the closing of the call follows as the notation writes it (on a new line, if the notation does so).
    If the next call follows there, this one is none.

    Args:
        marks: before a key, between it and its value, and after the value.
        closing: the marks that end the call.
        opening: the marks that begin the next call, and the one after its name.
        schema: of the arguments; None if unknown.
    """

    def __init__(
        self,
        marks: tuple[str, str, str],
        closing: Sequence[str],
        opening: tuple[Sequence[str], str],
        schema: Mapping[str, Any] | None,
    ) -> None:
        self.begun, self.fails = True, False
        self._key_mark, self._middle, value_end = marks[0], marks[1].split(), marks[2].strip()
        self._closing, self._marks = closing, (marks[0], value_end, *closing)
        self._opening, (head, after_name) = opening[0], (r"\s*".join(map(re.escape, opening[0])), opening[1])
        self._half_call = re.compile(rf"{head}\s*[^\s<>{{}}\"]*\s*")
        self._call = re.compile(rf"{head}\s*[^\s<>{{}}\"]+\s*{re.escape(after_name)}")
        self._trims = marks[1].endswith("\n")  # one line break around values
        key, end, *ends = map(re.escape, self._marks)
        self._next = re.compile("|".join((key, *ends)))
        early = "|".join((key, r"\s*".join(ends), ends[-1]))
        line, before = ("\n?" if self._trims else ""), ("\n" if "\n" in marks[2] else "")
        self._stop = re.compile(f"{line}{end}|{before}(?={early}|{self._call.pattern})")
        self._schema = schema or {}
        self._held = ""
        self._step: Callable[[], bool] = self._between
        self._types: frozenset[str] = frozenset()
        self.value = ""
        self._taken: list[str] = []  # of a value that is emitted when complete
        self._first = True  # whether nothing of the value was read yet
        self.rest: str | None = None

    def push(self, more: str) -> None:
        self._held += more
        while self.rest is None and not self.fails and self._step():
            pass

    def _between(self) -> bool:
        found = self._next.search(self._held)
        if found is None:
            return False
        self.fails = self._call.search(self._held, 0, found.end()) is not None
        if found.group() == self._key_mark:
            self._held, self._step = self._held[found.end() :], self._key
            return True
        self.value += "}" if self.value else "{}"
        self.rest = self._held[found.start() :]
        return False

    def _key(self) -> bool:
        place = self._held.find(self._middle[-1])
        if place < 0:
            return False
        key, _, gap = self._held[:place].partition(self._middle[0])
        key = key.strip()
        self.fails = bool(gap.strip()) or "<" in key or "\n" in key
        self._held = self._held[place + len(self._middle[-1]) :]
        self._types = types_of(property_of(self._schema, key), self._schema)
        self.value += ("{" if not self.value else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        self.value += '"' if self._types == _STRING else ""
        self._first, self._step = True, self._value
        return True

    def _value(self) -> bool:
        stop = self._stop.search(self._held)
        text = self._held[: self._sure if stop is None else stop.start()]
        self._held = self._held[len(text) if stop is None else stop.end() :]
        self.fails = stop is not None and self._call.match(self._held) is not None and not stop.group().strip()
        if text and self._first:
            text, self._first = text.removeprefix("\n" if self._trims else ""), False
        if self._types == _STRING:
            self.value += json.dumps(text, ensure_ascii=False)[1:-1] + ("" if stop is None else '"')
        else:
            self._taken.append(text)
        if stop is None:
            return False
        if self._types != _STRING:
            self.value += _json_of("".join(self._taken), self._types)
            self._taken.clear()
        self._step = self._between
        return True

    @property
    def _sure(self) -> int:
        """Length of the held text that certainly belongs to an unfinished value."""
        held, end = self._held, self._held.rfind(self._closing[0])
        place = len(held) - max(overlap(held, mark) for mark in (*self._marks, self._opening[0]))
        if end >= 0 and behind(held[end:], self._closing) is None:
            place = min(place, end)
        call = held.rfind(self._opening[0])
        if call >= 0 and (behind(held[call:], self._opening) is None or self._half_call.fullmatch(held, call)):
            place = min(place, call)
        return len(held[:place].removesuffix("\n"))


def _json_of(text: str, types: frozenset[str]) -> str:
    """A value in JSON, or in Python's notation as some templates show it; anything else is a string."""
    stripped, may_be_text = text.strip(), not types or "string" in types
    try:
        kind, shown = type_of(json.loads(stripped, parse_constant=_no_constant)), stripped
    except (ValueError, RecursionError):
        if may_be_text:
            return json.dumps(text, ensure_ascii=False)
        try:
            value = ast.literal_eval(stripped[:_LONGEST_LITERAL])
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return json.dumps(text, ensure_ascii=False) if may_be_text and (kind == "string" or not fits) else shown


def _no_constant(name: str) -> None:
    raise ValueError(name)
