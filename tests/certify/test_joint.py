"""Joint distributions over a reduced vocabulary: the distribution is the target's own, and answers are counted against
it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from certify.planted_faults import healthy, markov
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
    good = result_of(healthy())
    assert good.p_value > 1e-6
    assert good.accepted > 0.3
    assert len(good.kept) == 3
    bad = result_of(healthy().but(rule=faults.accepts_always(SpeculativeSampling())))
    assert bad.p_value < 1e-6


def test_what_it_would_have_found_it_finds() -> None:
    """Distributions moved by that total variation, half of the cells up: found in 97 % of 300 (99 % are promised)."""
    generator = np.random.default_rng(4)
    probs = torch.tensor([*generator.dirichlet(np.full(27, 3.0)), 0.0])
    counts, level = torch.zeros(28, dtype=torch.float64), 1e-4
    counts[0] = 4000
    size, found = statistics.JointResult(counts, probs, 1.0, (0, 1, 2)).smallest_detectable(level), 0
    for _ in range(300):
        signs = torch.tensor([*generator.permutation([-1.0, 1.0] * 13 + [0.0]).tolist(), 0.0])
        moved = probs * (1.0 + 2 * size * signs)
        drawn = torch.tensor(generator.multinomial(4000, (moved / moved.sum()).numpy())).double()
        found += statistics.JointResult(drawn, probs, 1.0, (0, 1, 2)).p_value < level
    assert 0.02 < size < 0.2
    assert found >= 291


def test_no_room_no_joint_distribution() -> None:
    stack = Stack(markov(0), DraftModel(markov(0)), SpeculativeSampling())
    cold = SamplingParams(temperature=1.0, top_k=1)
    assert statistics.joint_result(Context(stack, TEXTS, cold), Deadline(1.0), lambda done: None) is None
