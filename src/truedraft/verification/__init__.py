"""Verification rules: which drafted tokens stay, and what is drawn where they stop."""

from truedraft.verification.coupled import CoupledSampling
from truedraft.verification.rule import Rule
from truedraft.verification.speculative import SpeculativeSampling

__all__ = ["CoupledSampling", "Rule", "SpeculativeSampling"]
