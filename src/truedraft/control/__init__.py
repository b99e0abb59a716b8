"""Controllers: numbers in, decisions out. They never see a tensor."""

from truedraft.control.base import Controller, FixedBudget
from truedraft.core.budget import Budget, Decision, RequestView
from truedraft.core.stats import StepRecord

__all__ = ["Budget", "Controller", "Decision", "FixedBudget", "RequestView", "StepRecord"]
