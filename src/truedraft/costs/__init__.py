"""What speculation costs on this machine: measured when first asked for, kept, and held to what steps then take."""

from truedraft.costs.bandwidth import read_bandwidth
from truedraft.costs.kept import (
    STEPS,
    CurveCheck,
    Measured,
    StepCosts,
    drafter_cost,
    parts,
    target_cost,
)
from truedraft.costs.measuring import Effort, measure_drafter, measure_target
from truedraft.costs.running import RunningTimes
from truedraft.costs.store import CostStore

__all__ = [
    "STEPS",
    "CostStore",
    "CurveCheck",
    "Effort",
    "Measured",
    "RunningTimes",
    "StepCosts",
    "drafter_cost",
    "measure_drafter",
    "measure_target",
    "parts",
    "read_bandwidth",
    "target_cost",
]
