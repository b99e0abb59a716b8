"""Joint distributions over a reduced vocabulary: the distribution is the target's own, and answers are counted against
it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from certify.planted_faults import markov
from support.virtual_time import VirtualTime
from truedraft import SamplingParams
from truedraft.certify import faults, statistics
from truedraft.certify.checks import Context, Deadline, Stack
from truedraft.core.probs import probs_from_logits
from truedraft.drafters import DraftModel
from truedraft.testing import reduced
from truedraft.verification import SpeculativeSampling

PARAMS = SamplingParams(temperature=0.8)
TEXTS = [[1, 2, 3], [4], [5, 5, 0, 2, 1, 7]]


def test_chi_square_by_hand_and_beside_scipy() -> None:
    statistic, cells, p_value = statistics.chi_square(torch.tensor([60, 40]), torch.tensor([0.5, 0.5]))
    assert (statistic, cells) == (4.0, 2)
    assert p_value == pytest.approx(stats.chi2.sf(4.0, 1))
    dist = torch.tensor([0.69, 0.28, 0.015, 0.015])  # the last two are rare: one cell
    statistic, cells, p_value = statistics.chi_square(torch.tensor([690, 270, 25, 15]), dist)
    expected = stats.chisquare([690, 270, 40], [690, 280, 30])
    assert cells == 3
    assert (statistic, p_value) == (pytest.approx(expected.statistic, abs=1e-4), pytest.approx(expected.pvalue))
    # Too rare even together: they join the smallest of the others.
    statistic, cells, _ = statistics.chi_square(
        torch.tensor([500, 490, 9, 1]), torch.tensor([0.5, 0.498, 0.001, 0.001])
    )
    assert (cells, statistic) == (2, pytest.approx(0.0, abs=1e-4))
    assert statistics.chi_square(torch.tensor([99, 1]), torch.tensor([1.0, 0.0]))[2] == 0.0
    assert statistics._quantile(7, 1e-4) == pytest.approx(stats.chi2.isf(1e-4, 7))


def test_the_joint_distribution_is_the_product_of_the_targets_distributions() -> None:
    target, prompt, kept = markov(0), [1, 2, 3], (0, 3, 6)
    dist = statistics.joint_probs(reduced(target, kept), prompt, kept, PARAMS)
    assert float(dist.sum()) == pytest.approx(1.0)

    def after(text: list[int]) -> torch.Tensor:
        logits = target.probs_after(text).double().log()
        masked = torch.full_like(logits, -math.inf)
        masked[list(kept)] = logits[list(kept)]
        return probs_from_logits(masked[None], PARAMS)[0][list(kept)]

    expected = torch.zeros(3, 3, 3, dtype=torch.float64)
    for a, b, c, d in itertools.product(range(3), repeat=4):
        text = [*prompt, kept[a]]
        start = float(after(prompt)[a] * after(text)[b])
        expected[b, c, d] += start * float(after([*text, kept[b]])[c] * after([*text, kept[b], kept[c]])[d])
    assert torch.allclose(dist, expected, atol=1e-6)


def result_of(stack: Stack) -> statistics.JointResult:
    """After 400 steps, which are 2 seconds here."""
    with pytest.MonkeyPatch.context() as patch:
        VirtualTime(patch, step_s=0.005)
        context = Context(stack.but(entropy=3), TEXTS, PARAMS)
        found = statistics.joint_result(context, Deadline(2.0), lambda done: None)
    assert found is not None
    return found


def test_answers_follow_the_distribution_and_broken_ones_do_not() -> None:
    """False alarm: 1e-6."""
    draft = DraftModel(markov(0, astray=1.0), num_speculative_tokens=3)
    healthy = Stack(markov(0), draft, SpeculativeSampling())
    good = result_of(healthy)
    assert good.p_value > 1e-6
    assert good.accepted > 0.3
    assert len(good.kept) == 3
    bad = result_of(healthy.but(rule=faults.accepts_always(SpeculativeSampling())))
    assert bad.p_value < 1e-6


def test_what_it_would_have_found_it_finds() -> None:
    """Distributions moved by that total variation in the least visible direction: found in 97 % of 300 (99 % are
    promised)."""
    generator = np.random.default_rng(4)
    dist = generator.dirichlet(np.full(27, 3.0))
    answers, level = 4000, 1e-4
    blank = statistics.JointResult(answers, 27, 0.0, 1.0, 1.0, (0, 1, 2))
    size, found = blank.smallest_detectable(level), 0
    for _ in range(300):
        signs = generator.permutation([-1.0, 1.0] * 13 + [0.0])
        moved = dist * (1.0 + 2 * size * signs)
        moved /= moved.sum()
        counts = torch.tensor(generator.multinomial(answers, moved))
        found += statistics.chi_square(counts, torch.tensor(dist))[2] < level
    assert 0.02 < size < 0.2
    assert found >= 291


def test_no_room_no_joint_distribution() -> None:
    stack = Stack(markov(0), DraftModel(markov(0)), SpeculativeSampling())
    cold = SamplingParams(temperature=1.0, top_k=1)
    assert statistics.joint_result(Context(stack, TEXTS, cold), Deadline(1.0), lambda done: None) is None
