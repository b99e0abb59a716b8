"""The parts of a request for a response: the items of its conversation, its tools, and the tool choice.

Items and tools that OpenAI's own servers run (`HOSTED`) are ignored with a warning. Custom tools become functions with
one text argument, and functions in a namespace get the namespace as a prefix.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag
from pydantic_core import from_json

from truedraft.server.conversations import FunctionFields, NamedFunction, called
from truedraft.server.errors import invalid, quoted
from truedraft.server.fields import Items, LenientModel, SeenContent, parts_of
from truedraft.text.calls import parsed

HOSTED = (
    "web_search", "file_search", "code_interpreter", "image_generation", "local_shell", "computer", "mcp", "shell",
    "apply_patch", "tool_search", "programmatic_tool_calling",
)  # fmt: skip
"""Prefixes of the types of tools that run at OpenAI, and of their calls and results in a conversation."""

_TEXT = "input"  # name of a custom tool's one argument


class InputMessage(LenientModel):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: SeenContent | None = None


class InputCall(LenientModel):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None

    @property
    def text(self) -> str:
        return self.arguments


class InputCustomCall(LenientModel):
    """A call of a custom tool that an earlier answer made."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None

    @property
    def text(self) -> str:
        """The arguments of the function that replaces the custom tool."""
        return json.dumps({_TEXT: self.input}, ensure_ascii=False)


class InputResult(LenientModel):
    """What a call gave."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: SeenContent


class ReasoningText(LenientModel):
    """A part of earlier reasoning."""

    type: str | None = None
    text: str


class InputReasoning(LenientModel):
    """What an earlier answer reasoned; a summary, or what is encrypted, says nothing to a model."""

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ())


class FlatTool(FunctionFields):
    """A function that may be called."""

    type: Literal["function"]
    # Accepted without effect.
    allowed_callers: Items[str] | None = None
    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None

    @property
    def function(self) -> FunctionFields:
        about, schema = self.description, self.parameters
        return FunctionFields(name=self.name, description=about, parameters=schema, strict=self.strict)


class CustomFormat(LenientModel):
    """What the input of a custom tool is like."""

    type: Literal["text", "grammar"] = "text"
    syntax: str | None = None
    definition: str | None = None


class CustomTool(LenientModel):
    """A tool that is called with a text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None

    @property
    def function(self) -> FunctionFields:
        """The function with one text argument that replaces it; its grammar is shown to the model and not enforced."""
        parts = [self.description or ""]
        if self.format is not None and self.format.definition:
            parts.append(f"{_TEXT} follows this {self.format.syntax or ''} grammar:\n{self.format.definition}")
        properties = {_TEXT: {"type": "string"}}
        schema = {"type": "object", "properties": properties, "required": [_TEXT], "additionalProperties": False}
        return FunctionFields(name=self.name, description="\n\n".join(filter(None, parts)) or None, parameters=schema)


class Hosted(LenientModel):
    """A tool that runs at OpenAI, its input or result, or the choice of it."""

    type: str


def _kind(given: Any) -> str | None:
    """The type by which pydantic selects the member of a union; the first of `HOSTED` for all of these."""
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    if not isinstance(kind, str):
        return None
    return HOSTED[0] if any(kind == name or kind.startswith(f"{name}_") for name in HOSTED) else kind


_Callable = Annotated[FlatTool | CustomTool, Field(discriminator="type")]


class Namespace(LenientModel):
    """Tools under one name."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Items[_Callable]


Tool: TypeAlias = Annotated[
    Annotated[FlatTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[Hosted, Tag("web_search")],
    Discriminator(_kind),
]


class AdditionalTools(LenientModel):
    """Tools that came with a part of the conversation."""

    type: Literal["additional_tools"]
    tools: Items[Tool]


def _item_kind(given: Any) -> str | None:
    is_message = isinstance(given, dict) and given.get("type") is None and "role" in given
    return "message" if is_message else _kind(given)


Item: TypeAlias = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCustomCall, Tag("custom_tool_call")]
    | Annotated[InputResult, Tag("function_call_output")]
    | Annotated[InputResult, Tag("custom_tool_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[AdditionalTools, Tag("additional_tools")]
    | Annotated[Hosted, Tag("web_search")],
    Discriminator(_item_kind),
]


Input: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[Items[Item], Tag("items")],
    Discriminator(
        lambda given: "text" if isinstance(given, str) else "items" if isinstance(given, list) else None,
        custom_error_type="content",
        custom_error_message="must be a text or a list of items",
    ),
]


class NamedChoice(LenientModel):
    """The function or custom tool that must be called."""

    type: Literal["function", "custom"]
    name: str


class AllowedChoice(LenientModel):
    """Those of the tools that may be called, or must."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[dict[str, Any]]


Choice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedChoice, Tag("function")]
    | Annotated[NamedChoice, Tag("custom")]
    | Annotated[AllowedChoice, Tag("allowed_tools")]
    | Annotated[Hosted, Tag("web_search")],
    Discriminator(lambda given: "word" if isinstance(given, str) else _kind(given)),
]


