"""The models that ship, loaded once for all tests of a process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from truedraft import load_model
from truedraft.models.huggingface import HuggingFaceModel

_LOADERS = ("truedraft.models.loading", "truedraft.engine.engine", "truedraft.bench.suite", "truedraft")
"""Modules whose `load_model` commands and snippets of documentation call."""


@functools.cache
def embedded(name: str = "target", **options: Any) -> HuggingFaceModel:
    """`load_model("embedded:NAME", ...)`, the same for all who ask for the same."""
    return load_model(f"embedded:{name}", **options)


def shared_model(name: str | Path, **options: Any) -> HuggingFaceModel:
    """`load_model`, but one that ships, as it is, is the shared one; other processes can be told to call it, too."""
    given = {option: value for option, value in options.items() if value not in (None, {}, "auto")}
    if str(name).startswith("embedded:") and given.keys() <= {"dtype"}:
        return embedded(str(name).removeprefix("embedded:"), **given)
    return load_model(name, **options)


def share_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on whoever loads one that ships, as it is, gets the shared one."""
    for module in _LOADERS:
        monkeypatch.setattr(f"{module}.load_model", shared_model)
