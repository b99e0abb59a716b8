"""Read a user's training data: plain text files, and JSON lines with a `text` field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from truedraft.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


def read_texts(paths: Iterable[Path]) -> list[str]:
    """The documents of all files, in order: a `.jsonl` file has one per line, any other file is one."""
    texts = [text for path in paths for text in _documents(path)]
    if not any(text.strip("\0").strip() for text in texts):
        raise DataError("the training data holds no text: give at least one file that is not empty")
    return texts


def _documents(path: Path) -> Iterator[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"cannot read the data file {path}: {error.strerror or error}; name a file of text that exists"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"the data file {path} is not UTF-8 text (byte {error.start}): convert it, or leave it out"
        ) from error
    if "\0" in content:
        place = content.index("\0")
        raise DataError(
            f"the data file {path} holds a NUL character (the first at place {place + 1}), so it is no plain text: "
            "convert it, or leave it out"
        )
    if path.suffix == ".jsonl":
        for number, line in enumerate(content.splitlines(), start=1):
            if line.strip():
                yield _text_field(line, path, number)
    else:
        yield content


def _text_field(line: str, path: Path, number: int) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {number}: not a JSON object ({error.msg}); a .jsonl file has one a line"
        ) from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{path}, line {number}: the object has no "text" field that is a string; add one')
    return text
