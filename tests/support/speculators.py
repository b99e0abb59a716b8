"""Modules of `speculators`, beside which `make test-speculators` runs; without it what needs them is skipped."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest


def module_of(kind: str) -> Any:
    """Their module of a kind of heads; what moves hidden states between machines, unused here, is not published."""
    stub: Any = types.ModuleType("hs_connectors")
    stub.FileTransfer = stub.HiddenStatesTransfer = type("Unused", (), {})
    sys.modules.setdefault("hs_connectors", stub)
    return pytest.importorskip(f"speculators.models.{kind}.core", reason="speculators is not installed")
