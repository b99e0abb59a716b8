"""Test doubles: a Markov table as a language model, scripted parts, and parts with one change."""

from truedraft.testing.markov import MarkovModel
from truedraft.testing.scripted import ScriptedController, ScriptedDrafter
from truedraft.testing.wrappers import altered, reduced, scaled

__all__ = ["MarkovModel", "ScriptedController", "ScriptedDrafter", "altered", "reduced", "scaled"]
