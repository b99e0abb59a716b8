"""Files that are written whole or not at all: whatever breaks it off leaves the old one and nothing beside it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from truedraft import compiled
from truedraft.files import take_place, written_whole
from truedraft.training.loop import RunFolder
from truedraft.training.texts.data import write_stream
from truedraft.training.workspace import write_whole


def test_a_reader_finds_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "a"
    with written_whole(file) as made:
        made.write(b"old")
        assert not file.exists()
    assert file.stat().st_mode & 0o777 == 0o644
    file.chmod(0o600)
    with file.open("rb") as opened, written_whole(file) as made:
        made.write(b"new")
        made.flush()
        assert file.read_bytes() == b"old"
    with file.open("rb") as opened:
        assert opened.read() == b"new"
    assert file.stat().st_mode & 0o777 == 0o600, "who may read it stays"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("broken", [KeyboardInterrupt, OSError, ValueError])
def test_whatever_breaks_it_off_leaves_nothing(tmp_path: Path, broken: type[BaseException]) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"old")
    with pytest.raises(broken), written_whole(file) as made:
        made.write(b"half")
        raise broken
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    assert file.read_bytes() == b"old"


def test_a_place_that_cannot_be_taken_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a" / "full").mkdir(parents=True)
    with pytest.raises(OSError), written_whole(tmp_path / "a") as made:
        made.write(b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    with pytest.raises(FileNotFoundError), written_whole(tmp_path / "nowhere" / "a"):
        pass


def by_written_whole(path: Path) -> None:
    with written_whole(path) as made:
        made.write(b"new")


def by_stream(path: Path) -> None:
    class Letters:
        eos_token_id = 0

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return list(map(ord, text))

    write_stream(["new"], Letters(), path)


def by_checkpoint(path: Path) -> None:
    folder = RunFolder(path.parent, {}, "cpu")
    folder.checkpoint = path
    folder.save({"weights": np.zeros(3)})


@pytest.mark.parametrize("write", [by_written_whole, by_stream, by_checkpoint, lambda path: write_whole(path, "new")])
def test_a_content_is_on_the_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    """A machine that breaks off leaves the old file or the whole new one."""
    done: list[tuple[str, Any]] = []
    sync, replace = os.fsync, Path.replace

    def synced(opened: int) -> None:
        sync(opened)
        done.append(("sync", os.fstat(opened).st_ino))

    def renamed(partial: Path, path: Path) -> Path:
        done.append(("rename", path))
        return replace(partial, path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    file = tmp_path / "a"
    write(file)
    at = done.index(("rename", file))
    assert done[at - 1] == ("sync", file.stat().st_ino) and done[at + 1] == ("sync", tmp_path.stat().st_ino)


def test_what_cannot_be_brought_to_the_disk_takes_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"old")

    def full(opened: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        by_written_whole(file)
    assert file.read_bytes() == b"old" and [each.name for each in tmp_path.iterdir()] == ["a"]
    assert compiled.take_place is take_place, "kept libraries take their place likewise"
