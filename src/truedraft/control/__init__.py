"""Controllers: numbers in, decisions out. They never see a tensor."""

from truedraft.control.base import Controller, Observation
from truedraft.control.fixed import FixedBudget

__all__ = ["Controller", "FixedBudget", "Observation"]
