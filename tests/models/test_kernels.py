"""Where Triton's kernels can run, and that nothing else needs Triton."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import torch

from truedraft.models.backends.graphs import kernels

CPU = torch.device("cpu")


def test_on_a_cpu_by_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not kernels.available(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.available(CPU) == (find_spec("triton") is not None)
    assert not kernels.available(torch.device("meta"))


def test_nowhere_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert not kernels.available(CPU)


def test_kernels_are_imported_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    home = "truedraft.models.backends.graphs.layer_kernels"
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, home, raising=False)
    with pytest.raises(ImportError, match="triton"):
        _ = kernels.rms_norm
    assert home not in sys.modules
