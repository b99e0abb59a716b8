"""Closed forms of speculative decoding, and cost curves to put into them. Plain numbers: needs no torch, no numpy."""

from truedraft.theory.acceptance_curve import AcceptanceCurve, SizeOption, best_length, best_option, size_options
from truedraft.theory.chains import (
    acceptance_rate,
    best_gamma,
    expected_tokens,
    expected_tokens_by_position,
    least_coupled_acceptance,
    least_speedup,
    operations_factor,
    pays,
    replay_factor,
    replayed_tokens,
    speedup,
    total_variation,
)
from truedraft.theory.cost_curves import BatchPoint, CostCurve, CostSurface, DraftCost, DraftPoint, TargetCost
from truedraft.theory.speedup import GoodputChoice, best_length_under_load, goodput, predicted_speedup
from truedraft.theory.trees import (
    BestTree,
    TreeChoice,
    best_tree,
    best_tree_for_cost,
    expected_tokens_if_independent,
)

__all__ = [
    "AcceptanceCurve",
    "BatchPoint",
    "BestTree",
    "CostCurve",
    "CostSurface",
    "DraftCost",
    "DraftPoint",
    "GoodputChoice",
    "SizeOption",
    "TargetCost",
    "TreeChoice",
    "acceptance_rate",
    "best_gamma",
    "best_length",
    "best_length_under_load",
    "best_option",
    "best_tree",
    "best_tree_for_cost",
    "expected_tokens",
    "expected_tokens_by_position",
    "expected_tokens_if_independent",
    "goodput",
    "least_coupled_acceptance",
    "least_speedup",
    "operations_factor",
    "pays",
    "predicted_speedup",
    "replay_factor",
    "replayed_tokens",
    "size_options",
    "speedup",
    "total_variation",
]
