"""Acceptance of one token, replay of a trace, and path frequencies, against simulation and enumeration."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from truedraft.errors import OptionError
from truedraft.theory import (
    acceptance_rate,
    expected_tokens_if_independent,
    least_coupled_acceptance,
    replay_factor,
    replayed_tokens,
    total_variation,
)

P = (0.5, 0.2, 0.2, 0.1)
Q = (0.1, 0.6, 0.2, 0.1)
DRAWS = 20_000


def four_and_a_half_errors(probability: float) -> float:
    """A frequency of DRAWS draws is off by more about once in 150,000 seeds."""
    return 4.5 * math.sqrt(probability * (1 - probability) / DRAWS)


def random_dist(generator: random.Random, size: int = 4) -> list[float]:
    weights = [generator.expovariate(1.0) for _ in range(size)]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize(("lenience", "worked"), [(1.0, 0.6), (0.5, 0.1 + 0.4 + 0.2 + 0.1)])
def test_acceptance_rate_by_hand_and_by_monte_carlo(lenience: float, worked: float) -> None:
    assert acceptance_rate(P, Q, lenience) == pytest.approx(worked)
    generator = random.Random(2)
    drafted = generator.choices(range(4), Q, k=DRAWS)
    accepted = sum(generator.random() < P[x] / (lenience * Q[x]) for x in drafted)
    assert accepted / DRAWS == pytest.approx(worked, abs=four_and_a_half_errors(worked))


def test_acceptance_and_total_variation_are_two_sides_of_one_coin() -> None:
    generator = random.Random(3)
    for _ in range(50):
        p, q = random_dist(generator), random_dist(generator)
        assert acceptance_rate(p, q) == pytest.approx(1 - total_variation(p, q), rel=1e-12)
    assert acceptance_rate(P, P) == pytest.approx(1.0)
    assert total_variation((1.0, 0.0), (0.0, 1.0)) == 1.0


def test_coupled_sampling_agrees_at_least_so_often() -> None:
    """Argmaxes of two distributions under the same Gumbel noise; 20,000 draws."""
    bound = least_coupled_acceptance(total_variation(P, Q))
    assert bound == pytest.approx(0.6 / 1.4)
    generator = random.Random(4)
    same = 0
    for _ in range(DRAWS):
        noise = [-math.log(-math.log(generator.random())) for _ in P]
        winners = {max(range(4), key=lambda x: math.log(dist[x]) + noise[x]) for dist in (P, Q)}
        same += len(winners) == 1
    assert same / DRAWS > bound - four_and_a_half_errors(bound)
    assert same / DRAWS < acceptance_rate(P, Q) + four_and_a_half_errors(0.6)


def test_limits_of_the_coupled_bound() -> None:
    assert least_coupled_acceptance(0.0) == 1.0
    assert least_coupled_acceptance(1.0) == 0.0


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
        (lambda: acceptance_rate((0.5, 0.5), (1.0,)), "one vocabulary, got 2 and 1"),
        (lambda: acceptance_rate((1.5,), (1.0,)), "each probability of p .* got 1.5"),
        (lambda: acceptance_rate(P, Q, 0.0), "lenience must lie in .0, 1., got 0"),
        (lambda: acceptance_rate(P, Q, 1.5), "lenience .* got 1.5"),
        (lambda: total_variation((0.5,), (-0.5,)), "each probability of q"),
        (lambda: least_coupled_acceptance(-0.1), "tv must be"),
        (lambda: replay_factor(0.0, 0.5), "p must be a number above 0, got 0.0"),
        (lambda: replay_factor(1.5, 0.5), "got 1.5"),
        (lambda: replay_factor(0.5, 1.5), "q must be"),
        (lambda: replayed_tokens([1.2]), "got 1.2"),
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
