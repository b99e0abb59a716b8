"""Test doubles: a Markov table as a language model, scripted parts, and parts with one change."""

from truedraft.testing.doubles import MarkovModel, ScriptedController, ScriptedDrafter, altered, reduced, scaled

__all__ = ["MarkovModel", "ScriptedController", "ScriptedDrafter", "altered", "reduced", "scaled"]
