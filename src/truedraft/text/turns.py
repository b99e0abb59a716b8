"""Conversations in a plainer form, for chat templates that refuse them as they are.

Agents send several messages of the user in a row, and messages of the system between others; the templates of some
families want turns that alternate, or one message of the system, or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def plainer(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Forms to try in turn where a template refuses messages: each says the same with fewer kinds of turns.

    Messages of the system behind the first become the user's, those of the user in a row become one, empty ones of the
    assistant go, and so does reasoning beside a text and calls. The second form has no message of the system's at all.

    Worked example: of system `a`, user `b`, user `c`, system `d` the first form is system `a`, user `b c d`, and the
    second user `a b c d`, with an empty line between each two.
    """
    yield _plain(messages, system=True)
    if messages and messages[0]["role"] == "system":
        yield _plain(messages, system=False)


def _plain(messages: Sequence[Mapping[str, Any]], *, system: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        made = dict(message)
        if made["role"] == "system" and not (system and place == 0):
            made["role"] = "user"
        if made.get("tool_calls") and made.get("content"):
            made.pop("reasoning_content", None)
        if made["role"] == "assistant" and not any(map(made.get, ("content", "tool_calls", "reasoning_content"))):
            continue
        before = found[-1] if found else {}
        if made["role"] == "user" == before.get("role") and _is_text(made) and _is_text(before):
            before["content"] = f"{before['content']}\n\n{made['content']}"
        else:
            found.append(made)
    return found


def _is_text(message: Mapping[str, Any]) -> bool:
    return isinstance(message["content"], str)
