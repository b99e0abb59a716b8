"""Tests of streams: a correct stream hardly ever fails them, a wrong one does as soon as the formula says."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from support.pairwise import pairwise
from truedraft.certify.e_process import POWER, EventTests
from truedraft.core.theory import holm

NAMES = ["a", "b", "c"]


def chances_of(tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Probabilities of three sets for each token, also tiny and large ones."""
    return torch.rand(tokens, len(NAMES), generator=generator, dtype=torch.float64) ** torch.tensor([1.0, 4.0, 0.2])


def test_the_e_process_has_mean_one_by_enumeration() -> None:
    """Over all outcomes of three tokens the mean is 1 at most: summed, not sampled."""
    chances = torch.tensor([0.3, 0.9, 0.05], dtype=torch.float64)
    mean = 0.0
    for hits in itertools.product([False, True], repeat=3):
        tests = EventTests(["one"])
        tests.add(chances[:, None], torch.tensor(hits)[:, None])
        probability = math.prod(float(p if hit else 1.0 - p) for p, hit in zip(chances, hits, strict=True))
        mean += probability * math.exp(tests._logs.logsumexp(0).item()) / len(tests._logs)
    assert 0.9999 < mean <= 1.0


def test_a_small_p_value_is_as_rare_as_it_says() -> None:
    """600 streams, 3 tests each, stopped at the worst of 5 moments: p <= 0.05 in 5 % of streams at most.

    The number of such streams for one test is below 600 * 0.05 + 4 * sqrt(600 * 0.05) = 52 with probability 0.9999,
    even if the bound were tight.
    """
    generator = torch.Generator().manual_seed(3)
    alarms = [0, 0, 0]
    for _ in range(600):
        tests, smallest = EventTests(NAMES), [1.0, 1.0, 1.0]
        for _ in range(5):
            chances = chances_of(40, generator)
            hits = torch.rand(chances.shape, generator=generator, dtype=torch.float64) < chances
            tests.add(chances, hits)
            smallest = [min(p, result.p_value) for p, result in zip(smallest, tests.results(), strict=True)]
        alarms = [count + (p <= 0.05) for count, p in zip(alarms, smallest, strict=True)]
    assert max(alarms) <= 52


@pytest.mark.parametrize(("level", "p", "sign"), pairwise([1e-3, 1e-5], [0.5, 0.1, 0.9], [1, -1]))
def test_the_smallest_detectable_excess_is_detected(level: float, p: float, sign: int) -> None:
    """Moved by what the formula says, 98 % of 400 streams are found: 99 % are promised, less two deviations."""
    tokens, found = 3000, 0
    generator = torch.Generator().manual_seed(int(p * 10) + sign)
    chances = torch.full((tokens, 1), p, dtype=torch.float64)
    tests = EventTests(["one"])
    tests.add(chances, torch.rand(tokens, 1, generator=generator, dtype=torch.float64) < p)
    shift = tests.results()[0].smallest_detectable(level)
    assert 0.0 < shift < 0.1
    for _ in range(400):
        tests = EventTests(["one"])
        tests.add(chances, torch.rand(tokens, 1, generator=generator, dtype=torch.float64) < p + sign * shift)
        found += tests.results()[0].p_value <= level
    assert found / 400 >= POWER - 0.01


def test_what_is_allowed_for_rounding_is_not_an_alarm() -> None:
    """Tokens off by 0.01 everywhere are an alarm, unless 0.01 is allowed."""
    generator = torch.Generator().manual_seed(5)
    chances = torch.full((40_000, 1), 0.3, dtype=torch.float64)
    hits = torch.rand(chances.shape, generator=generator, dtype=torch.float64) < 0.31 + 0.005
    p_values = []
    for allowance in (0.0, 0.02):
        tests = EventTests(["one"], allowance)
        tests.add(chances, hits)
        p_values.append(tests.results()[0].p_value)
    assert p_values[0] < 1e-5
    assert p_values[1] == 1.0


def test_tokens_that_a_test_is_not_about_change_nothing() -> None:
    chances = torch.tensor([[0.2, 0.5], [-1.0, 0.5]], dtype=torch.float64)
    hits = torch.tensor([[True, True], [True, False]])
    both, alone = EventTests(["a", "b"]), EventTests(["a"])
    both.add(chances, hits)
    alone.add(chances[:1, :1], hits[:1, :1])
    assert both.results()[0] == alone.results()[0]
    assert both.results()[0].tokens == 1
    assert both.results()[1].tokens == 2
    assert both.results()[0].excess == pytest.approx(0.8)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.02]) == pytest.approx([0.03, 0.04, 0.04])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
