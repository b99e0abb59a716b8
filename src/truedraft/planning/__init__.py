"""What drafting brings: how many nodes pay, by measured costs."""

from truedraft.planning.sizes import NodeBudget, choose_nodes, nodes_for, ratio_of_steps, sized

__all__ = ["NodeBudget", "choose_nodes", "nodes_for", "ratio_of_steps", "sized"]
