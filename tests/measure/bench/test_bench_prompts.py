"""Published prompt sets in their own formats."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from truedraft.errors import DataError
from truedraft.measure.bench.prompts import is_question_file, read_questions, spread

HUMAN_EVAL = [
    {"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n", "entry_point": f"f{i}", "canonical_solution": ""}
    for i in range(3)
]
GSM8K = [{"question": f"How many are {i}?", "answer": f"#### {i}"} for i in range(3)]
MT_BENCH = [{"question_id": 81 + i, "category": "writing", "turns": [f"Write {i}.", "Again."]} for i in range(3)]
SPEC_BENCH = [*MT_BENCH, {"question_id": 161, "category": "translation", "turns": ["Translate."]}]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize(
    ("records", "name", "first", "second"),
    [
        (HUMAN_EVAL, "humaneval", ("HumanEval/0", "def f0():\n"), "HumanEval/1"),
        (GSM8K, "gsm8k", ("1", "How many are 0?"), "2"),
        (MT_BENCH, "mt_bench", ("81", "Write 0."), "82"),
        (SPEC_BENCH, "spec_bench", ("81", "Write 0."), "82"),
    ],
)
@pytest.mark.parametrize("file", ["data.jsonl", "data.jsonl.gz"])
def test_formats(
    tmp_path: Path, file: str, records: list[dict[str, Any]], name: str, first: tuple[str, str], second: str
) -> None:
    path = write(tmp_path / file, records)
    assert is_question_file(path)
    for source in (path, tmp_path):
        found, questions = read_questions(source)
        assert found == name and len(questions) == len(records)
        assert (questions[0].name, questions[0].text) == first
        assert questions[1].name == second


def test_a_folder_offers_its_test_part(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"question": "train?", "answer": "1"}])
    write(tmp_path / "test.jsonl", GSM8K)
    write(tmp_path / "reference_answer.jsonl", [{"question_id": 81, "choices": []}])
    assert read_questions(tmp_path)[1][0].text == "How many are 0?"


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no questions"):
        read_questions(tmp_path)
    write(tmp_path / "a.jsonl", GSM8K)
    write(tmp_path / "b.jsonl", MT_BENCH)
    with pytest.raises(DataError, match=r"several question files \(a.jsonl, b.jsonl\)"):
        read_questions(tmp_path)
    with pytest.raises(DataError, match="there is no question file"):
        read_questions(tmp_path / "none.jsonl")
    mixed = write(tmp_path / "mixed.jsonl", [GSM8K[0], {"text": "x"}])
    with pytest.raises(DataError, match=r"mixed.jsonl, line 2: no question of HumanEval"):
        read_questions(mixed)
    mixed.write_text(json.dumps(GSM8K[0]) + "\n{broken\n")
    with pytest.raises(DataError, match="line 2: not JSON"):
        read_questions(mixed)
    for endless in ("[" * 100_000, '{"question": ' + "9" * 5000 + ', "answer": ""}'):
        mixed.write_text(json.dumps(GSM8K[0]) + "\n" + endless)
        with pytest.raises(DataError, match="line 2: JSON that nobody can read"):
            read_questions(mixed)
        mixed.write_text(endless)
        assert not is_question_file(mixed)
    mixed.write_text("[1]\n")
    with pytest.raises(DataError, match="line 1: a list, not an object"):
        read_questions(mixed)
    mixed.write_text("\n")
    with pytest.raises(DataError, match="is empty"):
        read_questions(mixed)
    mixed.write_bytes(b'{"question": "\xff", "answer": ""}')
    with pytest.raises(DataError, match="not UTF-8"):
        read_questions(mixed)
    no_turn = write(tmp_path / "turns.jsonl", [{"question_id": 7, "turns": []}])
    with pytest.raises(DataError, match="question 7 needs"):
        read_questions(no_turn)
    packed = tmp_path / "cut.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"question": "a", "answer": "b"}')[:-12])
    with pytest.raises(DataError, match="cannot unpack"):
        read_questions(packed)
    assert not is_question_file(packed)


def test_other_files_are_no_question_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    assert not is_question_file(path)
    for text in ("", "{broken", '{"prompt": "my own"}', "[1]", '{"text": "x"}'):
        path.write_text(text)
        assert not is_question_file(path), text


def test_a_byte_order_mark_is_no_part_of_a_question(tmp_path: Path) -> None:
    path = write(tmp_path / "marked.jsonl", GSM8K)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert is_question_file(path) and read_questions(path)[1][0].text == "How many are 0?"


def test_spread_is_even_and_in_order() -> None:
    assert spread(list(range(8)), 4) == [1, 3, 5, 7]
    assert spread(list(range(9)), 1) == [4]
    assert spread([1, 2], 5) == [1, 2] == spread([1, 2], None)
    for count in range(1, 33):
        chosen = spread(list(range(32)), count)
        assert len(set(chosen)) == count and chosen == sorted(chosen)


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(DataError, match=r"cannot read the folder '.*': Permission denied"):
        read_questions(tmp_path)
