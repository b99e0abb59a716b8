"""What agents send, through chat templates that refuse it as it is."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from text.tiny_tokenizers import byte_level
from truedraft.errors import PromptError
from truedraft.text import Tokenizer
from truedraft.text.histories import plainer

TEMPLATES = Path(__file__).parent / "templates"
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "one"}


def said(*turns: str) -> list[dict[str, Any]]:
    """Messages, by the first letter of their role and their text."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[turn[0]], "content": turn[1:]} for turn in turns]


NO_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' or (message.role == 'user') == loop.index0 % 2 %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)


def calling(**more: Any) -> list[dict[str, Any]]:
    """A turn with a text and a call, and the result."""
    return [*said("uwhat"), {"role": "assistant", "content": "look", "tool_calls": [CALL], **more}, RESULT]


def test_a_template_that_refuses_gets_a_plainer_form() -> None:
    for name, messages, form in (
        ("mistralai-Mistral-Nemo-Instruct-2407", said("srule", "uwhere", "uwhat"), said("srule", "uwhere\n\nwhat")),
        ("Qwen3.5-4B", said("srule", "uwhat", "slate"), said("srule", "uwhat\n\nlate")),
        ("", said("srule", "uwhat", "aso", "uand"), said("urule\n\nwhat", "aso", "uand")),
        ("openai-gpt-oss-120b", calling(reasoning_content="why"), calling()),
    ):
        template = (TEMPLATES / f"{name}.jinja").read_text() if name else NO_SYSTEM
        tokenizer = Tokenizer(byte_level())
        with pytest.raises(PromptError):
            tokenizer.chat(messages, template=template)
        taken = []
        for each in plainer(messages):
            with contextlib.suppress(PromptError):
                taken.append((each, tokenizer.chat_text(each, template=template)))
        told, text = taken[0]
        assert told == form and all(message["content"] in text for message in form)


def test_what_says_nothing_goes_and_pictures_stay_apart() -> None:
    seen = {"role": "user", "content": [{"type": "image"}]}
    messages = [*said("ua"), seen, *said("uc", "a", "ud")]
    (found,) = plainer(messages)
    assert found == [*said("ua"), seen, *said("uc\n\nd")]
    assert messages == [*said("ua"), seen, *said("uc", "a", "ud")], "what was given stays as it is"
