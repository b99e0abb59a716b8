"""A full disk under the cache: work goes on elsewhere, and one sentence says so."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from truedraft import compiled
from truedraft.models.backends.native import build as building
from truedraft.models.backends.native.build import built


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_forward_is_compiled_elsewhere_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler would fail in a full folder, and the slower loop would run for want of a few kilobytes."""
    source = tmp_path / "small.c"
    source.write_text("int truedraft_forward(void) { return 7; }\n")
    monkeypatch.setattr(building, "SOURCE", source)
    monkeypatch.setenv("TRUEDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiled.shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    built.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="truedraft"):
            made = [built(torch.float32) for _ in range(2)]
    finally:
        built.cache_clear()
    assert made[0].library is not None and made[0].library.truedraft_forward() == 7
    assert list((tmp_path / "cache" / "native").iterdir()) == []
    (record,) = caplog.records
    assert f"could not be kept in {tmp_path / 'cache'} (No space left on device)" in record.getMessage()
