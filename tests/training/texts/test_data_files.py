"""Users' data files, good and bad."""

from __future__ import annotations

import pytest

from truedraft.errors import DataError
from truedraft.training.texts.data import read_texts


def test_text_and_json_lines(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n\n{"text": "four", "id": 2}\n')
    assert read_texts([tmp_path / "a.txt", tmp_path / "b.jsonl"]) == ["one\ntwo", "three", "four"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", b"  \n ", "holds no text"),
        ("zeros.txt", bytes(4000), r"zeros.txt holds a NUL character \(the first at place 1\), so it is no plain text"),
        ("wide.txt", "wide".encode("utf-16-le"), r"wide.txt holds a NUL character \(the first at place 2\)"),
        ("zeros.jsonl", b'{"text": "\\u0000\\u0000"}', "holds no text"),
        ("latin.txt", b"caf\xe9", r"latin.txt' is not UTF-8 text \(byte 3\)"),
        ("bad.jsonl", b'{"text": "a"}\n{oops', "bad.jsonl, line 2: not JSON"),
        ("other.jsonl", b'{"content": "a"}', 'line 1: the object has no "text" field'),
        ("list.jsonl", b"[1]", "line 1: a chat, and there is no chat template"),
    ],
)
def test_bad_data(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_texts([tmp_path / name])


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(DataError, match=r"there is no data file .*nothing\.txt"):
        read_texts([tmp_path / "nothing.txt"])
    with pytest.raises(DataError, match="cannot read the data file"):
        read_texts([tmp_path])
