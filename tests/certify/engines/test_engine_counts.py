"""Counts behind equal beginnings, and pairs of two engines' answers: fair bets, found differences."""

from __future__ import annotations

import math

import pytest
import torch

from truedraft import SamplingParams
from truedraft.certify.engines.answer_probs import AnswerProbs
from truedraft.certify.engines.evidence import Repeated
from truedraft.certify.engines.run import TwoSamples
from truedraft.measure.peers import Question

P = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64)


def probs_of_answer(*tokens: int) -> AnswerProbs:
    rows = P[: len(tokens)]
    nothing, gains = torch.zeros_like(rows, dtype=torch.bool), torch.zeros(len(tokens))
    question = Question((7,), SamplingParams(temperature=1.0))
    return AnswerProbs(question, list(tokens), rows.log(), rows, nothing, nothing.any(dim=-1), gains)


def counted(*answers: tuple[int, ...]) -> Repeated:
    found = Repeated()
    for answer in answers:
        found.add(probs_of_answer(*answer))
    return found


def test_the_next_token_gains_nothing_on_average_whatever_came_before() -> None:
    past = [(0, 2), (0, 2), (1, 0), (0, 2)]
    before = counted(*past)._logs.clone()
    for number in range(len(before)):
        mean = sum(
            float(P[0, token]) * math.exp(float(counted(*past, (token,))._logs[number] - before[number]))
            for token in range(3)
        )
        assert mean == pytest.approx(1.0, abs=1e-5)


def test_answers_that_follow_the_target_give_no_evidence() -> None:
    generator = torch.Generator().manual_seed(1)
    found, most = Repeated(), 0.0
    for _ in range(800):
        answer = [int(torch.multinomial(row, 1, generator=generator)) for row in P]
        found.add(probs_of_answer(*answer))
        most = max(most, found.log_evidence)
    assert most < math.log(1e3)


def test_a_joint_distribution_with_right_margins_is_found() -> None:
    # 60 % of second tokens are token 2, but never behind the token 0.
    generator = torch.Generator().manual_seed(2)
    found = Repeated()
    for _ in range(300):
        first = int(torch.multinomial(P[0], 1, generator=generator))
        second = 1 - int(torch.rand(1, generator=generator) < 0.5) if first == 0 else 2
        found.add(probs_of_answer(first, second))
    assert found.log_evidence > math.log(1e6)


def test_answers_that_share_their_noise_are_found_and_named() -> None:
    generator = torch.Generator().manual_seed(3)
    found = Repeated()
    for _ in range(60):
        answer = [int(torch.multinomial(row, 1, generator=generator)) for row in P]
        for _ in range(4):
            found.add(probs_of_answer(*answer))
    assert found.log_shared > math.log(1e6)


def test_either_order_of_a_pair_is_as_good_on_average() -> None:
    past = [((0, 1), (0, 2)), ((1, 1), (0, 2)), ((0, 1), (1, 2))]
    pair = ((0, 1), (1, 2))
    logs = []
    for one, other in (pair, pair[::-1]):
        samples = TwoSamples()
        for first, second in past:
            samples.add((7,), first, second)
        before = samples._logs.clone()
        samples.add((7,), one, other)
        logs.append((samples._logs - before).exp())
    torch.testing.assert_close((logs[0] + logs[1]) / 2.0, torch.ones_like(logs[0]))
    assert not torch.allclose(logs[0], logs[1])


def pairs(second: torch.Tensor, count: int) -> TwoSamples:
    generator = torch.Generator().manual_seed(4)
    samples = TwoSamples()
    for _ in range(count):
        one = [int(torch.multinomial(row, 1, generator=generator)) for row in P]
        other = [int(torch.multinomial(row, 1, generator=generator)) for row in (second, P[1])]
        samples.add((7,), one, other)
    return samples


def test_engines_that_draw_alike_are_not_told_apart() -> None:
    assert pairs(P[0], 1000).process.log10 < 3.0


def test_engines_that_draw_otherwise_are_told_apart() -> None:
    samples = pairs(torch.tensor([0.35, 0.3, 0.35], dtype=torch.float64), 1500)
    assert samples.process.log10 > 3.0
    assert samples.different > 100
