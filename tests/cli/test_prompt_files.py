"""Lines of prompt files: options and seeds of their own, and what cannot be read."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.tiny import Run, prompts_in
from truedraft.cli.prompts import read_prompts
from truedraft.errors import DataError, PromptError

SAMPLED = ("--max-tokens", "12", "--dtype", "float32", "--ignore-eos", "--temperature", "1", "--json")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    return functools.partial(prompts_in, tmp_path)


def test_equal_prompts_without_a_seed_get_unlike_answers(run: Run, target: str, write: Callable[..., str]) -> None:
    result = run("generate", "--prompts", write(*[{"prompt": "hello"}] * 9), "--model", target, *SAMPLED)
    answers = result.record["prompts"]
    assert len({tuple(answer["token_ids"]) for answer in answers}) == 9
    assert {answer["seed"] for answer in answers} == {None} == {result.record["seed"]}
    assert "seed" not in result.err


def test_one_seed_for_a_list_gives_each_prompt_the_answer_it_gets_alone(
    run: Run, target: str, write: Callable[..., str]
) -> None:
    words = ("--model", target, *SAMPLED, "--seed", "5")
    both = run("generate", "--prompts", write({"prompt": "hello"}, {"prompt": "other"}), *words).record
    alone = run("generate", "other", *words).record
    assert both["seed"] == 5 == both["prompts"][1]["seed"]
    assert both["prompts"][1]["token_ids"] == alone["prompts"][0]["token_ids"]


def test_compared_prompts_tell_their_seeds(run: Run, target: str, write: Callable[..., str]) -> None:
    file = write({"id": "a", "prompt": "hello", "seed": 3}, {"id": "b", "prompt": "hello", "seed": 4})
    result = run("generate", "--prompts", file, "--model", target, "--compare", *SAMPLED)
    assert result.record["identical"] is True
    assert [each["seed"] for each in result.record["prompts"]] == [3, 4] and "seeds: a: 3, b: 4" in result.out
    assert "a seed for each prompt" in result.out


def test_a_line_has_options_of_its_own(run: Run, target: str, write: Callable[..., str]) -> None:
    own = {"prompt": "hello", "max_tokens": 5, "seed": 11, "temperature": 0.5, "top_p": None, "file": "is the user's"}
    file = write(own, {"prompt": "hello"}, {"prompt": "hello", "stop_token_ids": list(range(257))})
    record = run("generate", "--prompts", file, "--model", target, *SAMPLED).record
    first, second, third = record["prompts"]
    assert (len(first["token_ids"]), first["seed"], first["sampling"]["temperature"]) == (5, 11, 0.5)
    assert (len(second["token_ids"]), second["sampling"]["temperature"]) == (12, 1.0)
    assert (third["token_ids"], third["finish_reason"]) == ([], "stop")
    alone = run("generate", "hello", "--model", target, *SAMPLED, "--seed", "11", "--temperature", "0.5").record
    assert alone["prompts"][0]["token_ids"][:5] == first["token_ids"]


@pytest.mark.parametrize(
    ("line", "phrase"),
    [
        ({"prompt": "x", "max_tokens": "5"}, "line 1: max_tokens must be a whole number of 1 or more, got '5'"),
        ({"prompt": "x", "max_token": 5}, "'max_token' is no option of a line; did you mean 'max_tokens'?"),
        ({"prompt": "x", "drafter": "none"}, "'drafter' is no option of a line"),
        ({"prompt": "x", "do_sample": 1.1}, "'do_sample' is no option of a line"),
        ({"prompt": [True, 2]}, "(or a list of token ids)"),
        ({"prompt": "a", "images": "one.png"}, '"images" must be a list of files'),
        ({"prompt": "a", "images": [3]}, '"images" must be a list of files'),
        ({"prompt": [1, 2], "images": ["one.png"]}, "pictures go with a text"),
        ({"prompt": "a", "images": ["none.png"]}, "there is no file 'none.png'"),
        ('{"prompt": ' + "[" * 100_000, "line 1: JSON that nobody can read"),
        ('{"prompt": [' + "9" * 5000 + "]}", "line 1: JSON that nobody can read"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_line_cannot_say_is_refused_by_name(write: Callable[..., str], line: Any, phrase: str) -> None:
    with pytest.raises(DataError) as refused:
        read_prompts(None, write(line), own_options=True)
    assert phrase in str(refused.value)


def test_a_json_list_holds_texts_ids_and_objects(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(["one", [1, 2], {"id": "c", "prompt": "three", "max_tokens": 5}], indent=2))
    found = read_prompts(None, str(file), own_options=True)
    assert [(each.name, each.prompt) for each in found] == [("1", "one"), ("2", [1, 2]), ("c", "three")]
    assert found[2].options == {"max_tokens": 5}


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        ("[1", "not JSON (Expecting ',' delimiter"),
        ('{"prompt": "x"}', "must hold a list, as ["),
        ("[]", "holds no prompt"),
        ('["x", 7]', "entry 2: a prompt is a text, a list of token ids or an object, got 7"),
        ('["x", ""]', "entry 2: the prompt is empty"),
        ('["x", {"prompt": "y", "n": 2}]', "entry 2: 'n' is no option of a line"),
        ("[" * 100_000, "JSON that nobody can read"),
    ],
)
def test_what_a_json_list_cannot_say(tmp_path: Path, content: str, phrase: str) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(content)
    with pytest.raises(DataError) as refused:
        read_prompts(None, str(file), own_options=True)
    assert phrase in str(refused.value)


def test_other_commands_take_neither_options_nor_images_from_lines(write: Callable[..., str]) -> None:
    for more, told in (({"seed": 1}, "'seed' is one; remove it"), ({"images": ["a.png"]}, "takes only text")):
        with pytest.raises(DataError, match=told):
            read_prompts(None, write({"prompt": "x", **more}))


def test_half_a_character_is_refused_with_its_line(write: Callable[..., str]) -> None:
    with pytest.raises(PromptError, match="line 2 is not UTF-8 text"):
        read_prompts(None, write({"prompt": "x"}, {"prompt": "\ud800"}))


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    for name, content in (
        ("a.txt", "one\r\n\r\n  two\r\n"),
        ("a.jsonl", '{"prompt": "one"}\r\n{"prompt": "  two"}\r\n'),
    ):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
        assert [each.prompt for each in read_prompts(None, str(tmp_path / name))] == ["one", "  two"]


def test_the_home_of_nobody(run: Run) -> None:
    run("generate", "--prompts", "~nobody-of-that-name/a.txt").refused("names the home folder of nobody here")
