"""Conversations in the form that a chat template accepts: calls as in a small conversation that it renders.

If a template rejects a conversation, simpler ones are tried: agents send several user messages in a row, and system
messages between others, but some templates require alternating turns, or a single system message, or none.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from truedraft.errors import PromptError, PromptLengthError
from truedraft.text.notations import Notation

Render: TypeAlias = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]
"""Renders messages and tools by a template; raises PromptError if the template rejects them."""
_Read = TypeVar("_Read")

_ARGUMENTS = {"probe": "value"}
_ARGUMENTS_TEXT = json.dumps(_ARGUMENTS)
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_BARE_TOOLS = [{"type": "function", "function": {"name": "probe"}}]
_WHOLE_TOOLS = [{"type": "function", "function": {"name": "probe", "description": "", "parameters": _NO_PARAMETERS}}]
_SHORT_ID, _LONG_ID = "abcdefghi", "call_0123456789abcdef01234567"
_SHORT = 9  # characters of ids, as Mistral's templates require


@dataclass(frozen=True, slots=True)
class HistoryForm:
    """What a template requires of messages with calls, and of tools."""

    text_arguments: bool = False  # arguments as JSON text; otherwise as an object
    null_content: bool = False  # null for missing content; otherwise an empty text
    short_ids: bool = False  # of nine letters and digits
    one_call: bool = False  # per message, each followed by its result
    whole_tools: bool = False  # a description and parameters for each tool, even if empty
    calls_as_text: bool = False  # in the text of their message, because the template drops them
    results_as_user: bool = False  # in a user message, because the template accepts no tool messages

    @classmethod
    def of(cls, render: Render) -> HistoryForm:
        """The form that a template accepts; the plain one if it accepts none."""

        def rendered(*turns: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = _WHOLE_TOOLS) -> str:
            try:
                return render([{"role": "user", "content": "question"}, *turns], tools)
            except PromptError:
                return ""

        def shown(arguments: Any, content: Any, identity: str = _SHORT_ID, calls: int = 1) -> str:
            records, results = list[Any](), list[Any]()
            for number in range(calls):
                name, each = f"called_{number}", identity[:-1] + str(number)
                records.append({"id": each, "type": "function", "function": {"name": name, "arguments": arguments}})
                results.append({"role": "tool", "name": name, "tool_call_id": each, "content": "result"})
            return rendered({"role": "assistant", "content": content, "tool_calls": records}, *results)

        def is_whole(text: str, arguments: Any) -> bool:
            expected = "value" if arguments is _ARGUMENTS else _ARGUMENTS_TEXT
            known = "called_0" in text and expected in text
            return known and "{'probe'" not in text and text.count("None") <= none

        none = rendered().count("None")
        whole = not rendered(tools=_BARE_TOOLS) and bool(rendered())
        for content, arguments in itertools.product(("", None), (_ARGUMENTS, _ARGUMENTS_TEXT)):
            if is_whole(shown(arguments, content), arguments):
                null = shown(arguments, None)
                return cls(
                    text_arguments=arguments is _ARGUMENTS_TEXT,
                    null_content=is_whole(null, arguments) and null != shown(arguments, ""),
                    short_ids=not shown(arguments, content, _LONG_ID),
                    one_call="called_1" not in shown(arguments, content, calls=2),
                    whole_tools=whole,
                )
        result = {"role": "tool", "name": "probe", "tool_call_id": _SHORT_ID, "content": "result"}
        separate = "result" in rendered({"role": "assistant", "content": "said"}, result)
        return cls(whole_tools=whole, calls_as_text=True, results_as_user=not separate)

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        added: Mapping[str, Any] = {"description": "", "parameters": _NO_PARAMETERS} if self.whole_tools else {}
        return [{**tool, "function": {**added, **tool["function"]}} for tool in tools]

    def fitted(self, messages: Sequence[Mapping[str, Any]], notation: Notation) -> list[dict[str, Any]]:
        """Messages in OpenAI's format in this form; arguments are objects if they can be."""
        found = [self._fitted(message) for message in messages]
        if self.calls_as_text:
            found = [_with_calls_as_text(message, notation) for message in found]
        if self.results_as_user:
            found = list(_as_users(found))
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
        arguments = function["arguments"] or {}
        if not isinstance(arguments, dict):  # as of a truncated answer; many templates accept only objects
            arguments = arguments if self.text_arguments else {"arguments": arguments}
        elif self.text_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function["arguments"] = arguments
        identity = {"id": _short(call.get("id") or "")} if self.short_ids else {}
        return {**call, **identity, "function": function}


