"""What drafting brings: traces and their replay, the trees that are kept with heads, and how many nodes pay."""

from truedraft.planning.beam_trees import BeamTokens, ReplayedBeams, facts_of, replay_beams
from truedraft.planning.guesses import HeadGuesses
from truedraft.planning.head_trees import BUDGETS, TREE_TEMPERATURES, CountedTree, count_trees, survival_of
from truedraft.planning.rank_paths import RankTable, choose_tree
from truedraft.planning.replay import CURVE_NODES, Trace, TraceReplay
from truedraft.planning.sizes import NodeBudget, node_options, nodes_for, ratio_of_steps, sized

__all__ = [
    "BUDGETS",
    "CURVE_NODES",
    "TREE_TEMPERATURES",
    "BeamTokens",
    "CountedTree",
    "HeadGuesses",
    "NodeBudget",
    "RankTable",
    "ReplayedBeams",
    "Trace",
    "TraceReplay",
    "choose_tree",
    "count_trees",
    "facts_of",
    "node_options",
    "nodes_for",
    "ratio_of_steps",
    "replay_beams",
    "sized",
    "survival_of",
]
