"""The tree of at most n nodes with the most expected tokens, for measured acceptance by depth and rank.

Sequoia (arXiv 2402.12374), section on tree construction, with acceptance that may change with depth.
`acceptance[depth][rank]` is the probability that the child of that rank (from 0, in the order in which the drafter
draws or lists children) of an accepted node at that depth (0 is the root) is the accepted one. Ranks exclude each
other, so a row sums to 1 at most. One row alone means the same at every depth; below the last of several rows nothing
is accepted. A child of rank r exists only beside those of lower rank.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from truedraft.errors import OptionError
from truedraft.theory.arguments import check_share, check_whole
from truedraft.theory.prediction import predicted_speedup

Acceptance = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class BestTree:
    """A tree, numbered level by level, so that parents come before their children and ranks rise among siblings.

    Attributes:
        parents: for each node an earlier node, or -1 for the root.
        reach: for each node the probability that it is accepted.
    """

    parents: tuple[int, ...]
    reach: tuple[float, ...]

    @property
    def nodes(self) -> int:
        """Number of nodes, the root not counted."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Length of the longest path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)

    @property
    def expected_tokens(self) -> float:
        """1 + the sum of the nodes' reach: tokens per target call, the recovered or bonus token included."""
        return 1.0 + math.fsum(self.reach)


@dataclass(frozen=True, slots=True)
class TreeChoice:
    """A tree and what it is predicted to gain.

    Attributes:
        tree: no nodes where drafting does not pay.
        speedup: predicted factor over plain decoding.
    """

    tree: BestTree
    speedup: float


def best_tree(acceptance: Acceptance, nodes: int, max_depth: int | None = None) -> BestTree:
    """The tree with the most expected tokens, by dynamic programming; of equals, one with fewer nodes.

    Worked example: with acceptance ((0.6, 0.3),) and 3 nodes the reaches 0.6, 0.36 (below it) and 0.3 (beside it)
    are the largest: parents (-1, -1, 0), 2.26 expected tokens.

    Args:
        acceptance: see the module; fractions.
        nodes: most nodes, 0 or more.
        max_depth: longest path; None leaves it to the rows and the nodes.

    Raises:
        OptionError: an acceptance that is no such table, or an argument out of range.
    """
    depth = _depth_limit(acceptance, nodes, max_depth)
    return _grow(acceptance, _solve(acceptance, nodes, depth), nodes, depth)


def greedy_tree(acceptance: Acceptance, nodes: int, max_depth: int | None = None) -> BestTree:
    """The same by taking the node of largest reach again and again, in about nodes * log(nodes) steps.

    Exact where no rank is likelier than the one before it: then a node's parent and its elder sibling reach at least
    as far, so the likeliest nodes always form a tree.

    Args:
        acceptance: see the module; rows must not rise.
        nodes: most nodes, 0 or more.
        max_depth: longest path; None leaves it to the rows and the nodes.

    Raises:
        OptionError: as `best_tree`, or a row that rises.
    """
    limit = _depth_limit(acceptance, nodes, max_depth)
    for row in acceptance:
        if any(later > earlier for earlier, later in itertools.pairwise(row)):
            raise OptionError(f"greedy_tree needs acceptance that falls with rank, got {list(row)}; use best_tree")
    # A candidate: reach (negative, for the heap takes the smallest), depth, path of ranks.
    heap: list[tuple[float, int, tuple[int, ...]]] = []
    _push(heap, acceptance, 1.0, (0,), limit)
    chosen: dict[tuple[int, ...], float] = {}
    while heap and len(chosen) < nodes:
        negative, _, path = heapq.heappop(heap)
        chosen[path] = -negative
        parent = chosen[path[:-1]] if len(path) > 1 else 1.0
        _push(heap, acceptance, parent, (*path[:-1], path[-1] + 1), limit)
        _push(heap, acceptance, -negative, (*path, 0), limit)
    order = sorted(chosen, key=lambda path: (len(path), path))
    number = {path: node for node, path in enumerate(order)}
    return BestTree(tuple(number.get(path[:-1], -1) for path in order), tuple(chosen[path] for path in order))


