"""Models that many tests use, loaded once for all of a process: those that ship, and smollm2."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from truedraft import load_model
from truedraft.files import SMOLLM2
from truedraft.models.huggingface import HuggingFaceModel

_LOADERS = ("truedraft.models.loading", "truedraft.engine.engine", "truedraft.measure.bench.suite", "truedraft")
"""Modules whose `load_model` commands and snippets of documentation call."""


@functools.cache
def _once(name: str, **options: Any) -> HuggingFaceModel:
    return load_model(name, **options)


def embedded(name: str = "target", **options: Any) -> HuggingFaceModel:
    """`load_model("embedded:NAME", ...)`, the same for all who ask for the same."""
    return _once(f"embedded:{name}", **options)


def shared_model(name: str | Path, *, folders: tuple[str, ...] = (), **options: Any) -> HuggingFaceModel:
    """`load_model`, but one of these, as it is, is the shared one; other processes can be told to call it, too.

    Args:
        name: of the model.
        folders: of other models that are shared.
        options: of `load_model`.
    """
    given = {option: value for option, value in options.items() if value not in (None, {}, True, "auto")}
    known = str(name) in (SMOLLM2, *folders) or str(name).startswith("embedded:")
    if known and given.keys() <= {"dtype"}:
        return _once(str(name), **given)
    return load_model(name, **options)


def share_embedded(monkeypatch: pytest.MonkeyPatch, *folders: str) -> None:
    """From now on whoever loads one of these, or of some folders that stay as they are, gets the shared one."""
    for module in _LOADERS:
        monkeypatch.setattr(f"{module}.load_model", functools.partial(shared_model, folders=folders))
