"""Users' data files, good and bad."""

from __future__ import annotations

import sys
from pathlib import Path

import datasets
import pytest

from truedraft.errors import DataError, MissingExtraError
from truedraft.training.texts.data import read_texts


def test_text_and_json_lines(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n\n{"text": "four", "id": 2}\n')
    assert read_texts([tmp_path / "a.txt", tmp_path / "b.jsonl"]) == ["one\ntwo", "three", "four"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "holds no text"),
        (
            "wide.txt",
            "wide".encode("utf-16-le"),
            r"wide.txt holds a NUL character \(the first at place 2\), so it is no plain",
        ),
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


def test_a_missing_file_a_folder_and_a_missing_library(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"there is no data file .*nothing\.txt"):
        read_texts([tmp_path / "nothing.txt"])
    with pytest.raises(DataError, match="cannot read the dataset"):
        read_texts([tmp_path])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"needs the library datasets: pip install 'truedraft\[train\]'"):
        read_texts([tmp_path])


def test_rows_of_datasets(tmp_path):
    """Saved with splits and without, and a folder of files that the library reads."""
    rows = [{"text": "one"}, {"text": "two"}, {"text": "three"}]
    whole = datasets.Dataset.from_list(rows)
    whole.save_to_disk(tmp_path / "whole")
    parts = {"train": whole, "test": datasets.Dataset.from_list(rows[:1])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "split")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"text": "four"}\n')
    assert read_texts([tmp_path / "whole"]) == read_texts([tmp_path / "split"]) == ["one", "two", "three"]
    assert read_texts([Path(f"{tmp_path}/split#test"), tmp_path / "files"]) == ["one", "four"]
    with pytest.raises(DataError, match="has no split 'dev'; name one behind #: train, test"):
        read_texts([Path(f"{tmp_path}/split#dev")])
    datasets.Dataset.from_list([{"content": "a"}]).save_to_disk(tmp_path / "other")
    with pytest.raises(DataError, match='row 1: the object has no "text" field'):
        read_texts([tmp_path / "other"])
