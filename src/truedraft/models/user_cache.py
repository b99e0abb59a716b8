"""Where things are kept for the user between runs."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from truedraft.errors import OptionError


def cache_folder() -> Path:
    """TRUEDRAFT_CACHE if it is set, else truedraft's part of the user's cache folder on this system.

    A user without a home folder gets a folder of their own among the temporary files.

    Raises:
        OptionError: TRUEDRAFT_CACHE or XDG_CACHE_HOME names the home of somebody who has none.
    """
    given = os.environ.get("TRUEDRAFT_CACHE")
    if given:
        return _expanded("TRUEDRAFT_CACHE", given)
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared:
        return _expanded("XDG_CACHE_HOME", shared) / "truedraft"
    local = os.environ.get("LOCALAPPDATA")
    if sys.platform == "win32" and local:
        return Path(local) / "truedraft" / "Cache"
    parts = ("Library", "Caches") if sys.platform == "darwin" else (".cache",)
    try:
        return Path("~").expanduser().joinpath(*parts, "truedraft")
    except RuntimeError:  # neither HOME nor an entry among the system's users
        return Path(tempfile.gettempdir()) / f"truedraft-{os.getuid()}"


def could_not_be_kept(folder: Path, reason: str) -> str:
    """A warning for whatever could not be written to a folder of the cache: one sentence, so that it is told once."""
    root = cache_folder() if folder.is_relative_to(cache_folder()) else folder
    return (
        f"what is compiled and measured could not be kept in {root} ({reason}) and will be made again next time; "
        "free some space, or set TRUEDRAFT_CACHE to a folder that can be written"
    )


def _expanded(variable: str, folder: str) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise OptionError(f"{variable} is {folder!r}, the home folder of nobody here; set it to a folder") from error
