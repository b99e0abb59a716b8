"""Files that are written whole or not at all: whatever breaks it off leaves the old one and nothing beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from truedraft.files import written_whole


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
