"""Fixed configurations that the default is held against: few of every family first, then more of the best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

NONE = "none"
GRID: Mapping[str, Sequence[int]] = {
    "draft,num_speculative_tokens=": (1, 2, 3, 4, 6, 8),
    "prompt-lookup,num_speculative_tokens=": (2, 4, 8),
    "medusa,nodes=": (4, 8, 16),
    "redrafter,beams=4,length=4,nodes=": (4, 8, 16),
}
"""Words of each family, with the numbers behind them."""
_COARSE: Mapping[str, Sequence[int]] = dict(zip(GRID, ((2, 6), (4,), (8,), (8,)), strict=True))


def coarse(*, heads: bool) -> list[str]:
    """What is tried first; heads where a call of the target costs enough that they may pay."""
    families = list(GRID) if heads else list(GRID)[:2]
    return [f"{family}{number}" for family in families for number in _COARSE[family]]


def finer(speedups: Mapping[str, float], families: int) -> list[str]:
    """What is tried next: around the best number of each of the best families, up to those that were tried.

    Worked example: of draft chains 2 and 6 were tried; if 2 was the better, 1, 3 and 4 follow, else 3, 4 and 8.

    Args:
        speedups: of what was tried, by its words.
        families: how many of them.
    """
    best = sorted(_best_of_families(speedups), key=lambda words: -speedups[words])[:families]
    return [words for middle in best for words in _around(middle, speedups)]


def _best_of_families(speedups: Mapping[str, float]) -> Iterable[str]:
    for family in GRID:
        tried = [words for words in speedups if words.startswith(family)]
        if tried:
            yield max(tried, key=lambda words: speedups[words])


def _around(words: str, tried: Mapping[str, float]) -> list[str]:
    family = next(family for family in GRID if words.startswith(family))
    grid = [f"{family}{number}" for number in GRID[family]]
    place = grid.index(words)
    below, above = grid[:place][::-1], grid[place + 1 :]
    found = []
    for side in (below, above):
        for other in side:
            if other in tried:
                break
            found.append(other)
    return sorted(found, key=grid.index)


def best(speedups: Mapping[str, float]) -> str:
    """The fastest; `none`, plain decoding, where nothing exceeds 1."""
    words = max(speedups, key=lambda words: speedups[words], default=NONE)
    return words if words != NONE and speedups[words] > 1.0 else NONE
