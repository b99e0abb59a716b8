"""How families of models write calls of functions and their reasoning, told by their chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from truedraft.core.params import Structured
from truedraft.text.calls import Call, CallDelta, CallsReader, overlap
from truedraft.text.forms import JSON_LAYOUT

Schemas: TypeAlias = Mapping[str, Mapping[str, Any] | None]
"""The functions that may be called: by name the JSON schema of each one's arguments, None where it has none."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of an answer that is reasoning.

    Attributes:
        text: of it, without marks.
    """

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What a model writes around its reasoning.

    Attributes:
        opening: before it.
        closing: behind it.
    """

    opening: str
    closing: str

    def opens(self, prompt: str) -> bool:
        """Whether a prompt ends inside reasoning, so that the answer begins there.

        Args:
            prompt: or its end, with its special tokens shown.
        """
        return prompt.rstrip().endswith(self.opening)


@dataclass(frozen=True, slots=True)
class Notation:
    """How calls are written.

    Attributes:
        name: of the notation, as `info` says it.
        shown: texts of which a chat template that teaches it holds all.
        opening: before each call.
        closing: behind it.
        arguments: what the arguments are called in the object that a call is; "" where the name stands before them.
        reasoning: marks around reasoning; None where the template knows none.
    """

    name: str
    shown: tuple[str, ...]
    opening: str
    closing: str
    arguments: str = ""
    reasoning: ReasoningMarks | None = None

    def told(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """What a model is told of the tools whose template does not do it.

        Args:
            tools: in OpenAI's form.
        """
        lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
        form = f'{self.opening}{{"name": NAME, "{self.arguments}": OBJECT}}{self.closing}'
        return "\n".join(["You may call these functions:", *lines, f"To call one, write:\n{form}"])

    def grammar(self, tools: Schemas, *, parallel: bool) -> Structured:
        """Calls of these functions, at least one, in Lark's notation."""
        calls = [json.dumps(self._schema(name, schema), ensure_ascii=False) for name, schema in tools.items()]
        rules = [f"call_{number}: %json {schema}" for number, schema in enumerate(calls)]
        any_call = " | ".join(f"call_{number}" for number in range(len(calls)))
        one = " ".join(part for part in (_literal(self.opening), "any_call", _literal(self.closing)) if part)
        more = f' ("\\n" {one})*' if parallel else ""
        return Structured("grammar", "\n".join([f"start: {one}{more}", f"any_call: {any_call}", *rules]))

    def _schema(self, name: str, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
        """Of a call; what the arguments' schema says of the whole document stands at the top, where it belongs."""
        arguments = dict(parameters or _ANY_ARGUMENTS)
        top: dict[str, Any] = {
            key: arguments.pop(key) for key in ("$defs", "definitions", "$schema", "$id") if key in arguments
        }
        layout = {**JSON_LAYOUT, **(arguments.pop("x-guidance", None) or {})}
        return {
            **top,
            "x-guidance": layout,
            "type": "object",
            "properties": {"name": {"const": name}, self.arguments: arguments},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }


_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


NOTATIONS: tuple[Notation, ...] = (
    Notation("hermes", ("<tool_call>",), "<tool_call>\n", "\n</tool_call>", "arguments"),
    Notation("llama", ("tools", '"parameters"'), "", "", "parameters"),
)
"""The first one whose texts a template holds is its notation."""

UNKNOWN = Notation("text", (), "<tool_call>\n", "\n</tool_call>", "arguments")
"""Where a template shows no known notation: calls come as text, unless the model writes them as it is told."""

REASONING: tuple[ReasoningMarks, ...] = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
)


def notation_of(template: str) -> Notation:
    """The notation that a chat template shows, with its marks of reasoning.

    Args:
        template: its text; of several the joined texts.
    """
    found = next((each for each in NOTATIONS if all(text in template for text in each.shown)), UNKNOWN)
    marks = next((each for each in REASONING if each.opening in template or each.closing in template), None)
    return replace(found, reasoning=marks)


class AnswerReader:
    """Reads text, reasoning and calls from an answer as it comes, the same whatever parts it comes in.

    Reasoning is what stands between its marks at the beginning of an answer. Space around it is left out.

    Args:
        notation: of the model.
        tools: that may be called; none where no call is looked for.
        parallel: whether there may be several calls.
        reasoning_open: whether the prompt ends inside reasoning.

    Attributes:
        calls: that were read to their end, or to the answer's.
    """

    def __init__(
        self, notation: Notation, tools: Schemas | None = None, *, parallel: bool = True, reasoning_open: bool = False
    ) -> None:
        self.calls: list[Call] = []
        self._reader = CallsReader(notation.opening, notation.closing, notation.arguments, tools, parallel, self.calls)
        self._calls = bool(tools)
        self._marks = notation.reasoning
        self._before = self._marks is not None and not reasoning_open  # whether reasoning may still begin
        self._inside = self._marks is not None and reasoning_open
        self._begun = False  # whether any reasoning but space came
        self._trims = False  # whether space behind reasoning is left out
        self._held = ""

    def push(self, text: str, *, last: bool = False) -> list[str | Reasoning | CallDelta]:
        """Take the next text.

        Args:
            text: of the answer.
            last: whether nothing follows.

        Returns:
            Plain text, reasoning, and what came of calls, in order.
        """
        found: list[str | Reasoning | CallDelta] = []
        if self._before or self._inside or self._trims:
            text = self._reason(self._held + text, found, last)
        if self._calls:
            found += self._reader.push(text, last=last)
        elif text:
            found.append(text)
        return found

    def _reason(self, text: str, found: list[str | Reasoning | CallDelta], last: bool) -> str:
        """Take reasoning from the beginning of a text, or hold it back; returns what is behind."""
        assert self._marks is not None
        opening, closing = self._marks.opening, self._marks.closing
        self._held = ""
        if self._before or (self._inside and not self._begun):  # some write the mark though the prompt ends with it
            start = text.lstrip()
            if opening.startswith(start) and start != opening and not last:
                self._held = text
                return ""
            if start.startswith(opening):
                text, self._inside = start.removeprefix(opening), True
            self._before = False
        if self._inside:
            end = text.find(closing)
            inside = text if end < 0 else text[:end]
            kept = overlap(inside, closing) if end < 0 and not last else 0
            inside = inside[: len(inside) - kept]
            shown = inside.rstrip() if self._begun else inside.strip()
            if end < 0:
                self._held = text[len(inside.rstrip()) :]
            if shown:
                self._begun = True
                found.append(Reasoning(shown))
            if end < 0:
                return ""
            self._inside, self._trims = False, True
            text = text[end + len(closing) :]
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text
