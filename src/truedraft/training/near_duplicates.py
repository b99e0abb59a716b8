"""Find near-duplicate texts exactly, so that both copies of a text land on one side of a split.

Two texts are near duplicates when the Jaccard similarity of their sets of 13-word windows is above a
threshold. All pairwise intersections are counted through an inverted index (no sampling, no hashing of
signatures), which for a few thousand texts is a matter of seconds.
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_WORD = re.compile(r"\w+|[^\w\s]")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def near_duplicate_clusters(texts: Sequence[str], *, window: int = 13, threshold: float = 0.5) -> list[list[int]]:
    """Partition the texts into clusters of (transitively) near-duplicate ones.

    Two texts are linked when the Jaccard similarity of their `window`-gram sets exceeds `threshold`.
    A text shorter than one window counts as a single window. Returns lists of indices into `texts`, each
    in ascending order, ordered by their first member.
    """
    grams = [_window_hashes(text, window) for text in texts]
    sizes = np.array([len(gram) for gram in grams], dtype=np.int64)
    shared = _shared_counts(grams)
    union = sizes[:, None] + sizes[None, :] - shared
    linked = shared > threshold * union
    parent = list(range(len(texts)))
    for left, right in np.argwhere(np.triu(linked, k=1)):
        parent[_root(parent, int(right))] = _root(parent, int(left))
    clusters: dict[int, list[int]] = {}
    for index in range(len(texts)):
        clusters.setdefault(_root(parent, index), []).append(index)
    return sorted(clusters.values())


def _window_hashes(text: str, window: int) -> NDArray[np.uint64]:
    """The distinct 64-bit hashes of all windows of words in the text."""
    words = np.array([zlib.crc32(word.encode()) for word in _WORD.findall(text)], dtype=np.uint64)
    count = max(1, len(words) - window + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(min(window, len(words))):
        piece = words[offset : offset + count]
        hashes[: len(piece)] = (hashes[: len(piece)] ^ piece) * _MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes)


def _shared_counts(grams: Sequence[NDArray[np.uint64]]) -> NDArray[np.int64]:
    """How many windows each pair of texts shares: [texts, texts]."""
    count = len(grams)
    shared = np.zeros((count, count), dtype=np.int64)
    hashes = np.concatenate(grams)
    owners = np.repeat(np.arange(count), [len(gram) for gram in grams])
    order = np.argsort(hashes, kind="stable")
    hashes, owners = hashes[order], owners[order]
    starts = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]])
    frequency = np.diff(np.r_[starts, len(hashes)])
    for size in np.unique(frequency[frequency > 1]):  # windows found in exactly `size` texts, all at once
        rows = owners[starts[frequency == size][:, None] + np.arange(size)]  # [windows, size]
        for left in range(size - 1):
            for right in range(left + 1, size):
                np.add.at(shared, (rows[:, left], rows[:, right]), 1)
    return shared + shared.T


def _root(parent: list[int], index: int) -> int:
    while parent[index] != index:
        parent[index] = parent[parent[index]]  # halve the path, so that later look-ups are short
        index = parent[index]
    return index
