"""Functions that a model may call: told to it by the chat template, asked for by a grammar, and read from its text.

Models write a call as JSON between two tags, or as JSON alone; which of the two is told by their template. A call that
must come (`tool_choice` "required", or a function by name) is made to have that form by a grammar, arguments included.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from truedraft.core.params import Structured
from truedraft.server.errors import ApiError
from truedraft.server.fields import Fields
from truedraft.text.forms import JSON_LAYOUT

_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


class FunctionFields(Fields):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(Fields):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionFields


class NamedFunction(Fields):
    """A function by its name."""

    name: str


class NamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How calls are written.

    Attributes:
        opening: before each call.
        closing: behind it.
        arguments: what the arguments are called in it.
    """

    opening: str
    closing: str
    arguments: str

    @classmethod
    def of(cls, template: str) -> CallStyle:
        """The style that a chat template teaches; tags where it knows nothing of tools."""
        if "<tool_call>" not in template and '"parameters"' in template and "tools" in template:
            return cls("", "", "parameters")
        return cls("<tool_call>\n", "\n</tool_call>", "arguments")

    def told(self, tools: Sequence[ToolFields]) -> str:
        """What a model is told of the tools whose template does not do it."""
        lines = [json.dumps(tool.model_dump(exclude_none=True), ensure_ascii=False) for tool in tools]
        form = f'{self.opening}{{"name": NAME, "{self.arguments}": OBJECT}}{self.closing}'
        return "\n".join(["You may call these functions:", *lines, f"To call one, write:\n{form}"])

    def grammar(self, tools: Sequence[ToolFields], *, parallel: bool) -> Structured:
        """Calls of these functions, at least one, in Lark's notation."""
        calls = [json.dumps(self._schema(tool), ensure_ascii=False) for tool in tools]
        # What cannot be read in a schema is told with the comment before it.
        rules = [
            f"// function {json.dumps(tool.function.name)}\ncall_{number}: %json {schema}"
            for number, (tool, schema) in enumerate(zip(tools, calls, strict=True))
        ]
        any_call = " | ".join(f"call_{number}" for number in range(len(calls)))
        one = " ".join(part for part in (_literal(self.opening), "any_call", _literal(self.closing)) if part)
        more = f' ("\\n" {one})*' if parallel else ""
        return Structured("grammar", "\n".join([f"start: {one}{more}", f"any_call: {any_call}", *rules]))

    def _schema(self, tool: ToolFields) -> dict[str, Any]:
        """Of a call; what the arguments' schema says of the whole document stands at the top, where it belongs."""
        arguments = dict(tool.function.parameters or _ANY_ARGUMENTS)
        top: dict[str, Any] = {
            key: arguments.pop(key) for key in ("$defs", "definitions", "$schema", "$id") if key in arguments
        }
        layout = {**JSON_LAYOUT, **(arguments.pop("x-guidance", None) or {})}
        return {
            **top,
            "x-guidance": layout,
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, self.arguments: arguments},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What of tools a request asks for.

    Attributes:
        style: how calls are written.
        tools: that may be called.
        forced: the form of calls that must come; None leaves it to the model.
        parallel: whether there may be several.
    """

    style: CallStyle
    tools: Sequence[ToolFields]
    forced: Structured | None
    parallel: bool

    @classmethod
    def of(
        cls,
        tools: Sequence[ToolFields] | None,
        choice: str | NamedTool | None,
        parallel: bool | None,
        template: str,
    ) -> ToolUse | None:
        """From the fields of a request; None where no call can come.

        Raises:
            ApiError: there are no tools to choose from, or none of that name.
        """
        if not tools:
            if choice not in (None, "none", "auto"):
                raise ApiError(400, "tool_choice names a tool and tools is empty; list it there", param="tool_choice")
            return None
        if choice == "none":
            return None
        style, several = CallStyle.of(template), parallel is not False
        if choice in (None, "auto"):
            return cls(style, tools, None, several)
        if isinstance(choice, NamedTool):
            named = [tool for tool in tools if tool.function.name == choice.function.name]
            if not named:
                known = ", ".join(repr(tool.function.name) for tool in tools)
                message = f"tool_choice names {choice.function.name!r}; tools has {known}"
                raise ApiError(400, message, param="tool_choice")
            return cls(style, tools, style.grammar(named, parallel=False), False)
        return cls(style, tools, style.grammar(tools, parallel=several), several)


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


class CallReader:
    """Reads text and calls from an answer as it comes, the same whatever parts it comes in.

    Text that may be the beginning of a call is held back until it is known. What looks like a call and is none stays
    text. Space before, between and behind calls is left out where there is no other text before it.

    Args:
        use: what calls there may be.

    Attributes:
        calls: that were read to their end, or to the answer's.
    """

    def __init__(self, use: ToolUse) -> None:
        self.calls: list[Call] = []
        self._tag = use.style.opening.strip()  # without one a call begins with the brace of an object
        self._closing = use.style.closing.strip()
        self._arguments = use.style.arguments
        self._names = {tool.function.name for tool in use.tools}
        self._most = None if use.parallel else 1
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
        kept = _overlap(held, opening) if allowed and not last else 0
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


def arguments_for_template(text: str) -> Any:
    """The arguments of an earlier call as chat templates want them: as an object, where they are one."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _overlap(text: str, opening: str) -> int:
    """How many characters at the end of a text begin an opening."""
    return next((count for count in range(min(len(text), len(opening)), 0, -1) if opening.startswith(text[-count:])), 0)
