"""Expected length of a tree of candidates from counts of rank paths (Medusa, arXiv 2401.10774)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from truedraft.errors import OptionError
from truedraft.theory.arguments import check_share


def expected_tokens_of_paths(frequencies: Iterable[float]) -> float:
    """1 + the sum of path frequencies: tokens per target call of a tree of candidates.

    A node of the tree is a path of ranks from the root; its frequency is the share of places, on held-out text, where
    the true continuation follows that very path. Such counts see that heads err together; the product of per-head
    accuracies does not.

    Args:
        frequencies: one for each node, a fraction.

    Raises:
        OptionError: a frequency lies outside [0, 1].
    """
    total = 1.0
    for frequency in frequencies:
        check_share("each path frequency", frequency)
        total += frequency
    return total


def expected_tokens_if_independent(paths: Iterable[Sequence[int]], accuracy: Sequence[Sequence[float]]) -> float:
    """1 + the sum over paths of the product of accuracies: the same if heads erred independently of each other.

    They err together, so this is off; it stands beside the counted length to show by how much.

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
