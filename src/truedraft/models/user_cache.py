"""Where things are kept for the user between runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """TRUEDRAFT_CACHE if it is set, else truedraft's part of the user's cache folder on this system."""
    given = os.environ.get("TRUEDRAFT_CACHE")
    if given:
        return Path(given).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared:
        return Path(shared).expanduser() / "truedraft"
    local = os.environ.get("LOCALAPPDATA")
    if sys.platform == "win32" and local:
        return Path(local) / "truedraft" / "Cache"
    parts = ("Library", "Caches") if sys.platform == "darwin" else (".cache",)
    return Path("~").expanduser().joinpath(*parts, "truedraft")
