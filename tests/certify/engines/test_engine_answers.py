"""What each token of another engine's answer should have been drawn from, and how far rounding may move that."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import truedraft.certify.engines.answer_probs as answer_module
from certify.engines.known_answers import answer_by, model, reply, within
from truedraft import SamplingParams
from truedraft.certify.checks import Status
from truedraft.certify.engines.answer_probs import EXACT, Judge, ended_tokens, filtered, measured_allowance
from truedraft.certify.engines.under_test import check_lengths
from truedraft.core.probs import probs_from_logits
from truedraft.measure.peers import FILTERS, Question, Reply
from truedraft.testing import MarkovModel
from truedraft.text import Tokenizer

VOCAB = 12


def rows(count: int = 40) -> torch.Tensor:
    return 2.0 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}, {"temperature": 0.0}],
)
def test_in_our_order_it_is_our_own_distribution(options: dict[str, float]) -> None:
    params = SamplingParams(**{"temperature": 0.7, **options})
    found = filtered(rows(), params, FILTERS).probs
    torch.testing.assert_close(found, probs_from_logits(rows(), params))


def test_the_order_of_filters_matters() -> None:
    # Of (0.5, 0.3, 0.2) a nucleus of 0.75 keeps two; at temperature 2 the third is needed, too.
    logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    params = SamplingParams(temperature=2.0, top_p=0.75)
    first = filtered(logits, params, ("temperature", "top_p")).probs
    last = filtered(logits, params, ("top_p", "temperature")).probs
    assert (first > 0.0).tolist() == [[True, True, True]]
    assert (last > 0.0).tolist() == [[True, True, False]]
    assert float(last[0, 0] / last[0, 1]) == pytest.approx(math.sqrt(0.5 / 0.3))


@pytest.mark.parametrize(
    ("options", "filters"),
    [
        ({"top_k": 4}, FILTERS),
        ({"top_p": 0.8}, FILTERS),
        ({"min_p": 0.1}, FILTERS),
        ({"top_k": 6, "top_p": 0.9}, FILTERS),
        # What rounding swaps in at the first edge is let through by the second.
        ({"top_k": 4, "top_p": 0.95}, FILTERS),
        ({"top_k": 6, "min_p": 0.02}, FILTERS),
        ({"top_p": 0.9, "min_p": 0.05}, ("temperature", "min_p", "top_k", "top_p")),
    ],
)
def test_no_rounding_within_the_allowance_moves_a_sure_row_or_goes_beyond_what_may_be(
    options: dict[str, float], filters: tuple[str, ...]
) -> None:
    params, off = SamplingParams(temperature=0.8, **options), 0.03
    logits = torch.log_softmax(rows(200), dim=-1)
    ours = filtered(logits, params, filters, within(off))
    sure, usable = ~ours.doubtful.any(dim=-1), ours.gain.isfinite()
    assert 0 < int(sure.sum()) < len(sure)
    assert int((usable & ~sure).sum()) > 0
    generator = torch.Generator().manual_seed(4)
    for _ in range(60):
        moved = logits + off * (2.0 * torch.rand(logits.shape, generator=generator, dtype=torch.float64) - 1.0)
        theirs = filtered(moved, params, filters).probs
        assert not (theirs > 0.0)[~ours.within].any()
        assert ((theirs > 0.0) == (ours.probs > 0.0))[usable[:, None] & ~ours.doubtful].all()


def test_a_greedy_near_tie_is_not_sure_and_both_may_be() -> None:
    logits = torch.tensor([[1.0, 0.99, 0.0], [1.0, 0.5, 0.0]], dtype=torch.float64)
    found = filtered(logits, SamplingParams(), FILTERS, within(0.01))
    assert found.probs.tolist() == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert found.gain.isfinite().tolist() == [False, True]
    assert found.within.tolist() == [[True, True, False], [True, False, False]]


def test_an_answer_that_stopped_by_itself_drew_an_end_of_text() -> None:
    target = model((5, 4))
    asked = Question((1, 2), SamplingParams(max_tokens=8))
    assert ended_tokens(target, asked, reply(0, 3, ended="stop")) == [0, 3, 5]
    assert ended_tokens(target, asked, reply(0, 3)) == [0, 3]
    assert ended_tokens(target, asked, reply(0, 4, 2)) == [0, 5]
    stopped = replace(asked, params=replace(asked.params, stop=("x",)))
    assert ended_tokens(target, stopped, reply(0, 3, ended="stop")) == [0, 3]


def test_several_ends_of_text_count_as_one() -> None:
    target = model((5, 4))
    judge = Judge(target, FILTERS, EXACT)
    asked = Question((1, 2), SamplingParams(temperature=1.0, max_tokens=8))
    (answer,) = judge.answer_probs([(asked, reply(0, ended="stop"))])
    torch.testing.assert_close(answer.probs.sum(dim=-1), torch.ones(2, dtype=torch.float64))
    assert answer.probs[:, 4].tolist() == [0.0, 0.0]
    plain = torch.softmax(answer.logits, dim=-1)
    torch.testing.assert_close(answer.probs[:, 5], plain[:, 5] + plain[:, 4])
    assert answer.tokens == [0, 5]


def test_penalties_look_at_the_answer_so_far() -> None:
    judge = Judge(model(), FILTERS, EXACT)
    params = SamplingParams(temperature=1.0, frequency_penalty=2.0, max_tokens=8)
    (answer,) = judge.answer_probs([(Question((1, 2), params), reply(3, 3, 3))])
    (free,) = judge.answer_probs([(Question((1, 2), replace(params, frequency_penalty=0.0)), reply(3, 3, 3))])
    assert (free.logits - answer.logits)[:, 3].tolist() == pytest.approx([0.0, 2.0, 4.0])


@pytest.mark.parametrize("temperature", [1e-5, 1e-300])
def test_a_temperature_that_leaves_nothing_to_say_overflows_nowhere(temperature: float) -> None:
    found = filtered(rows(4), SamplingParams(temperature=temperature, top_p=0.9), FILTERS, within(0.07))
    assert not found.gain.isnan().any()
    assert found.probs.isfinite().all()


@pytest.mark.parametrize("word", ["stop", "eos_token", "none"])
def test_an_end_of_text_is_one_whatever_the_engine_calls_it(word: str) -> None:
    asked = Question((1, 2), SamplingParams(max_tokens=8))
    assert ended_tokens(model((5,)), asked, reply(0, 3, ended=word)) == [0, 3, 5]
    assert ended_tokens(model((5,)), asked, reply(0, 3, ended="abort")) == [0, 3]


def test_an_answer_that_ended_with_another_special_token_drew_no_end_of_ours() -> None:
    target = model((5,))
    target.tokenizer = cast(Tokenizer, SimpleNamespace(skipped_ids=frozenset({3, 5})))
    asked = Question((1, 2), SamplingParams(max_tokens=8))
    assert ended_tokens(target, asked, reply(0, 3, ended="stop")) == [0, 3]
    assert ended_tokens(target, asked, reply(0, 2, ended="stop")) == [0, 2, 5]
    *_, told = check_lengths([(asked, reply(0, 3, ended="stop"))], target)
    assert told.status is Status.MEASURED
    assert "special tokens [3]" in told.summary


def test_what_is_folded_keeps_the_likeliest_tokens_and_takes_the_others_together() -> None:
    probs = torch.tensor([[0.0, 0.1, 0.4, 0.1, 0.0, 0.05, 0.05, 0.3]], dtype=torch.float64).expand(3, -1)
    answer = replace(answer_by(probs.log(), [2, 7, 5]), likeliest=torch.tensor([[7, 2]]).expand(3, -1))
    assert answer.places().tolist() == [1, 0, 2]
    torch.testing.assert_close(answer.folded(probs)[0], torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64))
    # what has no mass has none, to the last bit: a bet divides by it
    assert (
        float(answer.folded(filtered(probs.log(), SamplingParams(temperature=1.0, top_k=2), FILTERS).probs)[0, 2])
        == 0.0
    )


@pytest.mark.parametrize("first", [2, 5, 11])
@pytest.mark.parametrize("off", [0.0, 0.05])
def test_a_nucleus_among_few_tokens_is_the_same(monkeypatch: pytest.MonkeyPatch, first: int, off: float) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.7)
    every = filtered(rows(200), params, FILTERS, within(off))
    monkeypatch.setattr(answer_module, "_FIRST", first)
    few = filtered(rows(200), params, FILTERS, within(off))
    for name in ("probs", "doubtful", "within", "gain"):
        torch.testing.assert_close(getattr(few, name), getattr(every, name))


def test_of_equals_at_the_edge_of_a_nucleus_either_may_stay() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.3]], dtype=torch.float64).log()
    found = filtered(logits, SamplingParams(temperature=1.0, top_p=0.6), FILTERS)
    assert found.within.tolist() == [[True, True, True]] and found.doubtful.tolist() == [[False, True, True]]


def test_a_log_ratio_beyond_all_measure_overflows_nowhere() -> None:
    assert within(0.05).at(SamplingParams(temperature=1e-5)) == 300.0


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
    target, generator = model(), torch.Generator().manual_seed(5)
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

    plain = answer_module.plain_logits
    monkeypatch.setattr(answer_module, "plain_logits", lambda *args: [Elsewhere(rows) for rows in plain(*args)])
    target = model()
    found, _ = measured_allowance(target, target, [telling(target, 0.0)])
    assert found.log_ratio == pytest.approx(1.5e-4)


@pytest.mark.parametrize("told", [(float("nan"),) * len(LONG), (0.0,) * (len(LONG) - 1)])
def test_what_are_no_log_probabilities_measures_nothing(told: tuple[float, ...]) -> None:
    target = model()
    asked, answer = telling(target, 0.0)
    found, differences = measured_allowance(target, None, [(asked, replace(answer, logprobs=told))])
    assert differences is None and found.log_ratio == pytest.approx(0.015)
