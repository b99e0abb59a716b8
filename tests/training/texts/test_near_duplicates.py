"""Planted near duplicates are found, and only they; counts agree with brute force."""

from __future__ import annotations

import random

from truedraft.training.texts.data import near_duplicate_clusters


def words(seed: int, count: int = 300) -> list[str]:
    source = random.Random(seed)
    return [f"w{source.randrange(5000)}" for _ in range(count)]


def brute_force(left: str, right: str) -> float:
    sets = []
    for text in (left, right):
        split = text.split()
        sets.append({tuple(split[i : i + 13]) for i in range(len(split) - 12)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_planted_duplicates_share_a_cluster():
    original = words(1)
    edited = [*original[:150], "changed", *original[151:]]  # 13 of 288 windows differ
    half = [*original[:100], *words(2, 200)]  # too little in common
    texts = [" ".join(t) for t in (original, words(3), edited, half, original)]
    assert near_duplicate_clusters(texts) == [[0, 2, 4], [1], [3]]


def test_threshold_against_brute_force():
    base = words(5)
    for shared in range(120, 300, 20):
        other = [*base[:shared], *words(6, 300 - shared)]
        pair = [" ".join(base), " ".join(other)]
        linked = len(near_duplicate_clusters(pair)) == 1
        assert linked == (brute_force(*pair) > 0.5)


def test_links_are_transitive():
    base = words(7, 320)
    steps = [base[start : start + 200] for start in (0, 50, 100)]  # neighbours share 3/5, the ends 1/3
    assert near_duplicate_clusters([" ".join(step) for step in steps]) == [[0, 1, 2]]


def test_short_and_empty_texts():
    assert near_duplicate_clusters(["pass", "pass", "", "x = 1"]) == [[0, 1], [2], [3]]
