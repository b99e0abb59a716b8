"""The distribution of what a shipped `verify` answers, in every decision cell: the code is part of the package.

These tests hold it against `small_worlds`, whose reference is in exact fractions and shares nothing with it.
"""

from __future__ import annotations

from truedraft.certify.cells import BELOW_ONE, NEAR, Key, ScriptedNoise, completed, run
from truedraft.certify.cells import cell_probs as cell_probs
from truedraft.certify.cells import kernel_probs as kernel_dist
from truedraft.certify.cells import step_probs as step_dist

__all__ = [
    "BELOW_ONE",
    "NEAR",
    "Key",
    "ScriptedNoise",
    "cell_probs",
    "completed",
    "kernel_dist",
    "run",
    "step_dist",
]
