"""Chats of training data in the model's chat template: as texts, answers included, or as prompts for the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from truedraft.errors import DataError, PromptError
from truedraft.text.histories import HistoryForm
from truedraft.text.notations import notation_of
from truedraft.text.tokenizer import Tokenizer

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
"""Maps the role names of OpenAI's and ShareGPT's messages."""
FIELDS = ("messages", "conversations")
_Written = TypeVar("_Written")


class ChatTexts:
    """Formats chats with the chat template of a tokenizer from transformers; None refuses all chats."""

    def __init__(self, backend: Any | None) -> None:
        name = getattr(backend, "name_or_path", "") or "the model"
        self._tokenizer = None if backend is None else Tokenizer(backend, name)

    @cached_property
    def _form(self) -> HistoryForm:
        assert self._tokenizer is not None
        return HistoryForm.of(self._tokenizer.conversation_text)

    def text(self, record: Sequence[Any] | Mapping[str, Any], place: str) -> str:
        """The text of a chat at `place`: messages, or an object with them as "messages" or "conversations".

        The object may have "system" and "tools". DataError if it is no chat, or without a template that takes it.
        """
        return self._written(
            record, place, lambda tokenizer, messages, tools: tokenizer.conversation_text(messages, tools)
        )

    def prompt(self, record: object, place: str) -> list[int] | None:
        """Ids of a prompt: an object with "prompt", or a chat that ends with a question; None for a document.

        "prompt" is a user's message where there is a chat template, otherwise a text to continue; or token ids.
        DataError as in `text`, or for an empty or other prompt.
        """
        if isinstance(record, Mapping) and "prompt" in record and "text" not in record:
            content = record["prompt"]
            if content and isinstance(content, list) and all(type(token) is int for token in content):
                return content
            if not isinstance(content, str) or not content.strip():
                raise DataError(f'{place}: "prompt" must be a text that is not empty, or a list of token ids')
            if self._tokenizer is not None and not self._tokenizer.chat_template:
                return self._tokenizer.encode(content)
            record = [{"role": "user", "content": content}]
        messages = _messages_of(record)
        last = messages[-1] if isinstance(messages, list) and messages else None
        role = last.get("role", last.get("from")) if isinstance(last, Mapping) else None
        if not isinstance(role, str) or ROLES.get(role, "assistant") == "assistant":
            return None
        return self._written(record, place, lambda tokenizer, messages, tools: tokenizer.chat(messages, tools=tools))

    def _written(
        self,
        record: Any,
        place: str,
        write: Callable[[Tokenizer, Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], _Written],
    ) -> _Written:
        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise DataError(
                f"{place}: a chat, and there is no chat template to write it by; give texts, or train for a model that "
                "has one"
            )
        more: Mapping[str, Any] = record if isinstance(record, Mapping) else {}
        given = _messages_of(record)
        if not isinstance(given, list) or not given:
            raise DataError(f"{place}: the messages of a chat are a list of at least one, got {_shown(given)}")
        try:
            messages = [_message(turn, f"{place}, message {number}") for number, turn in enumerate(given, start=1)]
            if isinstance(more.get("system"), str) and more["system"] and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": more["system"]})
            tools = self._form.tools(_read(more.get("tools")) or ())
            fitted = self._form.fitted(messages, notation_of(self._tokenizer.chat_template))
            return write(self._tokenizer, fitted, tools or None)
        except DataError:
            raise
        except PromptError as error:
            raise DataError(f"{place}: {error}") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f'{place}: its tools or "tool_calls" are not in OpenAI\'s form ({error!r})') from error


def _messages_of(record: Any) -> Any:
    return next((record[name] for name in FIELDS if name in record), record) if isinstance(record, Mapping) else record


def _message(turn: object, place: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise DataError(f'{place}: an object with "role" and "content", or "from" and "value", got {_shown(turn)}')
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"{place}: the role {_shown(role)} is unknown; known: {', '.join(ROLES)}")
    content = _content(turn.get("content", turn.get("value")), place)
    if content is None and not turn.get("tool_calls"):
        raise DataError(f'{place}: there is no "content" or "value" that is a text; add it')
    kept = {name: value for name, value in turn.items() if name not in ("from", "value") and value is not None}
    if kept.get("tool_calls"):
        kept["tool_calls"] = [_call(call) for call in kept["tool_calls"]]
    return {**kept, "role": ROLES[role], "content": content or ""}


def _content(content: object, place: str) -> str | None:
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{place}: training reads text alone, and a part of the content is none; leave the chat out")
    return "".join(map(str, texts))


def _call(call: Any) -> Any:
    function = call["function"] if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": _read(function.get("arguments"))}}


def _read(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
