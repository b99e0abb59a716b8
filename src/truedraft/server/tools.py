"""Functions that a model may call: described by the chat template, required by a grammar, and parsed from the text.

The template defines the format of calls. A required call (`tool_choice` "required", or a function by name) is forced
by a grammar, arguments included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from truedraft.core.params import SamplingParams, Structured
from truedraft.server.errors import ApiError, quoted
from truedraft.server.fields import Fields
from truedraft.text.calls import Call, parsed
from truedraft.text.notations import Notation
from truedraft.text.schemas import misfit, unheld

MOST_TOOLS = 1024
"""Limit of functions per request, including those in namespaces and in the conversation."""


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise ValueError(f"must be the schema of an object, got one of type {quoted(kind)}")
    return schema


FunctionName = Annotated[str, Field(min_length=1)]
Parameters = Annotated[dict[str, Any], AfterValidator(_of_an_object)]
"""The schema of a function's arguments, which are an object."""


class FunctionFields(Fields):
    """A function that may be called."""

    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
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
class ToolUse:
    """The requested use of tools.

    Attributes:
        tools: that may be called; empty if no call is possible.
        forced: grammar of required calls; None leaves calls to the model.
        parallel: whether several calls are allowed.
        unheld: required functions with free arguments, because no grammar supports their schema; the reasons by name.
    """

    notation: Notation
    tools: Sequence[FunctionFields] = ()
    forced: Structured | None = None
    parallel: bool = True
    unheld: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tools: Sequence[FunctionFields],
        choice: str | NamedFunction | None,
        parallel: bool | None,
        notation: Notation,
        fields: tuple[str, str] = ("tools", "tool_choice"),
    ) -> ToolUse:
        """From the fields of a request.

        Args:
            parallel: whether several calls are allowed; None allows them.
            fields: the client's names of the fields for tools and tool choice.

        Raises:
            ApiError: there are no tools to choose from, none of that name, or two with one name.
        """
        listed, chosen = fields
        if not tools and choice not in (None, "none", "auto"):
            raise ApiError(400, f"{chosen} asks for a call and {listed} is empty; list tools there", param=chosen)
        if len(tools) > MOST_TOOLS:
            raise ApiError(400, f"{listed} holds {len(tools)} functions, of at most {MOST_TOOLS}", param=listed)
        names = Counter(tool.name for tool in tools)
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise ApiError(
                400, f"{listed} has two functions called {quoted(twice)}; rename or leave out one", param=listed
            )
        if not tools or choice == "none":
            return cls(notation)
        several = parallel is not False
        if choice in (None, "auto"):
            return cls(notation, tools, None, several)
        if isinstance(choice, NamedFunction):
            named = [tool for tool in tools if tool.name == choice.name]
            if not named:
                message = f"{chosen} names {quoted(choice.name)}; {listed} has {', '.join(map(quoted, names))}"
                raise ApiError(400, message, param=chosen)
            return cls(notation, tools, notation.grammar(schemas_of(named), parallel=False), False)
        schemas = schemas_of(tools)
        free = (
            {}
            if len(tools) == 1
            else {name: why for name, schema in schemas.items() if schema and (why := unheld(schema))}
        )
        form = notation.grammar(schemas | dict.fromkeys(free), parallel=several)
        return cls(notation, tools, form, several, free)

    @property
    def warnings(self) -> list[str]:
        """Warnings about functions with free arguments."""
        return [
            f"{name} is called with free arguments, which are checked: its schema, {why}"
            for name, why in self.unheld.items()
        ]

    def misfits(self, calls: Iterable[Call]) -> list[str]:
        """What is wrong with the arguments of calls that no grammar enforced."""
        found, schemas = [], schemas_of(self.tools)
        for call in (each for each in calls if self.forced is None or each.name in self.unheld):
            schema, value = schemas.get(call.name), parsed(call.arguments)
            if not schema or value is None:
                continue
            try:
                if wrong := misfit(schema, value):
                    found.append(f"{call.id} calls {call.name} with arguments that do not match its schema: {wrong}")
            except ValueError as error:
                found.append(f"the arguments of {call.id}, which calls {call.name}, were not checked: {error}")
        return found

    def fitted(self, params: SamplingParams) -> SamplingParams:
        """Options with the grammar of an answer's text, if there is one, embedded in the notation."""
        if self.forced is not None or params.structured is None:
            return params
        return replace(params, structured=self.notation.answered(params.structured))


def schemas_of(tools: Sequence[FunctionFields]) -> dict[str, dict[str, Any] | None]:
    """The schema of each function's arguments, by name."""
    return {tool.name: tool.parameters for tool in tools}


def called(identity: str | None, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """An earlier call in the format of chat templates: its arguments as an object, if they are one."""
    value = parsed(arguments) if isinstance(arguments, str) else arguments
    function = {"name": name, "arguments": value if isinstance(value, dict) else arguments}
    return ({} if identity is None else {"id": identity}) | {"type": "function", "function": function}
