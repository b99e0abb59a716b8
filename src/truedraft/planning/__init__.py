"""What drafting brings: traces and their replay, plans, the trees that are kept with heads, and how many nodes pay."""

from truedraft.planning.beam_trees import BeamTokens, ReplayedBeams, facts_of, replay_beams
from truedraft.planning.candidates import candidates_of, fitting_drafters
from truedraft.planning.head_trees import BUDGETS, TREE_TEMPERATURES, CountedTree, count_trees, survival_of
from truedraft.planning.load import Level, Traffic, levels, load_record
from truedraft.planning.plan import NONE, Plan, footprint_of, make_plan, read_plan
from truedraft.planning.predictions import (
    BATCHES,
    CONFIDENCE,
    Footprint,
    Interval,
    Prediction,
    WhatIf,
    prediction_record,
    ratio_of_rates,
    ratio_over_prompts,
)
from truedraft.planning.replay import Trace
from truedraft.planning.sizes import NodeBudget, node_options, nodes_for, outdated, sized
from truedraft.planning.traces import StepWatcher, outputs_along, traces_of_answers
from truedraft.planning.walks import walk_along

__all__ = [
    "BATCHES",
    "BUDGETS",
    "CONFIDENCE",
    "NONE",
    "TREE_TEMPERATURES",
    "BeamTokens",
    "CountedTree",
    "Footprint",
    "Interval",
    "Level",
    "NodeBudget",
    "Plan",
    "Prediction",
    "ReplayedBeams",
    "StepWatcher",
    "Trace",
    "Traffic",
    "WhatIf",
    "candidates_of",
    "count_trees",
    "facts_of",
    "fitting_drafters",
    "footprint_of",
    "levels",
    "load_record",
    "make_plan",
    "node_options",
    "nodes_for",
    "outdated",
    "outputs_along",
    "prediction_record",
    "ratio_of_rates",
    "ratio_over_prompts",
    "read_plan",
    "replay_beams",
    "sized",
    "survival_of",
    "traces_of_answers",
    "walk_along",
]
