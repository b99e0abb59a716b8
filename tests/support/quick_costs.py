"""What things cost on this machine by one try each, for tests that need some costs and not good ones."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from truedraft.engine.policy import Effort, kept, sizes
from truedraft.measure.bench import costs


def measure_quickly(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Cost curves of one round and a small read, kept in a folder."""
    effort = Effort(0.0, 1, 1)
    monkeypatch.setattr(costs, "target_cost", functools.partial(costs.target_cost, effort=effort))
    monkeypatch.setattr(costs, "drafter_cost", functools.partial(costs.drafter_cost, effort=effort))
    monkeypatch.setattr(costs, "read_bandwidth", functools.partial(costs.read_bandwidth, size_bytes=1 << 20))
    monkeypatch.setattr(sizes, "ratio_of_steps", lambda engine, forwards: 1.0)  # whatever else runs on this machine
    monkeypatch.setattr(kept, "_SHORT_TARGET", effort)
    monkeypatch.setattr(kept, "_SHORT_DRAFTER", effort)
    monkeypatch.setattr(kept, "cache_folder", lambda: folder)
