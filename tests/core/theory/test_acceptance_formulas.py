"""Replay of a trace, against enumeration, and path frequencies."""

from __future__ import annotations

import itertools
import math
import operator
import random

import pytest

from truedraft.core.theory import (
    expected_tokens_if_independent,
    replay_factor,
)
from truedraft.errors import OptionError


def replayed_tokens(factors: list[float]) -> float:
    """1 + f_1 + f_1 f_2 + ...: expected tokens of one target call that starts at a place of the trace."""
    return 1.0 + sum(itertools.accumulate(factors, operator.mul))


def random_dist(generator: random.Random, size: int = 4) -> list[float]:
    weights = [generator.expovariate(1.0) for _ in range(size)]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("length", [1, 2, 4])
def test_replay_is_unbiased(length: int) -> None:
    """Over all traces of a small Markov target, the factors average to the chance that the chain is accepted."""
    generator = random.Random(5)
    target = [random_dist(generator, 3) for _ in range(3)]
    draft = [random_dist(generator, 3) for _ in range(3)]
    replayed = truth = 0.0
    for trace in itertools.product(range(3), repeat=length):
        steps = list(zip((0, *trace), trace, strict=False))
        factors = [replay_factor(target[a][b], draft[a][b]) for a, b in steps]
        replayed += math.prod(target[a][b] for a, b in steps) * replayed_tokens(factors)
    for depth in range(length + 1):
        for drafted in itertools.product(range(3), repeat=depth):
            steps = list(zip((0, *drafted), drafted, strict=False))
            truth += math.prod(draft[a][b] * min(1.0, target[a][b] / draft[a][b]) for a, b in steps)
    assert replayed == pytest.approx(truth, rel=1e-12)


def test_replay_at_temperature_0_counts_agreeing_tokens() -> None:
    factors = [replay_factor(1.0, q) for q in (1.0, 1.0, 0.0, 1.0)]
    assert replayed_tokens(factors) == 3.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replay_factor(0.0, 0.5), "p must be a number above 0, got 0.0"),
        (lambda: replay_factor(1.5, 0.5), "got 1.5"),
        (lambda: replay_factor(0.5, 1.5), "q must be"),
    ],
)
def test_bad_arguments(call: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()  # type: ignore[operator]


def test_independent_heads() -> None:
    accuracy = ((0.6, 0.2), (0.5,))
    assert expected_tokens_if_independent([(0,), (1,), (0, 0)], accuracy) == pytest.approx(2.1)
    assert expected_tokens_if_independent([], accuracy) == 1.0
    with pytest.raises(OptionError, match=r"the path \[0, 1\] needs accuracies"):
        expected_tokens_if_independent([(0, 1)], accuracy)
    with pytest.raises(OptionError, match=r"the path \[0, 0, 0\] needs accuracies"):
        expected_tokens_if_independent([(0, 0, 0)], accuracy)
    with pytest.raises(OptionError, match="each accuracy"):
        expected_tokens_if_independent([], [[1.5]])
