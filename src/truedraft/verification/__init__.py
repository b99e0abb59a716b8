"""Verification rules: which drafted tokens stay, and what is drawn where they stop."""

from truedraft.verification.block import BlockVerification
from truedraft.verification.coupled import ArgmaxRule, CoupledSampling
from truedraft.verification.lossy import LenientSampling, TypicalAcceptance
from truedraft.verification.rule import Rule
from truedraft.verification.speculative import SpeculativeSampling

__all__ = [
    "ArgmaxRule",
    "BlockVerification",
    "CoupledSampling",
    "LenientSampling",
    "Rule",
    "SpeculativeSampling",
    "TypicalAcceptance",
]
