"""What drafting brings: traces and their replay, plans, the trees that are kept with heads, and how many nodes pay."""

from truedraft.planning.beam_trees import BeamTokens, ReplayedBeams, facts_of, replay_beams
from truedraft.planning.candidates import Candidate, candidates_of, fitting_drafters
from truedraft.planning.guesses import HeadGuesses
from truedraft.planning.head_trees import BUDGETS, TREE_TEMPERATURES, CountedTree, count_trees, survival_of
from truedraft.planning.plan import NONE, PLAN_FILE, Plan, make_plan, read_plan
from truedraft.planning.predictions import (
    BATCHES,
    Drafting,
    Interval,
    Prediction,
    WhatIf,
    prediction_record,
    ratio_of_rates,
)
from truedraft.planning.rank_paths import RankTable, choose_tree
from truedraft.planning.replay import CURVE_NODES, Trace, TraceReplay
from truedraft.planning.sizes import NodeBudget, node_options, nodes_for, ratio_of_steps, sized
from truedraft.planning.traces import AnswerTrace, StepWatcher, trace_answers
from truedraft.planning.walks import Walk, walk_along

__all__ = [
    "BATCHES",
    "BUDGETS",
    "CURVE_NODES",
    "NONE",
    "PLAN_FILE",
    "TREE_TEMPERATURES",
    "AnswerTrace",
    "BeamTokens",
    "Candidate",
    "CountedTree",
    "Drafting",
    "HeadGuesses",
    "Interval",
    "NodeBudget",
    "Plan",
    "Prediction",
    "RankTable",
    "ReplayedBeams",
    "StepWatcher",
    "Trace",
    "TraceReplay",
    "Walk",
    "WhatIf",
    "candidates_of",
    "choose_tree",
    "count_trees",
    "facts_of",
    "fitting_drafters",
    "make_plan",
    "node_options",
    "nodes_for",
    "prediction_record",
    "ratio_of_rates",
    "ratio_of_steps",
    "read_plan",
    "replay_beams",
    "sized",
    "survival_of",
    "trace_answers",
    "walk_along",
]
