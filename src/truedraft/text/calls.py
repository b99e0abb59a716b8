"""Calls of functions in what a model writes, read as they come."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Call:
    """One call, as far as it was read.

    Attributes:
        id: by which its result is sent back.
        name: of the function.
        arguments: JSON text.
    """

    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")
    name: str = ""
    arguments: str = ""

    @property
    def record(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What came new of one call.

    Attributes:
        index: of the call.
        call: as far as it was read.
        begins: whether its name has just become known.
        arguments: new text of its arguments.
    """

    index: int
    call: Call
    begins: bool
    arguments: str


class CallsReader:
    """Reads text and calls from an answer as it comes, the same whatever parts it comes in.

    Text that may be the beginning of a call is held back until it is known. What looks like a call and is none stays
    text. Space before, between and behind calls is left out where there is no other text before it.

    Args:
        opening: before each call; without one a call is an object at the beginning of the answer.
        closing: behind it.
        arguments: what the arguments are called in it.
        tools: that may be called; none where no call is looked for.
        parallel: whether there may be several.
        calls: takes those that were read to their end, or to the answer's.
    """

    def __init__(
        self,
        opening: str,
        closing: str,
        arguments: str,
        tools: Mapping[str, Any] | None,
        parallel: bool,
        calls: list[Call],
    ) -> None:
        self.calls = calls
        self._tag = opening.strip()  # without one a call begins with the brace of an object
        self._closing = closing.strip()
        self._arguments = arguments
        self._names = set(tools or ())
        self._most = 0 if not tools else None if parallel else 1
        self._held = ""  # not yet known to be text or a call
        self._call: Call | None = None  # that is being read
        self._object = _Object(self._arguments)  # of that call
        self._closes = False  # whether the tag that closes a call comes next
        self._wrote = False  # any text but space
        self._space = ""  # that came before any other text

    def push(self, text: str, *, last: bool = False) -> list[str | CallDelta]:
        """Take the next text.

        Args:
            text: of the answer.
            last: whether nothing follows.

        Returns:
            Plain text, and what came of calls, in order.
        """
        self._held += text
        found: list[str | CallDelta] = []
        goes_on = bool(self._held) or last
        while goes_on:
            if self._closes:
                goes_on = self._skip_closing(last)
            elif self._call is not None:
                goes_on = self._read_call(self._call, found, last)
            else:
                goes_on = self._read_text(found, last)
        if last and not self._wrote and not self.calls and self._space:
            found.append(self._space)
        return found

    def _skip_closing(self, last: bool) -> bool:
        """Leave out the tag behind a call; returns whether more can be read."""
        held = self._held.lstrip()
        if self._closing.startswith(held) and held != self._closing:  # not yet there, or only its beginning
            if not last:
                return False
            held = ""
        self._held = held.removeprefix(self._closing) if held.startswith(self._closing) or not held else self._held
        self._closes = False
        return bool(self._held)

    def _tell(self, text: str, found: list[str | CallDelta]) -> None:
        """Hand over plain text."""
        if not self._wrote:
            text = self._space + text
            self._wrote = bool(text.strip())
            self._space = "" if self._wrote else text
        if self._wrote and text:
            found.append(text)

    def _read_text(self, found: list[str | CallDelta], last: bool) -> bool:
        """Take text up to where a call begins, or may begin; returns whether more can be read."""
        held, opening = self._held, self._tag or "{"
        allowed = self._most is None or len(self.calls) < self._most
        if not self._tag:
            allowed = allowed and not self._wrote and held.lstrip()[:1] in ("", "{")
        place = held.find(opening) if allowed else -1
        if place >= 0:
            self._call, self._object = Call(), _Object(self._arguments)
            self._tell(held[:place], found)
            self._held = held[place + len(self._tag) :]
            return True
        kept = overlap(held, opening) if allowed and not last else 0
        self._held = held[len(held) - kept :]
        self._tell(held[: len(held) - kept], found)
        return False

    def _read_call(self, call: Call, found: list[str | CallDelta], last: bool) -> bool:
        """Read on in the call that is begun; returns whether more can be read."""
        read = self._object
        read.push(self._held)
        self._held = ""
        named = read.name is not None and (bool(self._tag) or read.name in self._names)
        if read.fails or (not named and (read.name is not None or read.end is not None or last)):
            self._give_up(found)
            return bool(self._held)
        if not named:
            return False
        index = len(self.calls)
        if not call.name:
            call.name, self._space = str(read.name), ""
            found.append(CallDelta(index, call, True, ""))
        known = read.value if read.value or read.end is None else "{}"
        new = known[len(call.arguments) :]
        if new:
            call.arguments += new
            found.append(CallDelta(index, call, False, new))
        if read.end is None and not last:
            return False
        self.calls.append(call)
        self._call = None
        self._held = "" if read.end is None else read.text[read.end :]
        self._closes = bool(self._closing) and read.end is not None
        return self._closes or bool(self._held)

    def _give_up(self, found: list[str | CallDelta]) -> None:
        """What was read is no call: its tag is text, and behind it a call may begin."""
        self._held, self._call = self._object.text, None
        text, self._space, self._wrote = self._space + self._tag, "", True
        if text:
            found.append(text)


class _Object:
    """An object in JSON that comes in parts.

    Worked example: of `{"name": "f", "arguments": {"x": [1, "}` the name is f and the value of "arguments" is
    `{"x": [1, "}` so far.

    Args:
        key: of the value that is wanted beside the name.

    Attributes:
        text: so far.
        fails: whether it is no object.
        name: the value of "name", once that is whole.
        value: text of the wanted value, as far as it is there.
        end: place behind the object; None while it is open.
    """

    def __init__(self, key: str) -> None:
        self.text = ""
        self.fails = False
        self.name: str | None = None
        self.value = ""
        self.end: int | None = None
        self._wanted = key
        self._place = 0
        self._depth = 0
        self._quoted = self._escaped = False
        self._key: str | None = None
        self._value_from = 0
        self._string_from = 0
        self._string = ""  # the last whole one, quotes included

    def push(self, more: str) -> None:
        """Read on."""
        self.text += more
        while self._place < len(self.text) and self.end is None and not self.fails:
            self._take(self.text[self._place])
            self._place += 1
        if self.end is None and self._key == self._wanted:
            self.value = self.text[self._value_from :].strip()

    def _take(self, character: str) -> None:
        if self._quoted:
            self._in_string(character)
        elif self._depth == 0:
            self._depth = int(character == "{")
            self.fails = not self._depth and not character.isspace()
        elif character == '"':
            self._quoted, self._string_from = True, self._place
        elif character == ":" and self._depth == 1 and self._key is None:
            self._key, self._value_from = _string(self._string), self._place + 1
        elif character in "{[":
            self._depth += 1
        elif character in "}],":
            if self._depth == 1:
                self._end_value()
            self._depth -= character != ","
            if self._depth == 0:
                self.end = self._place + 1

    def _in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._quoted = False
            self._string = self.text[self._string_from : self._place + 1]

    def _end_value(self) -> None:
        value = self.text[self._value_from : self._place].strip()
        if self._key == "name":
            self.name = _string(value)
        elif self._key == self._wanted:
            self.value = value
        self._key = None


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def overlap(text: str, opening: str) -> int:
    """How many characters at the end of a text begin an opening."""
    return next((count for count in range(min(len(text), len(opening)), 0, -1) if opening.startswith(text[-count:])), 0)
