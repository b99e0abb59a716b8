"""Conversations go through each family's template, whatever it wants of calls and turns."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from support.byte_tokenizers import byte_tokenizer
from text.tiny_tokenizers import byte_level
from truedraft.errors import PromptError
from truedraft.text import Tokenizer
from truedraft.text.histories import HistoryForm, plainer
from truedraft.text.notations import UNKNOWN, notation_of

TEMPLATES = Path(__file__).parent / "templates"
FORMS = {
    "minimal-deepseek-v3": HistoryForm(text_arguments=True, null_content=True),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": HistoryForm(null_content=True),
    "mistralai-Mistral-Nemo-Instruct-2407": HistoryForm(short_ids=True),
    "Mistral-Small-3.2-24B-Instruct-2506": HistoryForm(short_ids=True),
    "openai-gpt-oss-120b": HistoryForm(one_call=True, whole_tools=True),
    "GigaChat3-10B-A1.8B": HistoryForm(one_call=True),
    "minimal-llama-3.1": HistoryForm(one_call=True),
    "Apertus-8B-Instruct": HistoryForm(whole_tools=True),
    "ByteDance-Seed-OSS": HistoryForm(whole_tools=True),
    "meetkai-functionary-medium-v3.1": HistoryForm(whole_tools=True),
    "HuggingFaceTB-SmolLM3-3B": HistoryForm(calls_as_text=True),
    "ibm-granite-granite-3.3-2B-Instruct": HistoryForm(calls_as_text=True),
    "llama-cpp-rwkv-world": HistoryForm(calls_as_text=True, results_as_user=True),
    "microsoft-Phi-3.5-mini-instruct": HistoryForm(calls_as_text=True, results_as_user=True),
}
REFUSED = {"Kimi-K2-Instruct"}  # it changes a list, which transformers allows no template


TOOLS = [{"type": "function", "function": {"name": "probe"}}]


def turns() -> list[dict[str, Any]]:
    """Two calls of a turn, whose content is null, and their results."""
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": {"word": word}}}
        for number, (name, word) in enumerate([("probe", "Apfel"), ("other", "Birne")])
    ]
    results = [
        {"role": "tool", "tool_call_id": f"call_{number}", "name": name, "content": f"result {number}"}
        for number, name in enumerate(("probe", "other"))
    ]
    asked = {"role": "user", "content": "Go."}
    return [asked, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


@pytest.mark.parametrize("name", sorted({path.stem for path in TEMPLATES.glob("*.jinja")} - REFUSED))
def test_earlier_calls_stand_in_the_prompt(name: str) -> None:
    template = (TEMPLATES / f"{name}.jinja").read_text()

    def render(messages: Any, tools: Any) -> str:
        return byte_tokenizer("").chat_text(messages, tools=tools, template=template)

    form = HistoryForm.of(render)
    assert form == FORMS.get(name, HistoryForm())
    text = render(form.fitted(turns(), notation_of(template)), form.tools(TOOLS))
    behind = text[text.rindex("Go.") :] if "Apfel" in text[text.rindex("Go.") :] else text
    for word in ("Apfel", "Birne", "result 0", "result 1"):
        assert word in behind
    cut = turns()
    for call, arguments in zip(cut[1]["tool_calls"], ('{"word": "Zwet', ""), strict=True):
        call["function"]["arguments"] = arguments
    text = render(form.fitted(cut, notation_of(template)), form.tools(TOOLS))
    assert all(word in text for word in ("probe", "Zwet", "other", "result 1")), "as of an answer that was cut"
    assert "None" not in behind and "{'word'" not in behind and '\\"word' not in behind


def test_pictures_stay_where_calls_or_results_become_text() -> None:
    """Contents of parts are not written out as Python writes lists."""
    asked, calling, *results = turns()
    picture, text = {"type": "image"}, {"type": "text", "text": "Look."}
    told = [asked, calling | {"content": [text, picture]}, *(each | {"content": [picture]} for each in results)]
    fitted = HistoryForm(calls_as_text=True, results_as_user=True).fitted(told, UNKNOWN)
    assert [message["role"] for message in fitted] == ["user", "assistant", "user"]
    assert fitted[1]["content"][:2] == [text, picture]
    assert "Apfel" in fitted[1]["content"][-1]["text"]
    parts = [part.get("text", picture) for part in fitted[2]["content"]]
    opening, closing = "<tool_response>\n", "\n</tool_response>"
    assert parts == [opening, picture, closing, "\n", opening, picture, closing]


def test_results_follow_their_calls_where_a_message_has_one() -> None:
    fitted = HistoryForm(one_call=True, short_ids=True, text_arguments=True).fitted(turns(), UNKNOWN)
    assert [message["role"] for message in fitted] == ["user", "assistant", "tool", "assistant", "tool"]
    ids = [message["tool_calls"][0]["id"] for message in fitted[1::2]]
    assert ids == [message["tool_call_id"] for message in fitted[2::2]]
    assert all(len(each) == 9 and each.isalnum() for each in ids) and len(set(ids)) == 2
    assert fitted[1]["tool_calls"][0]["function"]["arguments"] == '{"word": "Apfel"}'


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
