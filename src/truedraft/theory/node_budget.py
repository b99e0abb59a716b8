"""How many nodes of a growing tree to draft: what each node brings against what it costs to verify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from truedraft.theory.arguments import check_share
from truedraft.theory.prediction import predicted_speedup


@dataclass(frozen=True, slots=True)
class NodeOption:
    """One node budget.

    Attributes:
        nodes: of the tree; 0 is plain decoding.
        expected_tokens: tokens emitted per target call.
        speedup: predicted factor over plain decoding.
    """

    nodes: int
    expected_tokens: float
    speedup: float


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The best of several node budgets.

    Attributes:
        best: with the largest predicted speed-up, the fewest nodes of several.
        table: all that were considered, from 0 nodes up.
    """

    best: NodeOption
    table: tuple[NodeOption, ...]


def best_node_budget(
    reach: Sequence[float], verify_s: Callable[[int], float], draft_s: Callable[[int], float]
) -> NodeChoice:
    """The number of nodes n with the largest tau(n) V(1) / (V(n + 1) + draft cost), tau(n) = 1 + the first n reaches.

    Worked example: reaches (0.6, 0.3), V = 10, 11 and 20 ms for 1, 2 and 3 rows and 1 ms of drafting predict 1.6 * 10 /
    12 = 1.33 with one node and 1.9 * 10 / 21 = 0.90 with two: one node it is.

    Args:
        reach: for each node, in the order in which a budget takes them, the probability that it is accepted.
        verify_s: V: seconds of the target's forward by the rows of each request; a tree of n nodes takes n + 1.
        draft_s: seconds of one proposal by its nodes; not asked for 0 nodes, which cost nothing.

    Raises:
        OptionError: a reach lies outside [0, 1], or a cost is out of range.
    """
    plain_s = verify_s(1)
    table = [NodeOption(0, 1.0, 1.0)]
    tau = 1.0
    for nodes, gain in enumerate(reach, 1):
        check_share("each reach", gain)
        tau += gain
        table.append(NodeOption(nodes, tau, predicted_speedup(tau, plain_s, verify_s(nodes + 1), draft_s(nodes))))
    return NodeChoice(max(table, key=lambda option: option.speedup), tuple(table))
