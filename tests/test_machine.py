"""Where things are kept between runs."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from truedraft.errors import OptionError
from truedraft.machine import cache_folder


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TRUEDRAFT_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / ".cache" / "truedraft"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "truedraft"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "truedraft" / "Cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "truedraft"
    monkeypatch.setenv("TRUEDRAFT_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_a_user_without_a_home_has_a_folder_among_the_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("TRUEDRAFT_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # whom no entry among the users knows
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cache_folder() == tmp_path / "truedraft-54321"


@pytest.mark.parametrize("variable", ["TRUEDRAFT_CACHE", "XDG_CACHE_HOME"])
def test_a_folder_that_cannot_be_expanded_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("TRUEDRAFT_CACHE", raising=False)
    monkeypatch.setenv(variable, "~nobody-of-that-name/cache")
    with pytest.raises(OptionError, match=f"{variable} is '~nobody-of-that-name/cache', the home folder of nobody"):
        cache_folder()
