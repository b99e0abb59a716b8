"""Writing to a disk that may be full: one clear sentence, and what was finished stays."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from truedraft.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into an error of ours. Whatever was complete before stays as it is.

    Args:
        path: what is being written, for the message.

    Raises:
        TrainingError: the disk is full, the folder is read-only, ...; says what to do.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"cannot write {str(path)!r}: {error.strerror or error}; what was finished before is kept: make room, or "
            "whatever else it takes, and go on with the same command"
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a kill or a full disk leaves the old one or the new one, never half of it.

    Raises:
        TrainingError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with writing(path):
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
