"""Where endings occurred: against a search of all stored texts, also when old ones were written over."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truedraft.drafters.suffix.index import END, LENGTHS, WALKED, WINDOW, SuffixIndex, _hashes, hash_of

DEPTH = 5


def searched(stored: Sequence[int], kept: int, ending: Sequence[int]) -> list[tuple[int, list[int]]]:
    """All matches among the last `kept` stored tokens, by looking at every place: length and what followed."""
    first = max(len(stored) - kept, 0)
    found = []
    for last in range(first, len(stored)):
        length = 0
        while (
            length < min(len(ending), WINDOW)
            and last - length >= first
            and stored[last - length] == ending[-1 - length]
            and stored[last - length] != END
        ):
            length += 1
        following = [stored[i] if i < len(stored) else END for i in range(last + 1, last + 1 + DEPTH)]
        if length >= LENGTHS[-1] and following[0] != END:
            found.append((length, following))
    return found


def test_the_latest_of_two_places_comes_first_and_no_ending_matches_across_texts() -> None:
    index = SuffixIndex(1)
    index.add([5, 6, 7, 5, 6, 8])
    found = index.find([5, 6], 3)
    assert (found.lengths, found.following) == ([2, 2], [[8, END, END], [7, 5, 6]])
    assert index.find([6, 5], 3).lengths == []
    assert index.find([6], 3).lengths == [], "too short"
    index = SuffixIndex(1)
    index.add([1, 2, 3], ends=True)
    index.add([4, 5, 6], ends=True)
    assert index.find([2, 3], 2).lengths == [], "nothing followed"
    assert index.find([3, 4], 2).lengths == [], "across texts"
    assert index.find([4, 5], 2).following == [[6, END]]
    assert len(index) == 8, "with an end behind each text"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=30), st.randoms(use_true_random=False))
def test_it_finds_what_a_search_finds(texts: list[list[int]], rng: random.Random) -> None:
    """In pieces, with a ring that is smaller than all that is stored."""
    index, stored = SuffixIndex(256), []
    for text in texts:
        cut = rng.randrange(len(text) + 1)
        index.add(text[:cut])
        index.add(text[cut:], ends=True)
        stored += [*text, END]
    assert len(index) == min(len(stored), 256)
    for _ in range(10):
        ending = [rng.randrange(4) for _ in range(rng.randrange(2, 40))]
        if stored and rng.random() < 0.7:
            place = rng.randrange(len(stored))
            ending = [token for token in stored[max(place - 40, 0) : place] if token != END]
        found, expected = index.find(ending, DEPTH), searched(stored, 256, ending)
        longest = max((length for length, _ in expected), default=0)
        every = sorted(map(str, expected))
        assert all(str(pair) in every for pair in zip(found.lengths, found.following, strict=True))
        assert found.lengths == sorted(found.lengths, reverse=True)
        if longest >= LENGTHS[0] and sum(length >= LENGTHS[0] for length, _ in expected) <= WALKED:
            assert len(found.lengths) == sum(length >= LENGTHS[0] for length, _ in expected)
        elif len(expected) <= WALKED:
            assert len(found.lengths) == len(expected)


@pytest.mark.parametrize("piece", [1, 3, 700])
def test_pieces_of_any_size_store_the_same(piece: int) -> None:
    tokens = np.random.default_rng(1).integers(0, 50, 3000)
    whole, parts = SuffixIndex(1 << 11), SuffixIndex(1 << 11)
    whole.add(tokens)
    for start in range(0, 3000, piece):
        parts.add(tokens[start : start + piece])
    for place in range(1200, 2990, 37):
        ours, theirs = (each.find(tokens[place - 20 : place].tolist(), 8) for each in (whole, parts))
        assert (ours.lengths, ours.following) == (theirs.lengths, theirs.following)
        assert ours.following[0] == tokens[place : place + 8].tolist()


def test_memory_is_bounded_under_a_million_random_inserts() -> None:
    index, drawn = SuffixIndex(1 << 14), np.random.default_rng(2)
    for _ in range(1000):
        index.add(drawn.integers(0, 1000, 1000), ends=bool(drawn.integers(2)))
    assert index.written >= 1_000_000 and len(index) == 1 << 14
    assert index.n_bytes <= 64 * (1 << 14)
    last = drawn.integers(0, 1000, 64)
    index.add(last)
    assert index.find(last[:40].tolist(), 8).following[0] == last[40:48].tolist()


@given(st.lists(st.integers(0, 2**31 - 2), min_size=8, max_size=8))
def test_one_ngram_has_the_hash_that_it_has_among_others(tokens: list[int]) -> None:
    for length in LENGTHS:
        assert hash_of(tokens[-length:]) == int(_hashes(np.array(tokens, np.int32), length)[-1])
