"""Chats in data files: read by the model's chat template wherever drafters are trained, or refused in words."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from truedraft.errors import DataError
from truedraft.training import drafts, heads, ngrams
from truedraft.training.texts.answer_writer import Source
from truedraft.training.texts.data import read_data, read_texts, save_tokenizer
from truedraft.training.texts.prompts import PromptCounts

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' and loop.first %}{{ raise_exception('a tool begins') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or () %}"
    "!{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
SHAREGPT = {"conversations": [{"from": "human", "value": "add one"}, {"from": "gpt", "value": "def add_one"}]}
OPENAI = {"messages": [{"role": "user", "content": "add one"}, {"role": "assistant", "content": "def add_one"}]}
WRITTEN = "[user]add one\n[assistant]def add_one\n"


@pytest.fixture(scope="module")
def chatty(tokenizer: Any) -> Any:
    """A tokenizer with a chat template."""
    found = copy.deepcopy(tokenizer)
    found.chat_template = TEMPLATE
    return found


def written(folder: Path, content: object, name: str = "chats.json") -> Path:
    """A data file: an array, or an object a line."""
    lines = content if name.endswith("l") and isinstance(content, list) else [content]
    (folder / name).write_text("\n".join(map(json.dumps, lines)))
    return folder / name


CALLED = {
    "system": "be brief",
    "conversations": [
        {"role": "user", "content": [{"type": "text", "text": "add"}, {"type": "text", "text": " two"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"of": 2}'}}],
        },
        {"role": "tool", "content": "4"},
    ],
}


def test_chats_are_written_by_the_template(chatty: Any, tmp_path: Path) -> None:
    """One chat, and plain texts, may be an array."""
    chats = [SHAREGPT, OPENAI, OPENAI["messages"], {"text": "plain\u2028text"}, CALLED]
    called = '[system]be brief\n[user]add two\n[assistant]!f{"of": 2}\n[tool]4\n'
    for name in ("chats.json", "chats.jsonl"):
        assert read_texts([written(tmp_path, chats, name)], chatty) == [*[WRITTEN] * 3, "plain\u2028text", called]
    assert read_texts([written(tmp_path, OPENAI["messages"])], chatty) == [WRITTEN]
    assert read_texts([written(tmp_path, ["one", {"text": "two"}])], chatty) == ["one", "two"]


def test_prompts_are_told_from_texts_and_written_by_the_template(tokenizer: Any, chatty: Any, tmp_path: Path) -> None:
    asked = {"messages": [*OPENAI["messages"], {"role": "user", "content": "and two"}]}
    entries = [{"prompt": "add one"}, OPENAI, asked, {"prompt": [5, 6]}, {"text": "plain", "prompt": "left alone"}]
    texts, prompts = read_data([written(tmp_path, entries)], chatty)
    assert texts == [WRITTEN, "plain"] and prompts[2] == [5, 6]
    written_out = ["[user]add one\n[assistant]", f"{WRITTEN}[user]and two\n[assistant]"]
    assert [chatty.decode(each) for each in prompts[:2]] == written_out
    _, bare = read_data([written(tmp_path, entries[:1])], tokenizer)
    assert tokenizer.decode(bare[0]) == "add one", "without a template a prompt is the text as it stands"
    with pytest.raises(DataError, match="a chat, and there is no chat template"):
        read_data([written(tmp_path, [asked])], tokenizer)
    for bad in ("  ", [], [1, "x"], None):
        with pytest.raises(DataError, match='1: "prompt" must be a text that is not empty, or a list of token ids'):
            read_data([written(tmp_path, [{"prompt": bad}])], chatty)
    with pytest.raises(DataError, match='the object has no "text" field'):
        read_texts([written(tmp_path, entries[:1])], chatty)


def said(role: object, content: object = "x") -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "x"}, {"role": role, "content": content}]}


def calling(calls: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"messages": []}, "a .json file of training data is an array of texts or chats; rename it to .txt"),
        ([OPENAI, said("bard")], "entry 2, message 2: the role 'bard' is unknown; known: system, developer, user, "),
        ([said("user", None)], 'entry 1, message 2: there is no "content" or "value" that is a text'),
        ([said("user", [{"type": "image"}])], "entry 1, message 2: training reads text alone"),
        ([{"messages": ["hi"]}], 'entry 1, message 1: an object with "role" and "content".*, got \'hi\''),
        ([{"messages": []}], r"entry 1: the messages of a chat are a list of at least one, got \[\]"),
        ([{"instruction": "a", "output": "b"}], 'entry 1: the object has no "text" field .* nor the "messages"'),
        ([[{"role": "tool", "content": "4"}]], "entry 1: the chat template of .* refuses .*a tool begins"),
        ([said("assistant") | {"tools": [1]}], 'entry 1: its tools or "tool_calls" are not in OpenAI\'s form'),
        ([calling([{"name": "x"}])], 'entry 1: its tools or "tool_calls" are not in OpenAI\'s form'),
        ([calling(3)], 'entry 1: its tools or "tool_calls" are not in OpenAI\'s form'),
    ],
)
def test_what_is_no_chat_is_named(chatty: Any, tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(DataError, match=f"chats.json.*{message}"):
        read_texts([written(tmp_path, content)], chatty)
    (tmp_path / "chats.json").write_text("[{]")
    with pytest.raises(DataError, match=r"chats.json: not JSON \(.*\); rename it to .txt"):
        read_texts([tmp_path / "chats.json"], chatty)


@pytest.mark.parametrize("kind", ["draft", "heads", "ngram"])
def test_every_training_reads_chats_or_refuses_them(tokenizer: Any, chatty: Any, tmp_path: Path, kind: str) -> None:
    data = written(tmp_path, [SHAREGPT] * 8)

    def texts(own: Any) -> str:
        folder = tmp_path / ("chatty" if own.chat_template else "plain")
        save_tokenizer(own, folder)
        if kind == "draft":
            train, test = drafts._streams(Source.read([data], [data], own), [], own, tmp_path)
            assert len(train) == len(test)
            return str(own.decode(train.tolist()))
        if kind == "ngram":
            return "".join(ngrams._source([data], [data], own)[0].texts)
        config: Any = SimpleNamespace(prompts=PromptCounts(4, 1, 1), prompt_tokens=64, seed=0)
        return str(own.decode(heads._prompts_of(folder, [data], [data], config, lambda *_: []).train[0]))

    assert WRITTEN in texts(chatty)
    with pytest.raises(DataError, match=r"chats.json.* 1: a chat, and there is no chat template"):
        texts(tokenizer)
