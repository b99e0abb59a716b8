"""The law of what a shipped `verify` answers, in every decision cell: the code is part of the package.

These tests hold it against `small_worlds`, whose reference is in exact fractions and shares nothing with it.
"""

from __future__ import annotations

from truedraft.certify.decision_cells import BELOW_ONE, NEAR, Key, ScriptedNoise, cell_laws, run
from truedraft.certify.verdict_laws import completed, kernel_law, step_law
from truedraft.certify.verdict_laws import node_kernel as kernel_of_slot

__all__ = [
    "BELOW_ONE",
    "NEAR",
    "Key",
    "ScriptedNoise",
    "cell_laws",
    "completed",
    "kernel_law",
    "kernel_of_slot",
    "run",
    "step_law",
]
