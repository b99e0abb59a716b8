"""Differences between two ways on the same prompts: their sign test and their interval."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from truedraft.core.intervals import sign_flips
from truedraft.core.theory import holm
from truedraft.measure.doctor import LEAST_PROMPTS, tokens_gained
from truedraft.measure.variants import examined, examined_words


def test_flipped_signs_are_those_of_all_signs() -> None:
    """Ten differences have 1,024 signs, which can be summed one by one."""
    for seed in range(4):
        own = np.random.default_rng(seed).normal(0.4, 1.0, 10)
        sums = np.array([signs @ own for signs in itertools.product((-1, 1), repeat=10)])
        assert sign_flips(own) == pytest.approx((sums >= own.sum() - 1e-9).mean(), abs=0.015)
    assert sign_flips(np.zeros(10)) == 1.0
    assert sign_flips(np.ones(14)) < 0.001 and sign_flips(-np.ones(14)) > 0.999


def test_as_good_a_way_is_hardly_ever_called_better() -> None:
    """Of 16 variants that are as good, by skewed differences as those of few long runs, over many examinations."""
    noise = np.random.default_rng(1)
    alarms = 0
    for _ in range(60):
        own = noise.exponential(1.0, (16, 14)) * noise.integers(0, 2, (16, 14)) * noise.choice([-1, 1], (16, 14))
        alarms += min(holm([sign_flips(each) for each in own])) < 0.01
    assert alarms <= 3


def test_so_many_prompts_are_enough_for_all_variants_together() -> None:
    """A variant that is better on each of the fewest prompts is called so beside all others, and is not with fewer."""
    most = max(len(kind.variants) for kind in map(examined, examined_words()))
    enough, fewer = (holm([sign_flips(np.ones(count))] + [1.0] * (most - 1))[0] for count in (LEAST_PROMPTS, 10))
    assert enough < 0.01 < fewer


def test_a_difference_of_tokens_per_call() -> None:
    found = tokens_gained(*map(np.array, ([10.0, 20.0], [5.0, 5.0], [10.0, 10.0])))
    assert (
        found.value == pytest.approx(3.0 - 1.5) and found.low == pytest.approx(1.0) and found.high == pytest.approx(2.0)
    )
