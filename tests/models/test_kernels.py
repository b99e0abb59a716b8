"""Where Triton's kernels can run, and that nothing else needs Triton."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from truedraft.models.backends.graphs import attention

CPU = torch.device("cpu")


def test_on_a_cpu_by_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not attention.has_kernels(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert attention.has_kernels(CPU) == (find_spec("triton") is not None)
    assert not attention.has_kernels(torch.device("meta"))


def test_nowhere_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    assert not attention.has_kernels(CPU)


def test_nothing_but_the_kernels_needs_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import truedraft.models.backends.graphs as graphs"
    kernels = "import truedraft.models.backends.graphs.layer_kernels"
    subprocess.run([sys.executable, "-c", code], check=True)
    failed = subprocess.run([sys.executable, "-c", f"{code}; {kernels}"], capture_output=True, text=True, check=False)
    assert failed.returncode and "triton" in failed.stderr.splitlines()[-1]
