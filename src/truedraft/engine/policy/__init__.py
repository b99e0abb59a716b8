"""Policy: what is drafted, and by which costs. Controllers take numbers and return decisions; costs are measured on
first use, kept, and corrected by the engine's own steps. Each name loads on first use: controllers need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from truedraft.lazy import loads

if TYPE_CHECKING:
    from truedraft.core.budget import Budget as Budget
    from truedraft.core.budget import Decision as Decision
    from truedraft.core.budget import Hint as Hint
    from truedraft.core.budget import RequestView as RequestView
    from truedraft.core.stats import StepRecord as StepRecord
    from truedraft.engine.policy.base import Controller as Controller
    from truedraft.engine.policy.base import FixedBudget as FixedBudget
    from truedraft.engine.policy.base import StepTimes as StepTimes
    from truedraft.engine.policy.goodput import Goodput as Goodput
    from truedraft.engine.policy.heuristics import AssistedHeuristic as AssistedHeuristic
    from truedraft.engine.policy.heuristics import ConfidenceStop as ConfidenceStop
    from truedraft.engine.policy.heuristics import RoundRobin as RoundRobin
    from truedraft.engine.policy.heuristics import Schedule as Schedule
    from truedraft.engine.policy.kept import STEPS as STEPS
    from truedraft.engine.policy.kept import CostStore as CostStore
    from truedraft.engine.policy.kept import CurveCheck as CurveCheck
    from truedraft.engine.policy.kept import Measured as Measured
    from truedraft.engine.policy.kept import StepCosts as StepCosts
    from truedraft.engine.policy.kept import drafter_cost as drafter_cost
    from truedraft.engine.policy.kept import parts as parts
    from truedraft.engine.policy.kept import target_cost as target_cost
    from truedraft.engine.policy.measuring import Effort as Effort
    from truedraft.engine.policy.measuring import measure_drafter as measure_drafter
    from truedraft.engine.policy.measuring import measure_target as measure_target
    from truedraft.engine.policy.measuring import read_bandwidth as read_bandwidth
    from truedraft.engine.policy.running import RunningTimes as RunningTimes

_MODULES = {
    "truedraft.core.budget": ("Budget", "Decision", "Hint", "RequestView"),
    "truedraft.core.stats": ("StepRecord",),
    "truedraft.engine.policy.base": ("Controller", "FixedBudget", "StepTimes"),
    "truedraft.engine.policy.goodput": ("Goodput",),
    "truedraft.engine.policy.heuristics": ("AssistedHeuristic", "ConfidenceStop", "RoundRobin", "Schedule"),
    "truedraft.engine.policy.kept": (
        "CostStore",
        "CurveCheck",
        "Measured",
        "STEPS",
        "StepCosts",
        "drafter_cost",
        "parts",
        "target_cost",
    ),
    "truedraft.engine.policy.measuring": ("Effort", "measure_drafter", "measure_target", "read_bandwidth"),
    "truedraft.engine.policy.running": ("RunningTimes",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = list(_HOMES)
__getattr__ = loads(__name__, _HOMES)