def best_tree_for_cost(
    acceptance: Acceptance,
    verify_s: Callable[[int], float],
    draft_s: Callable[[int, int], float],
    max_nodes: int,
    max_depth: int | None = None,
) -> TreeChoice:
    """The tree with the largest predicted speed-up: expected tokens V(1) / (V(nodes + 1) + draft cost).

    Args:
        acceptance: see the module; fractions.
        verify_s: V: seconds of the target's forward by its rows; a tree of n nodes takes n + 1.
        draft_s: seconds of drafting by (depth, nodes); not asked for an empty tree, which costs nothing.
        max_nodes: most nodes to consider.
        max_depth: longest path to consider; None leaves it to the rows and the nodes.

    Raises:
        OptionError: an acceptance that is no such table, or an argument or a cost out of range.
    """
    limit = _depth_limit(acceptance, max_nodes, max_depth)
    plain_s = verify_s(1)
    verify = [verify_s(nodes + 1) for nodes in range(max_nodes + 1)]
    best = TreeChoice(BestTree((), ()), 1.0)
    for depth in range(1, limit + 1):
        levels = _solve(acceptance, max_nodes, depth)
        if len(levels) < depth:
            break  # one row for all depths, and deeper trees bring nothing more
        gains = levels[-1].gain
        for nodes in range(depth, max_nodes + 1):
            factor = predicted_speedup(1.0 + gains[nodes], plain_s, verify[nodes], draft_s(depth, nodes))
            if factor > best.speedup:
                best = TreeChoice(_grow(acceptance, levels, nodes, depth), factor)
    return best


@dataclass(frozen=True, slots=True)
class _Level:
    """Solved: what hangs below a node at one depth.

    Attributes:
        gain: `[nodes + 1]`: most expected accepted nodes among n below it, given that it is accepted.
        share: `[rank][nodes + 1]`: nodes given to the child of that rank and its descendants, when n are left for it
            and its younger siblings; 0 ends the row of children.
    """

    gain: list[float]
    share: list[list[int]]


def _solve(acceptance: Acceptance, nodes: int, depth: int) -> list[_Level]:
    """Levels from the deepest inner nodes (those with `depth - 1` above them) up to the root.

    Where all depths are alike and a level equals the one below it, so would all above: they are left out.
    """
    levels: list[_Level] = []
    gain = [0.0] * (nodes + 1)
    for at in range(depth - 1, -1, -1):
        level = _solve_level(_row(acceptance, at), gain)
        levels.append(level)
        if len(acceptance) == 1 and level.gain == gain:
            break
        gain = level.gain
    return levels


def _solve_level(row: Sequence[float], below: list[float]) -> _Level:
    """Share nodes among children, the youngest first; `below` is the gain of the level beneath."""
    size = len(below)
    rest = [0.0] * size  # gain of all younger siblings
    shares: list[list[int]] = []
    for rate in reversed(row):
        subtree = [rate * (1.0 + inner) for inner in below]
        gain, share = [0.0] * size, [0] * size
        for nodes in range(1, size):
            for mine in range(1, nodes + 1):
                value = subtree[mine - 1] + rest[nodes - mine]
                if value > gain[nodes]:
                    gain[nodes], share[nodes] = value, mine
        rest = gain
        shares.append(share)
    return _Level(rest, shares[::-1])


def _grow(acceptance: Acceptance, levels: Sequence[_Level], nodes: int, depth: int) -> BestTree:
    """Read the tree back from the solved levels, breadth first."""
    parents: list[int] = []
    reach: list[float] = []
    waiting = deque([(-1, 0, nodes, 1.0)])
    while waiting:
        node, at, left, reached = waiting.popleft()
        if at == depth or not left:
            continue
        level = levels[min(depth - at, len(levels)) - 1]
        for rate, share in zip(_row(acceptance, at), level.share, strict=True):
            mine = share[left]
            if not mine:
                break
            waiting.append((len(parents), at + 1, mine - 1, reached * rate))
            parents.append(node)
            reach.append(reached * rate)
            left -= mine
    return BestTree(tuple(parents), tuple(reach))


def _push(
    heap: list[tuple[float, int, tuple[int, ...]]],
    acceptance: Acceptance,
    parent: float,
    path: tuple[int, ...],
    limit: int,
) -> None:
    """Offer the node of a path of ranks, if it may exist and can be reached; `parent` is its parent's reach."""
    if len(path) > limit:
        return
    row = _row(acceptance, len(path) - 1)
    if path[-1] < len(row) and row[path[-1]] * parent > 0.0:
        heapq.heappush(heap, (-parent * row[path[-1]], len(path), path))


def _row(acceptance: Acceptance, depth: int) -> Sequence[float]:
    return acceptance[0] if len(acceptance) == 1 else acceptance[depth]


def _depth_limit(acceptance: Acceptance, nodes: int, max_depth: int | None) -> int:
    """The longest path there can be; refuses what is no table of acceptance."""
    check_whole("nodes", nodes, lowest=0)
    if not acceptance:
        raise OptionError("acceptance needs at least one row, got none")
    for row in acceptance:
        for rate in row:
            check_share("each acceptance", rate)
        if math.fsum(row) > 1.0 + 1e-9:
            raise OptionError(
                f"a row of acceptance sums to 1 at most, for one child is accepted; got {math.fsum(row):.6g}"
            )
    limit = nodes if len(acceptance) == 1 else min(nodes, len(acceptance))
    if max_depth is not None:
        check_whole("max_depth", max_depth, lowest=0)
        limit = min(limit, max_depth)
    return limit
