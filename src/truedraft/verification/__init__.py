"""Verification rules: which drafted tokens stay, and what is drawn where they stop."""

from truedraft.verification.block import BlockVerification
from truedraft.verification.coupled import CoupledSampling
from truedraft.verification.lenience import LenientSampling
from truedraft.verification.rule import Rule
from truedraft.verification.speculative import SpeculativeSampling
from truedraft.verification.typical import TypicalAcceptance

__all__ = [
    "BlockVerification",
    "CoupledSampling",
    "LenientSampling",
    "Rule",
    "SpeculativeSampling",
    "TypicalAcceptance",
]
