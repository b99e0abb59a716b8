"""Where things are kept between runs, and what memory is left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from truedraft import machine
from truedraft.errors import OptionError
from truedraft.files import cache_folder
from truedraft.machine import free_memory, in_bytes


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
    with pytest.raises(OptionError, match=f"{variable}: '~nobody-of-that-name/cache' names the home folder of nobody"):
        cache_folder()


def test_free_memory_is_what_the_system_and_a_containers_limit_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = Path
    monkeypatch.setattr(machine, "Path", lambda name: tmp_path / str(name).lstrip("/"))
    cpu = torch.device("cpu")
    assert free_memory(cpu) is None, "nobody tells"
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    7000 kB\n")
    assert free_memory(cpu) == 7000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, text in {"memory.max": "max", "memory.current": "5000", "memory.stat": "anon 1\n"}.items():
        (group / name).write_text(text)
    assert free_memory(cpu) == 7000 * 1024, "a group without a limit"
    (group / "memory.max").write_text("6000")
    assert free_memory(cpu) == 1000
    (group / "memory.stat").write_text("anon 1\ninactive_file 400\n")
    assert free_memory(cpu) == 1400
    monkeypatch.setattr(machine, "Path", real)
    assert sys.platform != "linux" or (free_memory(cpu) or 0) > 0


def test_sizes_in_words() -> None:
    assert [in_bytes(count) for count in (12, 3_400, 3_276_800_000)] == ["12 bytes", "3.4 kB", "3.3 GB"]


_WITH_TILES = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
_LOAD = """
import os, torch
from truedraft import load_model
model = load_model("embedded:target", dtype="bfloat16", fast_paths=False, pad_to="500M")
print(os.environ.get("ONEDNN_MAX_CPU_ISA"), model.equality)
"""


@pytest.mark.skipif(not _WITH_TILES, reason="this CPU has no AMX, whose products depend on the number of rows")
@pytest.mark.parametrize(
    ("told", "printed"),
    [
        pytest.param(None, "AVX512_CORE_FP16 bit for bit", id="unset"),
        pytest.param("ALL", "ALL up to near ties", id="the user's own", marks=pytest.mark.slow),
    ],
)
def test_loading_in_bfloat16_keeps_rows_alike(told: str | None, printed: str) -> None:
    """In a process of its own: oneDNN reads what it may use once."""
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    environment |= {} if told is None else {"ONEDNN_MAX_CPU_ISA": told}
    run = subprocess.run([sys.executable, "-c", _LOAD], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == printed
