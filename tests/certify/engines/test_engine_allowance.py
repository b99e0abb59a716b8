"""How far rounding may put log-probabilities off: what an engine tells, what a coarser dtype makes, what is stated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import truedraft.certify.engines.answer_probs as allowance_module
from truedraft import SamplingParams
from truedraft.certify.engines.answer_probs import EXACT, Judge, measured_allowance
from truedraft.measure.peers import FILTERS, Question, Reply
from truedraft.testing import MarkovModel


def model() -> MarkovModel:
    return MarkovModel.random(6, seed=1)


def reply(*tokens: int, ended: str = "length") -> Reply:
    return Reply(tokens, None, ended)


LONG = (tuple(range(6)) * 8)[:40]
"""An answer that is long enough to measure by."""


def telling(target: MarkovModel, off: float) -> tuple[Question, Reply]:
    """An answer whose engine tells log-probabilities that are off by that."""
    asked = Question((1, 2), SamplingParams(max_tokens=len(LONG)))
    (answer,) = Judge(target, FILTERS, EXACT).answer_probs([(asked, reply(*LONG))])
    own = torch.log_softmax(answer.logits, -1).gather(-1, torch.tensor(LONG)[:, None])[:, 0]
    return asked, replace(reply(*LONG), logprobs=tuple((own + off).tolist()))


def test_the_allowance_is_what_the_engine_tells_but_no_more_than_rounding_does() -> None:
    target = model()
    assert measured_allowance(target, None, [telling(target, 0.004)])[0].log_ratio == pytest.approx(0.006)
    found, differences = measured_allowance(target, None, [telling(target, 1.0)])
    assert found.log_ratio == pytest.approx(0.015)
    assert differences is not None
    assert differences.tolist() == pytest.approx([1.0] * len(LONG))
    assert found.at(SamplingParams(temperature=0.5)) == pytest.approx(0.03)
    assert found.at(SamplingParams(temperature=0.5, repetition_penalty=0.8)) == pytest.approx(0.0375)
    assert found.at(SamplingParams(temperature=0.0)) == pytest.approx(0.015)


@pytest.mark.parametrize("off", [0.1, None])
def test_a_judge_in_bfloat16_takes_bfloat16_for_rounding(off: float | None) -> None:
    """Where no other dtype is there to measure by: what an engine in bfloat16 tells is no more than that."""
    target = model()
    target.dtype = torch.bfloat16
    asked, told = telling(target, off or 0.0)
    answered = [(asked, told if off else replace(told, logprobs=None))]
    assert measured_allowance(target, None, answered)[0].log_ratio == pytest.approx(1.5 * (off or 0.15))


def test_an_engine_that_answers_nothing_is_measured_by_its_prompts() -> None:
    """And at an edge one token decides, whose error is larger than that of likeliest ones."""
    target = MarkovModel.random(6, seed=1)
    generator = torch.Generator().manual_seed(5)
    noise = 0.02 * torch.randn(target.probs.shape, generator=generator)
    coarse = MarkovModel(torch.softmax(target.probs.log() + noise, dim=-1))
    asked = Question(tuple(LONG), SamplingParams(max_tokens=8))
    found, differences = measured_allowance(target, coarse, [(asked, reply(ended="stop"))])
    assert differences is None
    assert 0.01 < found.log_ratio < 0.12
    assert 1.0 < found.edge / found.log_ratio < 5.0


def test_few_told_tokens_measure_nothing() -> None:
    target = model()
    asked, told = telling(target, 0.0)
    few = replace(told, token_ids=LONG[:8], logprobs=(told.logprobs or ())[:8])
    assert measured_allowance(target, None, [(asked, few)])[0].log_ratio == pytest.approx(0.015)


def test_rows_are_judged_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device the model is on: what it gives there knows nothing but the way back."""

    class Elsewhere:
        def __init__(self, rows: torch.Tensor) -> None:
            self._rows = rows

        def cpu(self) -> torch.Tensor:
            return self._rows

    plain = allowance_module.plain_logits
    monkeypatch.setattr(allowance_module, "plain_logits", lambda *args: [Elsewhere(rows) for rows in plain(*args)])
    target = model()
    found, _ = measured_allowance(target, target, [telling(target, 0.0)])
    assert found.log_ratio == pytest.approx(1.5e-4)


@pytest.mark.parametrize("told", [(float("nan"),) * len(LONG), (0.0,) * (len(LONG) - 1)])
def test_what_are_no_log_probabilities_measures_nothing(told: tuple[float, ...]) -> None:
    target = model()
    asked, answer = telling(target, 0.0)
    found, differences = measured_allowance(target, None, [(asked, replace(answer, logprobs=told))])
    assert differences is None and found.log_ratio == pytest.approx(0.015)
