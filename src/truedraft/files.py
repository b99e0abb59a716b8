"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def written_whole(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A new file, which takes the place of `path` once it is complete: a reader finds the old one or the new one.

    Whoever has the old one open or mapped keeps it. Whatever breaks it off, an interrupt too, leaves the old one and
    nothing beside it; where the machine itself breaks off, there is the old one or the whole new one. A file that was
    there keeps who may read it.

    Args:
        path: of the file.
        private: a new one may be read by its owner alone.

    Raises:
        OSError: it cannot be written.
    """
    mode = path.stat().st_mode & 0o777 if path.exists() else (0o600 if private else 0o644)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp", delete=False) as partial:
        try:
            yield partial  # type: ignore[misc]
            partial.close()
            Path(partial.name).chmod(mode)
            take_place(Path(partial.name), path)
        except BaseException:
            partial.close()
            Path(partial.name).unlink(missing_ok=True)
            raise


def take_place(partial: Path, path: Path) -> None:
    """Give a complete file its name, in place of what has it, once its content is on the disk.

    A file system may keep names before contents: where the machine breaks off, the new name would have an empty file.

    Args:
        partial: the file, in the folder of `path` or elsewhere on its disk.
        path: its name.

    Raises:
        OSError: that cannot be done; what had the name keeps it.
    """
    _sync(partial)
    partial.replace(path)
    with contextlib.suppress(OSError):  # the content is safe; some systems open no folders
        _sync(path.parent)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
