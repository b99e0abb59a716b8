"""Closed forms of speculative decoding, and cost curves for them. Plain numbers: needs no torch, no numpy."""

from truedraft.core.theory.acceptance_curve import AcceptanceCurve, SizeOption, best_option, size_options
from truedraft.core.theory.chains import (
    best_gamma,
    expected_tokens,
    expected_tokens_if_independent,
    least_speedup,
    operations_factor,
    pays,
    predicted_speedup,
    replay_factor,
    speedup,
)
from truedraft.core.theory.cost_curves import (
    SETTLED,
    BatchPoint,
    CostCurve,
    CostSurface,
    DraftCost,
    DraftPoint,
    ForwardTable,
    TargetCost,
)
from truedraft.core.theory.significance import holm

__all__ = [
    "SETTLED",
    "AcceptanceCurve",
    "BatchPoint",
    "CostCurve",
    "CostSurface",
    "DraftCost",
    "DraftPoint",
    "ForwardTable",
    "SizeOption",
    "TargetCost",
    "best_gamma",
    "best_option",
    "expected_tokens",
    "expected_tokens_if_independent",
    "holm",
    "least_speedup",
    "operations_factor",
    "pays",
    "predicted_speedup",
    "replay_factor",
    "size_options",
    "speedup",
]
