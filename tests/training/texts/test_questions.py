"""Questions that a model asks itself: the turn that is left open, near duplicates, and what a kill leaves."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from truedraft import load_model
from truedraft.errors import DataError
from truedraft.text.tokenizer import Tokenizer
from truedraft.training.texts import answer_writer
from truedraft.training.texts.answer_writer import ASKED, Watch, ask_itself, distinct, opening_of

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(target_folder: Any) -> Any:
    model = load_model(target_folder)
    backend = copy.deepcopy(model.tokenizer.backend)
    backend.chat_template = TEMPLATE
    model.tokenizer = Tokenizer(backend, "chatty")
    return model


def test_the_turn_is_left_open_before_the_message_or_it_is_said_why_not(target_folder: Any, chatty: Any) -> None:
    assert chatty.tokenizer.decode(opening_of(chatty.tokenizer)) == "[user]"
    with pytest.raises(DataError, match=r"cannot ask itself: .* has no chat template.*name prompts of your own"):
        opening_of(load_model(target_folder).tokenizer)
    backend = copy.deepcopy(chatty.tokenizer.backend)
    backend.chat_template = "{% for m in messages %}{{ m.content | length }}{% endfor %}"
    with pytest.raises(DataError, match="does not write a user's message as it stands"):
        opening_of(Tokenizer(backend, "odd"))


def test_near_duplicates_and_scraps_go() -> None:
    first = "Write a short poem about the sea in winter, please."
    others = ["How many eggs do twelve hens lay?", "hm?", "Why is it that the sea is salt, and lakes are not?"]
    near = "write a short poem about the sea in winter please!"
    farther = "Write a short poem about the sea in summer, please, and thank you for that."
    found = distinct([f"  {first}\n", near, farther, *others])
    assert found[0] == first and len(found) == 4 and "in summer" in found[1]


def test_it_asks_by_its_template_and_goes_on_after_a_kill(
    chatty: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ask_itself(chatty, 12, tmp_path / "whole", seed=4)
    assert whole and all(chatty.tokenizer.decode(ids).startswith("[user]") for ids in whole)
    assert all(chatty.tokenizer.decode(ids).endswith("\n[bot]") for ids in whole)
    records = [json.loads(line) for line in (tmp_path / "whole" / f"{ASKED}.jsonl").read_text().splitlines()]
    assert len(records) == 17 and {record["temperature"] for record in records} == {1.0}

    append = answer_writer.AnswerFiles.append

    def kill(files: Any, *more: Any) -> None:
        if len(files.records) == 5:
            raise KeyboardInterrupt
        append(files, *more)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(answer_writer.AnswerFiles, "append", kill)
        ask_itself(chatty, 12, tmp_path / "half", seed=4)
    assert len((tmp_path / "half" / f"{ASKED}.jsonl").read_text().splitlines()) == 5
    assert ask_itself(chatty, 12, tmp_path / "half", seed=4) == whole
    assert len(ask_itself(chatty, 2, tmp_path / "few", seed=4)) <= 2


def test_a_few_are_asked_however_little_time_there_is_and_one_that_runs_holds_back_none_that_are_over(
    chatty: Any, tmp_path: Any
) -> None:
    """What runs is written down as far as it is, and is no question."""
    asked = ask_itself(chatty, 100, tmp_path, seed=7, batch=8, watch=Watch(begun=True))
    records = [json.loads(line) for line in (tmp_path / f"{ASKED}.jsonl").read_text().splitlines()]
    whole = [record["stopped"] or len(record["answer"]) >= 120 for record in records]
    assert 16 <= sum(whole) < len(records) < 100
    assert any(record["stopped"] for record in records[whole.index(False) :])
    ended = [chatty.tokenizer.decode(record["answer"][:-1]).strip() for record in records if record["stopped"]]
    assert {chatty.tokenizer.decode(ids) for ids in asked} <= {f"[user]{text}\n[bot]" for text in ended}
