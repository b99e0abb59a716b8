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
        rules = [f"call_{number}: %json {schema}" for number, schema in enumerate(calls)]
        any_call = " | ".join(f"call_{number}" for number in range(len(calls)))
        one = " ".join(part for part in (_literal(self.opening), "any_call", _literal(self.closing)) if part)
        more = f' ("\\n" {one})*' if parallel else ""
        return Structured("grammar", "\n".join([f"start: {one}{more}", f"any_call: {any_call}", *rules]))

    def _schema(self, tool: ToolFields) -> dict[str, Any]:
        arguments = tool.function.parameters or _ANY_ARGUMENTS
        return {
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
    """Reads text and calls from an answer as it comes.

    Text that may be the beginning of a call is held back until it is known. What looks like a call and is none stays
    text.

    Args:
        use: what calls there may be.

    Attributes:
        calls: that were read to their end.
    """

    def __init__(self, use: ToolUse) -> None:
        self.calls: list[Call] = []
        self._style = use.style
        self._tag = use.style.opening.strip()  # without one a call begins with the brace of an object
        self._names = {tool.function.name for tool in use.tools}
        self._most = None if use.parallel else 1
        self._held = ""  # not yet known to be text or a call
        self._current: Call | None = None  # that is being read
        self._wrote = False  # any text but space

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[CallDelta]]:
        """Take the next text.

        Args:
            text: of the answer.
            last: whether nothing follows.

        Returns:
            What of it is plain text, and what came of calls.
        """
        self._held += text
        plain, before = "", -1
        deltas: list[CallDelta] = []
        while self._held and len(self._held) != before:
            before = len(self._held)
            if self._current is None:
                plain += self._read_text(last)
            elif not self._read_call(self._current, deltas):
                plain += self._give_up()
        if last and self._held and (self._current is None or not self._current.name):
            plain += self._give_up()
        self._wrote = self._wrote or bool(plain.strip())
        return (plain if self._wrote or not self.calls else ""), deltas

    def _give_up(self) -> str:
        """What is held is no call."""
        text = (self._style.opening if self._current is not None else "") + self._held
        self._held, self._current, self._wrote = "", None, True
        return text

    def _read_text(self, last: bool) -> str:
        """Take text up to where a call begins, or may begin."""
        held, opening = self._held, self._tag or "{"
        allowed = self._most is None or len(self.calls) < self._most
        if not self._tag:
            allowed = allowed and not self._wrote and held.lstrip()[:1] in ("", "{")
        place = held.find(opening) if allowed else -1
        if place >= 0:
            self._current = Call()
            self._held = held[place + len(self._tag) :]
            return held[:place]
        kept = _overlap(held, opening) if allowed and not last else 0
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    def _read_call(self, call: Call, deltas: list[CallDelta]) -> bool:
        """Read on in the call that is begun; False where it is none."""
        scan = _scan(self._held, self._style.arguments)
        if scan is None:
            return not self._held.strip()
        known = scan.name is not None and (bool(self._tag) or scan.name in self._names)
        if not known:
            return scan.name is None and scan.end is None
        index = len(self.calls)
        if not call.name:
            call.name = str(scan.name)
            deltas.append(CallDelta(index, call, True, ""))
        new = scan.arguments[len(call.arguments) :]
        if new:
            call.arguments += new
            deltas.append(CallDelta(index, call, False, new))
        if scan.end is not None:
            self.calls.append(call)
            rest, closing = self._held[scan.end :], self._style.closing.strip()
            self._held = rest.lstrip().removeprefix(closing) if closing else rest
            self._current = None
        return True


@dataclass(frozen=True, slots=True)
class _Scan:
    """What is known of an object that may not be whole.

    Attributes:
        name: its "name", once that is whole.
        arguments: text of its arguments, as far as it is there.
        end: place behind the object; None while it is open.
    """

    name: str | None
    arguments: str
    end: int | None


def _scan(text: str, arguments: str) -> _Scan | None:
    """Read an object from its opening brace on; None before there is one.

    >>> _scan('{"name": "f", "arguments": {"x": [1, "}', "arguments")
    _Scan(name='f', arguments='{"x": [1, "}', end=None)
    """
    start = len(text) - len(text.lstrip())
    if text[start : start + 1] != "{":
        return None
    depth, quoted, escaped = 0, False, False
    key: str | None = None
    name: str | None = None
    value_from: int | None = None
    found = ""
    string_from = 0
    last_string = ""
    for place in range(start, len(text)):
        character = text[place]
        if quoted:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                quoted = False
                last_string = text[string_from : place + 1]
            continue
        if character == '"':
            quoted, string_from = True, place
        elif character == ":" and depth == 1 and key is None:
            key, value_from = _string(last_string), place + 1
        elif character in "{[":
            depth += 1
        elif character in "}],":
            ends_value = depth == 1
            if character != ",":
                depth -= 1
            if ends_value and key is not None and value_from is not None:
                value = text[value_from:place].strip()
                name = _string(value) if key == "name" else name
                found = value if key == arguments else found
                key, value_from = None, None
            if depth == 0:
                return _Scan(name, found, place + 1)
    if key == arguments and value_from is not None:
        found = text[value_from:].strip()
    return _Scan(name, found, None)


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _overlap(text: str, opening: str) -> int:
    """How many characters at the end of a text begin an opening."""
    return next((count for count in range(min(len(text), len(opening)), 0, -1) if opening.startswith(text[-count:])), 0)
