"""The likeliest rank paths against a search that takes them up one by one, and by hand."""

from __future__ import annotations

import heapq
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truedraft.core.rank_tree import CandidatePaths, candidate_paths, likeliest_paths
from truedraft.core.tree import TreeShape
from truedraft.errors import OptionError

Path = tuple[int, ...]


def one_by_one(log_probs: np.ndarray, nodes: int) -> list[Path]:
    """The same by the definition, for one row `[depth, ranks]`: a heap of paths whose parent was taken."""
    depth, ranks = log_probs.shape

    def below(score: np.float32, path: Path) -> list[tuple[float, int, Path]]:
        if len(path) == depth:
            return []
        own = log_probs[len(path)]
        return [(-float(score + own[rank]), len(path) + 1, (*path, rank)) for rank in range(ranks)]

    waiting = below(np.float32(0.0), ())
    heapq.heapify(waiting)
    found: list[Path] = []
    while waiting and len(found) < nodes:
        score, _, path = heapq.heappop(waiting)
        found.append(path)
        for child in below(np.float32(-score), path):
            heapq.heappush(waiting, child)
    return found


def paths_of(places: np.ndarray, shape: TreeShape, ranks: int) -> list[Path]:
    """Rank paths of a tree's nodes, by its parents."""
    paths: list[Path] = []
    for place, parent in zip(places.tolist(), shape.parents, strict=True):
        above = paths[parent] if parent >= 0 else ()
        assert place // ranks == len(above), "a node below the root takes the first head's guess, and so on"
        paths.append((*above, place % ranks))
    return paths


@st.composite
def guesses(draw: st.DrawFn) -> np.ndarray:
    """Falling log probabilities `[depth, rows, ranks]`, often equal ones."""
    depth, rows, ranks = (draw(st.integers(1, most)) for most in (5, 3, 6))
    steps = st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0, math.inf]) | st.floats(0.0, 5.0, width=32)
    found = [-draw(steps) for _ in range(depth * rows * ranks)]
    return np.sort(np.array(found, np.float32).reshape(depth, rows, ranks), axis=-1)[..., ::-1].copy()


@settings(max_examples=300, deadline=None)
@given(guesses(), st.integers(1, 40))
def test_they_are_those_of_a_search_that_takes_one_path_after_another(log_probs: np.ndarray, nodes: int) -> None:
    _, rows, ranks = log_probs.shape
    chosen = likeliest_paths(log_probs, nodes)
    for row in range(rows):
        expected = sorted(one_by_one(log_probs[:, row], nodes), key=lambda path: (len(path), path))
        assert paths_of(chosen.places[row], chosen.shapes[row], ranks) == expected
        alone = likeliest_paths(log_probs[:, row : row + 1], nodes)
        assert alone.places[0].tolist() == chosen.places[row].tolist() and alone.shapes[0] is chosen.shapes[row]


EXAMPLE = np.log(np.array([[[0.6, 0.3]], [[0.5, 0.4]]], np.float32))  # of the docstring


@pytest.mark.parametrize(
    ("nodes", "paths", "parents"),
    [
        (1, [(0,)], (-1,)),
        (3, [(0,), (1,), (0, 0)], (-1, -1, 0)),
        (4, [(0,), (1,), (0, 0), (0, 1)], (-1, -1, 0, 0)),
        (5, [(0,), (1,), (0, 0), (0, 1), (1, 0)], (-1, -1, 0, 0, 1)),
        (9, [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)], (-1, -1, 0, 0, 1, 1)),
    ],
)
def test_by_hand(nodes: int, paths: list[Path], parents: tuple[int, ...]) -> None:
    chosen = likeliest_paths(EXAMPLE, nodes)
    assert chosen.shapes == [TreeShape(parents)]
    assert paths_of(chosen.places[0], chosen.shapes[0], 2) == paths
    if nodes == 4:
        assert chosen.places.tolist() == [[0, 1, 2, 3]]


def test_the_worked_candidates() -> None:
    candidates = CandidatePaths(2, 3, 3)
    assert candidates.paths == [(0,), (1,), (2,), (0, 0), (0, 1)]
    assert candidates.parents.tolist() == [-1, -1, -1, 0, 0]
    assert candidates.places.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("depth", "ranks", "nodes"), [(1, 9, 4), (2, 3, 50), (3, 4, 7), (4, 32, 32), (5, 2, 16)])
def test_candidates_are_the_paths_that_few_others_dominate(depth: int, ranks: int, nodes: int) -> None:
    def before(path: Path) -> int:
        return sum(math.prod(rank + 1 for rank in path[:length]) for length in range(1, len(path) + 1))

    candidates = candidate_paths(depth, ranks, nodes)
    if ranks**depth < 5000:
        every = (p for length in range(1, depth + 1) for p in itertools.product(range(ranks), repeat=length))
        assert candidates.paths == [path for path in every if before(path) <= nodes]
    assert all(before(path) <= nodes and len(path) <= depth for path in candidates.paths)
    assert candidates.nodes == min(nodes, len(candidates.paths))
    number = {path: place for place, path in enumerate(candidates.paths)} | {(): -1}
    assert candidates.parents.tolist() == [number[path[:-1]] for path in candidates.paths]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), min_size=4, max_size=4), min_size=1, max_size=5))
def test_a_path_is_found_as_far_as_it_is_a_candidate(ranks: list[list[int]]) -> None:
    candidates = CandidatePaths(3, 5, 12)
    number = {path: place for place, path in enumerate(candidates.paths)}
    expected = [[number.get(tuple(each[: length + 1]), -1) for length in range(4)] for each in ranks]
    assert candidates.find(np.array(ranks)).tolist() == expected


def test_sums_of_many_sizes_are_closed_under_parents_though_rounded() -> None:
    """Also where rounding made a log probability positive, or heads said NaN."""
    generator = np.random.default_rng(0)
    log_probs = np.sort(generator.normal(-3.0, 2.0, (4, 200, 20)).astype(np.float32), axis=-1)[..., ::-1].copy()
    log_probs[:, :50] = np.where(log_probs[:, :50] > -1.0, 1e-7, log_probs[:, :50])
    log_probs[1, 50:60] = np.nan
    log_probs[:, 60] = np.nan
    log_probs[2, 61] = -np.inf
    chosen = likeliest_paths(log_probs, 24)
    for places, shape in zip(chosen.places, chosen.shapes, strict=True):
        paths = paths_of(places, shape, 20)
        assert len(set(paths)) == 24 and all(path[:-1] in {(), *paths} for path in paths)


@pytest.mark.parametrize("sizes", [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_trees_of_nothing_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(OptionError, match="1 or more"):
        CandidatePaths(*sizes)
    with pytest.raises(OptionError, match="1 or more"):
        likeliest_paths(np.zeros((sizes[0], 1, sizes[1]), np.float32), sizes[2])
