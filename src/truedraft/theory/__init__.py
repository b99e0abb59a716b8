"""Closed forms of speculative decoding, and cost curves to put into them. Plain numbers: needs no torch, no numpy."""

from truedraft.theory.acceptance import acceptance_rate, least_coupled_acceptance, total_variation
from truedraft.theory.chains import (
    best_gamma,
    expected_tokens,
    expected_tokens_by_position,
    least_speedup,
    operations_factor,
    pays,
    speedup,
)
from truedraft.theory.costs import BatchPoint, DraftCost, DraftPoint, TargetCost
from truedraft.theory.curves import CostCurve, CostSurface
from truedraft.theory.goodput import GoodputChoice, best_length_under_load, goodput
from truedraft.theory.node_budget import NodeChoice, NodeOption, best_node_budget
from truedraft.theory.paths import expected_tokens_if_independent, expected_tokens_of_paths
from truedraft.theory.prediction import LengthChoice, best_length, predicted_speedup
from truedraft.theory.replay import replay_factor, replayed_tokens
from truedraft.theory.trees import BestTree, TreeChoice, best_tree, best_tree_for_cost, greedy_tree

__all__ = [
    "BatchPoint",
    "BestTree",
    "CostCurve",
    "CostSurface",
    "DraftCost",
    "DraftPoint",
    "GoodputChoice",
    "LengthChoice",
    "NodeChoice",
    "NodeOption",
    "TargetCost",
    "TreeChoice",
    "acceptance_rate",
    "best_gamma",
    "best_length",
    "best_length_under_load",
    "best_node_budget",
    "best_tree",
    "best_tree_for_cost",
    "expected_tokens",
    "expected_tokens_by_position",
    "expected_tokens_if_independent",
    "expected_tokens_of_paths",
    "goodput",
    "greedy_tree",
    "least_coupled_acceptance",
    "least_speedup",
    "operations_factor",
    "pays",
    "predicted_speedup",
    "replay_factor",
    "replayed_tokens",
    "speedup",
    "total_variation",
]
