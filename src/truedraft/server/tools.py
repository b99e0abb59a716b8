"""Functions that a model may call: told to it by the chat template, asked for by a grammar, and read from its text.

How calls are written is told by the template. A call that must come (`tool_choice` "required", or a function by name)
is made to have that form by a grammar, arguments included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from truedraft.core.params import SamplingParams, Structured
from truedraft.server.errors import ApiError
from truedraft.server.fields import Fields
from truedraft.text.calls import parsed
from truedraft.text.notations import AnswerReader, Notation


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
class ToolUse:
    """What of tools a request asks for.

    Attributes:
        notation: in which the model writes calls and reasoning.
        tools: that may be called; none where no call can come.
        forced: the form of calls that must come; None leaves it to the model.
        parallel: whether there may be several.
    """

    notation: Notation
    tools: Sequence[ToolFields] = ()
    forced: Structured | None = None
    parallel: bool = True

    @classmethod
    def of(
        cls,
        tools: Sequence[ToolFields] | None,
        choice: str | NamedTool | None,
        parallel: bool | None,
        notation: Notation,
    ) -> ToolUse:
        """From the fields of a request.

        Raises:
            ApiError: there are no tools to choose from, or none of that name.
        """
        if not tools and choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice asks for a call and tools is empty; list tools there", param="tool_choice")
        if not tools or choice == "none":
            return cls(notation)
        several = parallel is not False
        if choice in (None, "auto"):
            return cls(notation, tools, None, several)
        if isinstance(choice, NamedTool):
            named = [tool for tool in tools if tool.function.name == choice.function.name]
            if not named:
                known = ", ".join(repr(tool.function.name) for tool in tools)
                message = f"tool_choice names {choice.function.name!r}; tools has {known}"
                raise ApiError(400, message, param="tool_choice")
            return cls(notation, tools, notation.grammar(schemas_of(named), parallel=False), False)
        return cls(notation, tools, notation.grammar(schemas_of(tools), parallel=several), several)

    def fitted(self, params: SamplingParams) -> SamplingParams:
        """Options of an answer whose form, if that is not one of calls, stands where the notation has plain text."""
        if self.forced is not None or params.structured is None:
            return params
        return replace(params, structured=self.notation.answered(params.structured))

    def reader(self, *, reasoning_open: bool = False) -> AnswerReader:
        """Of one answer.

        Args:
            reasoning_open: whether the prompt ends inside reasoning.
        """
        return AnswerReader(
            self.notation,
            schemas_of(self.tools),
            parallel=self.parallel,
            reasoning_open=reasoning_open,
            calls_alone=self.forced is not None,
        )


def schemas_of(tools: Sequence[ToolFields]) -> dict[str, dict[str, Any] | None]:
    """The schema of each function's arguments, by its name."""
    return {tool.function.name: tool.function.parameters for tool in tools}


def arguments_for_template(text: str) -> Any:
    """The arguments of an earlier call as chat templates want them: as an object, where they are one."""
    value = parsed(text)
    return value if isinstance(value, dict) else text
