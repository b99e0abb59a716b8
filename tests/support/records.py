"""Step records for tests, from sums over their requests; and those of an engine."""

from __future__ import annotations

from truedraft import Engine
from truedraft.core.stats import RequestStep, StepRecord


def watched(engine: Engine) -> list[StepRecord]:
    """Filled with the records of an engine's steps."""
    records: list[StepRecord] = []
    engine.listeners.append(records.append)
    return records


def step_record(
    rows: int = 1, context: int = 0, nodes: int = 0, *, prefill: bool = False, target_s: float = 0.0, **times: float
) -> StepRecord:
    """One step of one request; times in seconds."""
    request = RequestStep(0, context, rows, prefill, nodes, depth=nodes)
    whole = {"draft_s": 0.0, "verify_s": 0.0, "total_s": target_s} | times
    return StepRecord((request,), target_s=target_s, **whole)
