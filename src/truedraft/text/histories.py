"""Earlier calls of a conversation in the form that a chat template takes, found out by rendering a small one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from truedraft.errors import PromptError

Render: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], str]
"""The text that a template makes of messages; a PromptError where it refuses them."""

_ARGUMENTS = {"probe": "value"}
_ARGUMENTS_TEXT = json.dumps(_ARGUMENTS)
_SHORT_ID, _LONG_ID = "abcdefghi", "call_0123456789abcdef01234567"
_SHORT = 9  # characters of the ids that Mistral's templates insist on


@dataclass(frozen=True, slots=True)
class HistoryForm:
    """What a template wants of messages with calls.

    Attributes:
        text_arguments: arguments as JSON text; else as an object.
        null_content: null where there is no content; else an empty text.
        short_ids: ids of nine letters and digits.
        one_call: one call in a message, each followed by its result.
    """

    text_arguments: bool = False
    null_content: bool = False
    short_ids: bool = False
    one_call: bool = False

    @classmethod
    def of(cls, render: Render) -> HistoryForm:
        """The form that a template takes; the plain one where it takes none."""

        def shown(*, arguments: Any = _ARGUMENTS, content: Any = "", identity: str = _SHORT_ID, calls: int = 1) -> str:
            """What it makes of a small history; "" where it refuses it."""
            numbered = [(f"probe_{number}", identity[:-1] + str(number)) for number in range(calls)]
            records = [
                {"id": each, "type": "function", "function": {"name": name, "arguments": arguments}}
                for name, each in numbered
            ]
            results = [
                {"role": "tool", "name": name, "tool_call_id": each, "content": "result"} for name, each in numbered
            ]
            turn = {"role": "assistant", "content": content, "tool_calls": records}
            try:
                return render([{"role": "user", "content": "question"}, turn, *results])
            except PromptError:
                return ""

        as_object, as_text = shown(), shown(arguments=_ARGUMENTS_TEXT)
        text = (not as_object or "{'probe'" in as_object) and _ARGUMENTS_TEXT in as_text
        given: Any = _ARGUMENTS_TEXT if text else _ARGUMENTS
        empty, null = shown(arguments=given), shown(arguments=given, content=None)
        return cls(
            text_arguments=text,
            null_content=bool(null) and null != empty and null.count("None") <= empty.count("None"),
            short_ids=bool(empty) and not shown(arguments=given, identity=_LONG_ID),
            one_call=bool(empty) and "probe_1" not in shown(arguments=given, calls=2),
        )

    def fitted(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages in this form.

        Args:
            messages: in OpenAI's form, with arguments as objects where they are such.
        """
        found = [self._fitted(message) for message in messages]
        return list(_one_by_one(found)) if self.one_call else found

    def _fitted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        made = dict(message)
        if self.short_ids and made.get("tool_call_id"):
            made["tool_call_id"] = _short(made["tool_call_id"])
        if not made.get("tool_calls"):
            return made
        made["tool_calls"] = [self._call(call) for call in made["tool_calls"]]
        if not made.get("content"):
            made["content"] = None if self.null_content else ""
        return made

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if self.text_arguments and not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        identity = {"id": _short(call["id"])} if self.short_ids else {}
        return {**call, **identity, "function": function}


def _short(identity: str) -> str:
    """An id of nine letters and digits, the same for the same one."""
    if len(identity) == _SHORT and identity.isalnum():
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:_SHORT]


def _one_by_one(messages: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Messages of several calls as several messages, each followed by the result of its call."""
    waiting = list(messages)
    while waiting:
        message = waiting.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        for number, call in enumerate(calls):
            yield {**message, "tool_calls": [call]} | ({"content": ""} if number else {})
            result = next((each for each in waiting if each.get("tool_call_id") == call["id"]), None)
            if result is not None:
                waiting.remove(result)
                yield result
