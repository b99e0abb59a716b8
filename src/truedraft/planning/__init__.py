"""What speculation costs on this machine: read bandwidth, forwards of a target, proposals of a drafter."""

from truedraft.planning.bandwidth import ReadBandwidth, read_bandwidth
from truedraft.planning.costs import Measured, drafter_cost, judge_target_cost, kept_target_cost, target_cost
from truedraft.planning.curve_check import CurveCheck, parts, ratio_of_steps
from truedraft.planning.machine import Machine, this_machine
from truedraft.planning.measure_drafter import measure_drafter
from truedraft.planning.measure_target import measure_target
from truedraft.planning.rounds import Effort, Progress
from truedraft.planning.store import CostStore
from truedraft.planning.tree_budget import NodeBudget, choose_nodes, nodes_for, sized

__all__ = [
    "CostStore",
    "CurveCheck",
    "Effort",
    "Machine",
    "Measured",
    "NodeBudget",
    "Progress",
    "ReadBandwidth",
    "choose_nodes",
    "drafter_cost",
    "judge_target_cost",
    "kept_target_cost",
    "measure_drafter",
    "measure_target",
    "nodes_for",
    "parts",
    "ratio_of_steps",
    "read_bandwidth",
    "sized",
    "target_cost",
    "this_machine",
]
