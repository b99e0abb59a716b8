"""Test doubles for models, drafters and controllers."""

from truedraft.testing.doubles import MarkovModel, ScriptedController, ScriptedDrafter, altered, reduced, scaled

__all__ = ["MarkovModel", "ScriptedController", "ScriptedDrafter", "altered", "reduced", "scaled"]
