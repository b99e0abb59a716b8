"""What speculation costs on this machine: measured when first asked for, kept, and held to what steps then take."""

from truedraft.costs.kept import (
    STEPS,
    CurveCheck,
    Measured,
    StepCosts,
    drafter_cost,
    parts,
    target_cost,
)
from truedraft.costs.machine import Machine, ReadBandwidth, read_bandwidth, this_machine, wait_for
from truedraft.costs.measuring import Effort, Progress, measure_drafter, measure_target
from truedraft.costs.store import CostStore

__all__ = [
    "STEPS",
    "CostStore",
    "CurveCheck",
    "Effort",
    "Machine",
    "Measured",
    "Progress",
    "ReadBandwidth",
    "StepCosts",
    "drafter_cost",
    "measure_drafter",
    "measure_target",
    "parts",
    "read_bandwidth",
    "target_cost",
    "this_machine",
    "wait_for",
]
