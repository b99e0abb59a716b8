"""Incremental parsers of function calls in model output."""

from __future__ import annotations

import ast
import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from truedraft.text.schemas import property_of, type_of, types_of

if TYPE_CHECKING:
    from truedraft.text.notations import Notation

Schemas: TypeAlias = Mapping[str, Mapping[str, Any] | None]
"""The callable functions: JSON schema of the arguments by function name, None for a function without schema."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A reasoning part of an answer."""

    text: str


def new_call_id() -> str:
    """An id for a call that the model wrote without one."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class Call:
    """One call, as far as it has been parsed; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""

    @property
    def record(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New output of one call; the name is known when it `begins`."""

    index: int
    call: Call
    begins: bool
    arguments: str


class CallText(ABC):
    """Incremental parser of one call: the text after its opening mark; or of the arguments of a call by name."""

    fails = False  # whether the text cannot be parsed
    name: str | None = None
    id: str | None = None
    value = ""  # JSON text of the arguments so far
    begun = True
    rest: str | None = None  # the text after the call; None while it is open
    broken = 0  # index from which the text is parsed again if it is not a call

    @abstractmethod
    def push(self, more: str) -> None: ...


class CallsReader:
    """Splits model output into text and calls between marks.

    Text that may begin a call is held back until this is decided. Text that looks like a call and is none remains text,
    as does a call with arguments that are not a JSON object or that end with the answer; the search for calls continues
    after it. Whitespace before, between and after calls is dropped if no other text precedes it. Whitespace inside
    marks may be missing or longer. Calls without an opening mark are at the beginning of the answer. Calls that a
    grammar has `formed` are streamed as they arrive, truncated ones too; others are returned when complete.
    """

    def __init__(self, notation: Notation, tools: Schemas, parallel: bool, calls: list[Call], formed: bool) -> None:
        self._notation, self._tools, self._calls, self._formed = notation, tools, calls, formed
        marks = notation.begin, notation.opening, notation.closing, notation.end
        self._begin, self._opening, self._closing, self._end = map(words_of, marks)
        self._bare = notation.bare
        self._most = None if parallel else 1
        self._step: Callable[[list[str | CallDelta], bool], bool] = self._read_text
        self._held = ""  # not yet parsed
        self._marks = ""  # parsed marks, which are text if no call follows
        self._left: Sequence[str] = ()  # of the marks being parsed
        self._begins = False  # whether these begin all calls, not one
        self._call: Call | None = None  # being parsed
        self._body: CallText = notation.body.reader(notation, tools)
        self._raw: list[str] = []  # input of `_body`
        self._again = ""  # precedes a call after a rejected one, in notations without marks
        self._wrote = False  # any text but whitespace
        self._space = ""  # whitespace before any other text

    def push(self, text: str, *, last: bool = False) -> list[str | CallDelta]:
        """Parse the next text; returns plain text and call deltas, in order."""
        self._held += text
        found: list[str | CallDelta] = []
        if self._held or last:
            while self._step(found, last):
                pass
        if last and not self._wrote and not self._calls and self._space:
            found.append(self._space)
        return found

    def _add_text(self, text: str, found: list[str | CallDelta]) -> None:
        if not self._wrote:
            text = self._space + text
            self._wrote = bool(text.strip())
            self._space = "" if self._wrote else text
        if self._wrote and text:
            found.append(text)

    def _read_text(self, found: list[str | CallDelta], last: bool) -> bool:
        """Output text up to where calls begin or may begin; returns, as all `_read_*`, whether parsing can continue."""
        held = self._held
        allowed = self._most is None or len(self._calls) < self._most
        if allowed and self._bare and not self._wrote and held.lstrip()[:1] == "{":
            self._add_text(held[: held.index("{")], found)
            return self._begin_call(held.lstrip())
        if allowed and self._again:
            found_call = re.search(rf"{re.escape(self._again)}\s*(?={{)", held)
            if found_call is not None:
                self._add_text(held[: found_call.end()], found)
                return self._begin_call(held[found_call.end() :])
        marks = [words[0] for words in (self._begin, self._opening) if words and allowed]
        place, mark = min(((place, mark) for mark in marks if (place := held.find(mark)) >= 0), default=(-1, ""))
        if place >= 0:
            self._add_text(held[:place], found)
            self._marks, self._held = mark, held[place + len(mark) :]
            self._begins, self._step = mark in self._begin[:1], self._read_marks
            self._left = self._begin[1:] if self._begins else self._opening[1:]
            return True
        kept = 0 if last else max((overlap(held, mark) for mark in marks), default=0)
        if self._again and not last and (half := re.search(rf"{re.escape(self._again)}\s*$", held)) is not None:
            kept = max(kept, len(held) - half.start())
        self._held = held[len(held) - kept :]
        self._add_text(held[: len(held) - kept], found)
        return False

    def _read_marks(self, found: list[str | CallDelta], last: bool) -> bool:
        place = match_words(self._held, self._left)
        if place is None and not last:
            return False
        if place is None and self._formed:
            return self._leave_out()
        if place is None or place < 0:
            return self._give_up(self._held, found)
        self._marks += self._held[:place]
        if not self._begins:
            return self._begin_call(self._held[place:])
        self._held, self._step = self._held[place:], self._read_between
        return bool(self._held) or last

    def _read_between(self, found: list[str | CallDelta], last: bool) -> bool:
        held = self._held.lstrip(" \t\r\n,;")
        opens = match_words(held, self._opening or ["{"])
        ends = match_words(held, self._end) if self._end else -1
        if (opens is None or ends is None or not held) and not last:
            return False
        if ends is not None and ends >= 0:
            self._held, self._marks, self._step = held[ends:], "", self._read_text
            return bool(self._held)
        if opens is None or opens < 0 or (self._most is not None and len(self._calls) >= self._most):
            return self._give_up(self._held, found)
        self._marks += held[: opens if self._opening else 0]
        return self._begin_call(held[opens if self._opening else 0 :])

    def _begin_call(self, held: str) -> bool:
        self._held, self._step, self._raw = held, self._read_call, []
        self._body = self._notation.body.reader(self._notation, self._tools)
        return True

    def _read_call(self, found: list[str | CallDelta], last: bool) -> bool:
        body = self._body
        body.push(self._held)
        self._raw.append(self._held)
        self._held = ""
        any_name = (not self._bare and not self._again) or bool(self._marks) or self._call is not None
        named = body.name is not None and (any_name or body.name in self._tools)
        over = body.fails or (not named and (body.name is not None or body.rest is not None or last))
        if self._call is None and over:
            if self._formed and self._marks and not body.fails and body.name is None and body.rest is None:
                return self._leave_out()
            return self._give_up("".join(self._raw), found)
        if not named or (body.rest is None and not last and not self._formed):
            return False
        known = body.value or ("{}" if body.rest is not None else "")
        if not self._formed and not isinstance(parsed(known), dict):
            return self._give_up("".join(self._raw), found)
        index = len(self._calls)
        if self._call is None:
            self._call = Call(body.id or self._notation.new_id(), str(body.name))
            self._space = self._marks = ""
            found.append(CallDelta(index, self._call, True, ""))
        if new := known[len(self._call.arguments) :]:
            self._call.arguments += new
            found.append(CallDelta(index, self._call, False, new))
        if body.rest is None and not last:
            return False
        self._calls.append(self._call)
        self._call = None
        self._held, self._left, self._step = body.rest or "", self._closing, self._read_closing
        return True

    def _read_closing(self, found: list[str | CallDelta], last: bool) -> bool:
        """Drop the marks after a call, as far as present."""
        while self._left:  # the first ones may be missing
            place = match_words(self._held, self._left[:1])
            if place is None:
                if not last:
                    return False
                self._held = ""
                break
            self._held, self._left = self._held[max(place, 0) :], self._left[1:]
        self._step = self._read_between if self._begin or not self._opening else self._read_text
        return bool(self._held)

    def _leave_out(self) -> bool:
        self._held, self._marks, self._step = "", "", self._read_text
        return False

    def _give_up(self, held: str, found: list[str | CallDelta]) -> bool:
        marks = self._marks
        if not self._opening and self._raw and (marks or self._calls or self._body.name in self._tools):
            self._again = self._notation.separator.strip()
            broken = self._body.broken  # the text before it may contain objects that are no calls
            marks, held = marks + held[:broken], held[broken:]
        if (marks + held).strip():
            text, self._space, self._wrote = self._space + marks, "", True
            if text:
                found.append(text)
        self._held, self._marks, self._call, self._step = held, "", None, self._read_text
        return bool(self._held)


_LONGEST_LITERAL = 1 << 14  # characters of a value in Python's notation; longer ones are text
_STRING = {"string"}
_SPACE = " \t\r\n"
_LITERAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_OF_LITERALS = re.compile(r"(?:[^\W_]|[+.-])*")
_OF_STRINGS = re.compile(r'(?:[^"\\\x00-\x1f]|\\.)*', re.DOTALL)


class RecordText(CallText):
    """Parser of a call that is a JSON object with a name and arguments; without `keys`, the object is the arguments.

    Worked example: in `{"name": "f", "arguments": {"x": [1, "}` the name is f and the arguments so far are the text
    `{"x": [1, "}`. Arguments that are a string containing an object become that object when the string has ended. The
    first of `keys` in the object counts.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self.text = ""
        self.begun = False  # whether the opening brace was read
        self._keys = keys
        self._whole = False  # whether the arguments ended
        self._end: int | None = None
        self._place = 0
        self._open: list[str] = []  # brackets
        self._expected = ""
        self._literal_from: int | None = None
        self._quoted = False
        self._key: str | None = None
        self._value_from = 0
        self._string_from = 0
        self._string = ""  # the last whole one, quotes included

    def push(self, more: str) -> None:
        self.text += more
        while self._place < len(self.text) and self._end is None and not self.fails and self._take():
            pass
        if not self._keys:
            self.value = self.text[: self._end].strip()
        elif self._key in self._keys and not self._whole:
            value = self.text[self._value_from :].strip()
            self.value = "" if value.startswith('"') else value
        self.broken = self._string_from or self._place  # an open string extends to the first quote of the next call
        self.rest = None if self._end is None else self.text[self._end :]

    def _take(self) -> bool:
        text, place = self.text, self._place
        if self._quoted or self._literal_from is not None:
            pattern = _OF_STRINGS if self._quoted else _OF_LITERALS
            end = pattern.match(text, place).end()  # type: ignore[union-attr]  # it matches nothing, too
            self._place = end
            if end == len(text) or (self._quoted and text[end] == "\\"):
                return False
            if self._literal_from is not None:
                self.fails = _LITERAL.fullmatch(text, self._literal_from, end) is None
                self._literal_from, self._expected, self._place = None, "next", end + self.fails
                return True
            self._quoted, self._place, self._string = False, end + 1, text[self._string_from : end + 1]
            self.fails = text[end] != '"' or _string(self._string) is None
            return True
        if text[place] not in _SPACE and self._open:
            self._in_object(text[place])
        elif text[place] not in _SPACE:
            self.begun = text[place] == "{"
            self.fails = not self.begun
            self._open, self._expected = ["{"], "first key"
        self._place += 1
        return True

    def _in_object(self, character: str) -> None:
        state, depth = self._expected, len(self._open)
        is_value = state.endswith("value")
        if character == '"' and (is_value or state.endswith("key")):
            self._quoted, self._string_from, self._expected = True, self._place, "next" if is_value else "colon"
        elif character in "{[" and is_value:
            self._open.append(character)
            self._expected = "first key" if character == "{" else "first value"
        elif character == ":" and state == "colon":
            if depth == 1:
                self._key, self._value_from = _string(self._string), self._place + 1
            self._expected = "value"
        elif character == "," and state == "next":
            if depth == 1:
                self._end_value()
            self._expected = "key" if self._open[-1] == "{" else "value"
        elif self._open[-1] + character in ("{}", "[]") and (state == "next" or state.startswith("first")):
            if depth == 1:
                self._end_value()
                self._end = self._place + 1
            self._open.pop()
            self._expected = "next"
        elif is_value and (character.isalnum() or character == "-"):
            self._literal_from = self._place
        else:
            if depth == 1 and state == "next":  # only its last brace may be missing
                self._end_value()
            whole = self.name is not None and self._whole
            self._end, self.fails = (self._place, False) if whole and depth == 1 and state == "next" else (None, True)

    def _end_value(self) -> None:
        value = self.text[self._value_from : self._place].strip()
        if self._key == "name":
            self.name = _string(value)
        elif self._key == "id":
            self.id = _string(value)
        elif self._key in self._keys and not self._whole:
            text = (_string(value) or "").strip()
            self.value = text if text.startswith("{") and text.endswith("}") else value
            self._whole = True
        self._key = None


class NamedText(CallText):
    """Parser of a call with its name before its arguments."""

    def __init__(self, notation: Notation, arguments: Callable[[str], CallText]) -> None:
        self.text = ""
        self._notation = notation
        before, _, after_id = notation.between.rpartition("{id}")
        self._mark = after_id.strip() or "<"
        self._keeps = not after_id.strip()  # the name extends to the next mark
        known = f"(?:{re.escape(before)}(?P<id>{notation.id_pattern}))?" if before else "(?P<id>)"
        no_opening = f"(?!{re.escape(words_of(notation.opening)[0])})"
        self._head = re.compile(rf"\s*(?P<name>(?:{no_opening}[^\s<>{{}}\"])+?){known}\s*")
        self._make = arguments
        self._arguments: CallText | None = None
        self._found: re.Match[str] | None = None

    def push(self, more: str) -> None:
        if self._arguments is None:
            self.text += more
            head, mark, after_mark = self.text.partition(self._mark)
            if not mark:
                self.fails = len(head[: len(head) - overlap(head, self._mark)].split()) > 1
                return
            self._found = self._head.fullmatch(head)
            self.fails = self._found is None
            if self._found is None:
                return
            self._arguments = self._make(self._found["name"])
            more = (mark if self._keeps else "") + after_mark
        self._arguments.push(more)
        self.fails, self.value, self.rest = self._arguments.fails, self._arguments.value, self._arguments.rest
        if self._found is not None and self._arguments.begun and self.name is None:
            self.name, number = self._found["name"], self._found["id"]
            self.id = self._notation.call_id.format(name=self.name, id=number) if number else None


class ParametersText(CallText):
    """Parser of arguments written one by one between marks, converted to JSON.

    Strings are verbatim and streamed as they arrive; other values are JSON. A value without its closing mark ends where
    the next key or the closing of the call follows as the notation writes it (on a new line, if the notation does so).
    If the next call follows there, this one is none. `marks` are before a key, between it and its value, and after the
    value; `opening` has the marks that begin the next call, and the one after its name.
    """

    def __init__(
        self,
        marks: tuple[str, str, str],
        closing: Sequence[str],
        opening: tuple[Sequence[str], str],
        schema: Mapping[str, Any] | None,
    ) -> None:
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
        self._taken: list[str] = []  # of a value that is emitted when complete
        self._first = True  # whether nothing of the value was read yet

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
        if end >= 0 and match_words(held[end:], self._closing) is None:
            place = min(place, end)
        call = held.rfind(self._opening[0])
        if call >= 0 and (match_words(held[call:], self._opening) is None or self._half_call.fullmatch(held, call)):
            place = min(place, call)
        return len(held[:place].removesuffix("\n"))


def _json_of(text: str, types: frozenset[str]) -> str:
    """A value in JSON, or in Python's notation as some templates show it; anything else is a string."""
    stripped, may_be_text, quoted = text.strip(), not types or "string" in types, json.dumps(text, ensure_ascii=False)
    try:
        kind = type_of(json.loads(stripped, parse_constant=int))  # int refuses NaN and infinities
    except (ValueError, RecursionError):
        if may_be_text:
            return quoted
        try:
            return json.dumps(ast.literal_eval(stripped[:_LONGEST_LITERAL]), ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return quoted
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return quoted if may_be_text and (kind == "string" or not fits) else stripped


def parsed(text: str) -> Any:
    """Parse JSON into a value that can be serialized again; None on failure. A lone surrogate becomes "?"."""
    try:
        shown = json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
        return json.loads(shown.encode(errors="replace"))
    except (ValueError, RecursionError):
        return None


def _string(text: str) -> str | None:
    value = parsed(text)
    return value if isinstance(value, str) else None


_WORDS = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|[^\s<\[]+|\S")


def words_of(marks: str) -> list[str]:
    """Split marks at the positions where whitespace is allowed."""
    return _WORDS.findall(marks)


def match_words(text: str, words: Sequence[str]) -> int | None:
    """The index after words at the beginning of a text, with any whitespace between them.

    -1 if the text begins otherwise, None if it is too short to decide.
    """
    place = 0
    for word in words:
        while place < len(text) and text[place].isspace():
            place += 1
        part = text[place : place + len(word)]
        if part != word:
            return None if word.startswith(part) and len(text) == place + len(part) else -1
        place += len(word)
    return place


def overlap(text: str, opening: str) -> int:
    """Length of the longest suffix of the text that is a prefix of the opening."""
    return next((count for count in range(min(len(text), len(opening)), 0, -1) if opening.startswith(text[-count:])), 0)
