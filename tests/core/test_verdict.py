"""Divergence of tokens, its sums, and the rates that counters derive from them."""

from __future__ import annotations

import math

import pytest

from truedraft.core.stats import Counters
from truedraft.core.verdict import Divergence, Origin, Verdict

FIRST = Divergence(1, 0.5, 0.25, 0.125, 1.0)
SECOND = Divergence(1, 0.25, 0.75, 0.375, 2.0)


def test_a_certain_token_by_hand() -> None:
    each = Divergence.of_choice(0.25, 0.5)
    assert (each.total_variation, each.total_variation_greedy) == (0.75, 0.5)
    assert (each.kl, each.kl_greedy) == (pytest.approx(math.log(4)), pytest.approx(math.log(2)))
    sure = Divergence.of_choice(1.0, 1.0)
    assert sure == Divergence(1, 0.0, 0.0, 0.0, 0.0)


def test_rounding_below_zero_counts_as_zero() -> None:
    assert Divergence.of_token(-1e-17, -1e-17, 1.0 + 1e-7) == Divergence(1, 0.0, 0.0, 0.0, 0.0)
    assert Divergence.of_choice(1.0 + 1e-7, 1.0 + 1e-7) == Divergence(1, 0.0, 0.0, 0.0, 0.0)


def test_sums_and_means_by_hand() -> None:
    sums = Divergence.of([FIRST, SECOND])
    assert sums == Divergence(2, 0.75, 1.0, 0.5, 3.0) == Divergence.of([FIRST]) + Divergence.of([SECOND])
    counters = Counters(divergence=sums)
    assert (counters.mean_total_variation, counters.mean_kl) == (0.375, 0.5)
    assert (counters.mean_total_variation_greedy, counters.mean_kl_greedy) == (0.25, 1.5)


def test_counters_add_what_is_known() -> None:
    lossy, lossless = Counters(divergence=Divergence.of([FIRST])), Counters(emitted_tokens=3)
    assert (lossy + lossless).divergence == (lossless + lossy).divergence == Divergence.of([FIRST])
    assert (lossy + lossy).divergence == Divergence.of([FIRST, FIRST])
    assert (lossless + lossless).divergence is None
    assert lossy.divergence == Divergence.of([FIRST])  # adding changes neither


def test_nothing_measured_gives_no_rate() -> None:
    for counters in (Counters(), Counters(divergence=Divergence())):
        assert counters.mean_total_variation is None and counters.mean_kl is None
        assert counters.mean_total_variation_greedy is None and counters.mean_kl_greedy is None


def test_a_verdict_within_some_nodes_ends_with_the_first_token_of_another() -> None:
    whole = Verdict((0, 2, 5), (7, 8, 9, 3), Origin.RECOVERED, tuple(map(Divergence, range(4))))
    assert whole.within({0, 5}) == Verdict((0,), (7, 8), Origin.BONUS)
    assert whole.within({0, 5}).divergence == (Divergence(0), Divergence(1))
    assert whole.within([]) == Verdict((), (7,), Origin.BONUS)
    assert whole.within({0, 2, 5}) is whole
