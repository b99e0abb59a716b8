"""Verification rules: which drafted tokens are accepted, and how the next token is drawn; imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from truedraft.lazy import loads

if TYPE_CHECKING:
    from truedraft.verification.block import BlockVerification
    from truedraft.verification.coupled import ArgmaxRule, CoupledSampling
    from truedraft.verification.lossy import LenientSampling, TypicalAcceptance
    from truedraft.verification.rule import Rule
    from truedraft.verification.speculative import SpeculativeSampling

_MODULES = {
    "block": ("BlockVerification",),
    "coupled": ("ArgmaxRule", "CoupledSampling"),
    "lossy": ("LenientSampling", "TypicalAcceptance"),
    "rule": ("Rule",),
    "speculative": ("SpeculativeSampling",),
}
__getattr__ = loads(__name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names})

__all__ = [
    "ArgmaxRule",
    "BlockVerification",
    "CoupledSampling",
    "LenientSampling",
    "Rule",
    "SpeculativeSampling",
    "TypicalAcceptance",
]
