"""Public doubles for tests: a Markov table as a language model, a scripted drafter, a scripted controller."""

from truedraft.testing.markov import MarkovModel
from truedraft.testing.scripted import ScriptedController, ScriptedDrafter

__all__ = ["MarkovModel", "ScriptedController", "ScriptedDrafter"]
