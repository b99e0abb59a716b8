"""Modules of `speculators`, beside which `make test-speculators` runs; without it what needs them is skipped."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch


def module_of(kind: str) -> Any:
    """Their module of a kind of heads; what moves hidden states between machines, unused here, is not published."""
    stub: Any = types.ModuleType("hs_connectors")
    stub.FileTransfer = stub.HiddenStatesTransfer = type("Unused", (), {})
    sys.modules.setdefault("hs_connectors", stub)
    return pytest.importorskip(f"speculators.models.{kind}.core", reason="speculators is not installed")


@torch.no_grad()
def with_random_weights(model: Any) -> Any:
    """A head of theirs with random weights, and random ids where it has fewer than the target."""
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.normal_(1.0 if weight.dim() == 1 else 0.0, 0.2, generator=generator)
    if model.d2t is not None:
        ids = torch.randperm(len(model.t2d), generator=generator)[: len(model.d2t)].sort().values
        model.t2d.copy_(torch.zeros(len(model.t2d), dtype=torch.bool).index_fill_(0, ids, True))
        model.d2t.copy_(ids - torch.arange(len(ids)))
    return model.eval()