def _short(identity: str) -> str:
    if len(identity) == _SHORT and identity.isalnum():
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:_SHORT]


def _with_calls_as_text(message: dict[str, Any], notation: Notation) -> dict[str, Any]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    if not functions:
        return message
    calls = [(each["name"], each["arguments"]) for each in functions]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    written = notation.written(calls)
    return {**rest, "content": _concatenated(message["content"], "\n", written) if message["content"] else written}


def _as_users(messages: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Messages with tool results moved to user messages, one for consecutive results."""
    for is_result, group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            pieces = [("<tool_response>\n", each["content"], "\n</tool_response>") for each in group]
            lines = itertools.chain(pieces[0], *(("\n", *each) for each in pieces[1:]))
            yield {"role": "user", "content": _concatenated(*lines)}
        else:
            yield from group


def _concatenated(*contents: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Contents concatenated: a text, or a list of parts if one of them is such a list, as with pictures."""
    texts = [each for each in contents if isinstance(each, str)]
    if len(texts) == len(contents):
        return "".join(texts)
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents]
    return list(itertools.chain.from_iterable(parts))


def _one_by_one(messages: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Split messages of several calls into one message per call, each followed by its result."""
    results: dict[str, list[int]] = {}  # by call id the unused positions of results, in descending order
    for place, message in reversed(list(enumerate(messages))):
        if identity := message.get("tool_call_id"):
            results.setdefault(identity, []).append(place)
    emitted = set[int]()  # positions of results already emitted after their calls
    for place, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            if place not in emitted:
                yield message
            continue
        for number, call in enumerate(calls):
            yield {**message, "tool_calls": [call]} | ({"content": ""} if number else {})
            left = results.get(call.get("id"), [])
            while left and left[-1] < place:
                left.pop()
            if left:
                emitted.add(left[-1])
                yield messages[left.pop()]


def first_taken(messages: Sequence[Mapping[str, Any]], read: Callable[[Sequence[Mapping[str, Any]]], _Read]) -> _Read:
    """Read the messages, or the first simpler form of them that the template accepts; else raise the first error."""
    refused: PromptError | None = None
    for form in itertools.chain([messages], plainer(messages)):
        try:
            return read(form)
        except PromptLengthError:
            raise
        except PromptError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def plainer(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Simpler forms to try in turn if a template rejects messages: the same content with fewer kinds of turns.

    System messages after the first become user messages, consecutive user messages are joined, empty assistant messages
    are dropped, and so is reasoning in messages with both text and calls. The second form has no system message.

    Worked example: of system `a`, user `b`, user `c`, system `d` the first form is system `a`, user `b c d`, and the
    second user `a b c d`, with an empty line between each two.
    """
    yield _plain(messages, system=True)
    if messages and messages[0]["role"] == "system":
        yield _plain(messages, system=False)


def _plain(messages: Sequence[Mapping[str, Any]], *, system: bool) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        made = dict(message)
        if made["role"] == "system" and not (system and place == 0):
            made["role"] = "user"
        if made.get("tool_calls") and made.get("content"):
            made.pop("reasoning_content", None)
        if not says_nothing(made):
            kept.append(made)
    found: list[dict[str, Any]] = []
    for joins, group in itertools.groupby(kept, lambda each: (each["role"], type(each["content"])) == ("user", str)):
        turn = list(group)
        found += [turn[0] | {"content": "\n\n".join(each["content"] for each in turn)}] if joins else turn
    return found


def says_nothing(message: Mapping[str, Any]) -> bool:
    """Whether this is an empty message of the assistant."""
    return message["role"] == "assistant" and not any(map(message.get, ("content", "tool_calls", "reasoning_content")))