def flat_name(namespace: str | None, name: str) -> str:
    """The name in a prompt of a function in a namespace.

    Worked example: `read` in `files` is `files__read`, and in `mcp__files__`, as Codex writes it, `mcp__files__read`.
    """
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


@dataclass(frozen=True, slots=True)
class Callable:
    """A tool that may be called; `custom` if its input is a text."""

    function: FunctionFields
    name: str
    namespace: str | None
    custom: bool


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a request, by their names in a prompt, and warnings about ignored ones."""

    callables: dict[str, Callable] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, tools: Sequence[Tool], items: Sequence[Item]) -> Toolbox:
        """From the fields of a request; an `ApiError` if two tools have one name."""
        found = cls()
        for number, tool in enumerate(tools):
            found._add(tool, f"tools[{number}]")
        for place, item in enumerate(items):
            if isinstance(item, AdditionalTools):
                for number, tool in enumerate(item.tools):
                    found._add(tool, f"input[{place}].tools[{number}]")
            elif isinstance(item, Hosted):
                found.warnings.append(f"input[{place}] is left out: {item.type} is of a tool that this server has not")
        return found

    def _add(self, tool: Tool, place: str) -> None:
        if isinstance(tool, Hosted):
            self.warnings.append(f"{place} is left out: {tool.type} is a tool that this server has not")
            return
        namespace = tool.name if isinstance(tool, Namespace) else None
        for each in tool.tools if isinstance(tool, Namespace) else (tool,):
            flat = flat_name(namespace, each.name)
            if flat in self.callables:
                raise invalid(place, f"{place} has the name {quoted(flat)} of a tool before it; rename one")
            function = each.function.model_copy(update={"name": flat})
            self.callables[flat] = Callable(function, each.name, namespace, isinstance(each, CustomTool))

    def use(self, choice: Choice | None) -> tuple[list[FunctionFields], str | NamedFunction | None]:
        """Functions and tool choice in the format of chats; an `ApiError` if none is allowed or an ignored one set."""
        tools, param = {name: each.function for name, each in self.callables.items()}, "tool_choice"
        if isinstance(choice, Hosted):
            raise invalid(param, f"{param} asks for {choice.type}, a tool that this server has not; name a function")
        if isinstance(choice, AllowedChoice):
            allowed = set(self._named(*(str(each.get("name")) for each in choice.tools)))
            tools = {name: tool for name, tool in tools.items() if name in allowed}
            choice = choice.mode
        if choice == "required" and not tools and self.warnings:
            raise invalid(param, f"{param} is required, and this server has none of the tools; give a function")
        if isinstance(choice, NamedChoice):
            return list(tools.values()), NamedFunction(name=next(iter(self._named(choice.name)), choice.name))
        return list(tools.values()), choice

    def _named(self, *names: str) -> list[str]:
        requested = set(names)
        plain = requested & self.callables.keys()
        return [flat for flat, each in self.callables.items() if flat in plain or each.name in requested - plain]


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The conversation in the format of chat templates: the model's output of one turn is one message."""
    found: list[dict[str, Any]] = []
    reasoning = ""  # of the next message
    for item in items:
        if isinstance(item, InputReasoning):
            reasoning += item.text
            continue
        if isinstance(item, InputMessage):
            role = "system" if item.role == "developer" else item.role
            found.append({"role": role, "content": parts_of(item.content or "")})
        elif isinstance(item, InputResult):
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": parts_of(item.output)})
        elif isinstance(item, InputCall | InputCustomCall):
            if not found or found[-1]["role"] != "assistant" or reasoning:
                found.append({"role": "assistant", "content": ""})
            call = called(item.call_id, flat_name(item.namespace, item.name), item.text)
            found[-1].setdefault("tool_calls", []).append(call)
        if reasoning and found and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"] = reasoning
        reasoning = ""
    return found


class TextReader:
    """Reads the text input of a custom tool while its arguments are generated.

    Worked example: of `{"input": "a\\n` it has returned `a` and a line break, and of `{"input": "a\\` only the `a`.
    """

    def __init__(self) -> None:
        self.text = ""  # so far
        self._arguments = ""

    def push(self, arguments: str) -> str:
        """Add text of the arguments; returns the new text of the input."""
        self._arguments += arguments
        try:
            value = from_json(self._arguments, allow_partial="trailing-strings")
        except ValueError:
            return ""
        return self._told(value[_TEXT]) if isinstance(value, dict) and [*value][:1] == [_TEXT] else ""

    def finish(self, arguments: str) -> str:
        """The remaining text: the one text in the arguments, under any name, or the arguments if there is none."""
        value = parsed(arguments)
        texts = [each for each in value.values() if isinstance(each, str)] if isinstance(value, dict) else []
        return self._told(texts[0] if len(texts) == 1 else arguments)

    def _told(self, text: Any) -> str:
        new = text[len(self.text) :] if isinstance(text, str) and text.startswith(self.text) else ""
        self.text += new
        return new
