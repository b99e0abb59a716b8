"""What token trees bring: by counts of rank paths, and the best tree for measured acceptance by depth and rank.

Paths: Medusa (arXiv 2401.10774).

Best tree: Sequoia (arXiv 2402.12374), section on tree construction, with acceptance that may change with depth.
`acceptance[depth][rank]` is the probability that the child of that rank (from 0, in the order in which the drafter
draws or lists children) of an accepted node at that depth (0 is the root) is the accepted one. Ranks exclude each
other, so a row sums to 1 at most. One row alone means the same at every depth; below the last of several rows nothing
is accepted. A child of rank r exists only beside those of lower rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from truedraft.errors import OptionError
from truedraft.options import check_share, check_whole
from truedraft.theory.chains import predicted_speedup

Acceptance = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class BestTree:
    """A tree, numbered level by level, so that parents come before their children and ranks rise among siblings.

    Attributes:
        parents: for each node an earlier node, or -1 for the root.
        survival: for each node the probability that it is accepted.
    """

    parents: tuple[int, ...]
    survival: tuple[float, ...]

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
        """1 + the sum of the nodes' survival: tokens per target call, the recovered or bonus token included."""
        return 1.0 + math.fsum(self.survival)


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

    Worked example: with acceptance ((0.6, 0.3),) and 3 nodes the survivals 0.6, 0.36 (below it) and 0.3 (beside it)
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
    survival: list[float] = []
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
            survival.append(reached * rate)
            left -= mine
    return BestTree(tuple(parents), tuple(survival))


def _row(acceptance: Acceptance, depth: int) -> Sequence[float]:
    return acceptance[0] if len(acceptance) == 1 else acceptance[depth]


def _depth_limit(acceptance: Acceptance, nodes: int, max_depth: int | None) -> int:
    """The longest path there can be; refuses what is no table of acceptance."""
    check_whole("nodes", nodes, least=0)
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
        check_whole("max_depth", max_depth, least=0)
        limit = min(limit, max_depth)
    return limit


def expected_tokens_if_independent(paths: Iterable[Sequence[int]], accuracy: Sequence[Sequence[float]]) -> float:
    """1 + the sum over paths of the product of accuracies: tokens per target call if heads erred independently.

    A node of a tree of candidates is a path of ranks from the root, and brings the share of places, on held-out text,
    where the true continuation follows that very path. Heads err together, which such counts see and the product of
    accuracies does not; it stands beside the counted length to show by how much.

    Worked example: with accuracies 0.6 and 0.2 of the first head's first two ranks and 0.5 of the second head's first
    one, the paths (0), (1) and (0, 0) come to 1 + 0.6 + 0.2 + 0.6 * 0.5 = 2.1.

    Args:
        paths: of ranks from 0, one for each node.
        accuracy: `[heads][ranks]`: how often the true token had which rank among each head's guesses, a fraction.

    Raises:
        OptionError: an accuracy lies outside [0, 1], or a path needs one that is not there.
    """
    for row in accuracy:
        for share in row:
            check_share("each accuracy", share)
    products = []
    for path in paths:
        if len(path) > len(accuracy) or any(not 0 <= rank < len(accuracy[head]) for head, rank in enumerate(path)):
            raise OptionError(f"the path {list(path)} needs accuracies of heads and ranks that were not counted")
        products.append(math.prod(accuracy[head][rank] for head, rank in enumerate(path)))
    return 1.0 + math.fsum(products)
