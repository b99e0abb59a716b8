"""Controllers: numbers in, decisions out. They never see a tensor."""

from truedraft.control.base import Controller, FixedBudget, StepTimes
from truedraft.control.goodput import Goodput
from truedraft.control.heuristics import AssistedHeuristic, ConfidenceStop, InTurn, Schedule
from truedraft.core.budget import Budget, Decision, Hint, RequestView
from truedraft.core.stats import StepRecord

__all__ = [
    "AssistedHeuristic",
    "Budget",
    "ConfidenceStop",
    "Controller",
    "Decision",
    "FixedBudget",
    "Goodput",
    "Hint",
    "InTurn",
    "RequestView",
    "Schedule",
    "StepRecord",
    "StepTimes",
]
