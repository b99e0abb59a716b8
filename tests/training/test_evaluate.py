"""Alpha, agreement and loss against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from truedraft import load_model
from truedraft.core.stats import Counters
from truedraft.drafters.base import NoDrafter
from truedraft.errors import DataError
from truedraft.models.architecture import LlamaShape, new_llama
from truedraft.training.evaluate import (
    EngineEvaluation,
    EngineRound,
    evaluate_pair,
    mean_loss,
    measure_in_engine,
)
from truedraft.training.report import HeadReport
from truedraft.training.workspace import TimeBudget

SHAPE = LlamaShape(vocab_size=20, width=16, layers=1, heads=2, kv_heads=1, intermediate=32, context=64, head_size=8)


@pytest.fixture
def pair():
    models = [new_llama(SHAPE, seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        for parameter in (*models[0].parameters(), *models[1].parameters()):
            parameter.mul_(4)  # distributions far from uniform
    return models


@pytest.fixture
def short_stream():
    return np.random.default_rng(0).integers(0, 20, 23).astype(np.uint32)


def dist(model, prefix):
    with torch.no_grad():
        return model(input_ids=torch.tensor([prefix])).logits[0, -1].double().softmax(-1).tolist()


def test_pair_against_brute_force(pair, short_stream):
    ids = short_stream.tolist()
    overlaps, agreements = [], []
    for start in range(0, 22, 8):  # blocks of 8 labels: each token is predicted from its block alone
        for end in range(start + 1, min(start + 8, 22) + 1):
            p, q = dist(pair[0], ids[start:end]), dist(pair[1], ids[start:end])
            overlaps.append(sum(min(a, b) for a, b in zip(p, q, strict=True)))
            agreements.append(p.index(max(p)) == q.index(max(q)))
    report = evaluate_pair(*pair, short_stream, length=8)
    assert report.tokens == 22
    assert report.alpha == pytest.approx(sum(overlaps) / 22, abs=1e-5)
    assert report.greedy_agreement == pytest.approx(sum(agreements) / 22)
    same = evaluate_pair(pair[0], pair[0], short_stream, length=8, max_tokens=10)
    assert (same.tokens, same.greedy_agreement, same.alpha) == (10, 1.0, pytest.approx(1.0, abs=1e-5))
    with pytest.raises(DataError, match="fewer than two tokens"):
        evaluate_pair(*pair, short_stream[:1])


def test_loss_and_the_mode_of_a_model_which_stays(pair, short_stream):
    ids, model = short_stream.tolist(), pair[0]
    expected = -sum(math.log(dist(model, ids[:end])[ids[end]]) for end in range(1, 23)) / 22
    model.train()
    assert mean_loss(model, short_stream, length=64) == (pytest.approx(expected, abs=1e-4), 22)
    assert model.training


def test_answers_are_counted_as_far_as_they_are_when_the_time_is_up(target_folder):
    """By a virtual clock, a second a look: a round ends in the middle of its answers, and the next has the rest."""
    model = load_model(target_folder)
    clock = itertools.count()
    budget = TimeBudget(1.0, lambda: float(next(clock)))
    prompts = [[5 + number, 40, 7, 33] for number in range(6)]
    rounds = [EngineRound(0.0, NoDrafter, {"round": number}) for number in range(3)]
    found = measure_in_engine(model, rounds, prompts, budget=budget)
    assert next(clock) < 60 + 3 * 20, "each round takes its part, and the least that is measured"
    (whole,) = measure_in_engine(model, rounds[:1], prompts)
    calls = whole.stats.target_calls
    assert len(whole.answers) == 6 and all(each.emitted_tokens > 60 for each in whole.answers)
    assert all(16 <= each.stats.target_calls < calls for each in found)
    assert all(each.stats.mean_acceptance_length == 1.0 for each in found)


def test_a_promise_departs_only_beyond_chance() -> None:
    """Ten answers of about 2 tokens a call each: 2.0 may be promised, and 3.0 may not."""
    answers = [Counters(target_calls=20, emitted_tokens=38 + 2 * (number % 3)) for number in range(10)]
    found = [EngineEvaluation(0.0, {"promised": promised}, answers) for promised in (2.0, 3.0, None)]
    assert [each.departs(400, 6) for each in found] == [False, True, False]
    assert not EngineEvaluation(0.0, {"promised": 2.0}, []).departs(400, 6)
    assert not EngineEvaluation(0.0, {"promised": 3.0}, answers[:7]).departs(400, 6), "too few to say"
    report = HeadReport({}, [EngineEvaluation(0.0, {"promised": 3.0, "nodes": 8}, answers)], "held-out text", 400)
    assert report.departures == [
        "at temperature 0 with 8 nodes 3.00 tokens per target call were promised and 1.99 served"
    ]
