"""Expected length of a tree of candidates from counts of rank paths (Medusa, arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Iterable

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
