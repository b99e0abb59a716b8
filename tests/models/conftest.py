"""What is kept of converted files goes with the tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _conversions_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.getbasetemp() / "conversions"
    monkeypatch.setattr("truedraft.models.gguf.cache_folder", lambda: folder)
