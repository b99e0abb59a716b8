"""What each token of another engine's answer should have been drawn from, and where rounding might cut otherwise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from truedraft import SamplingParams
from truedraft.certify.engines.law import Allowance, Judge, ended_tokens, filtered, measured_allowance
from truedraft.core.probs import probs_from_logits
from truedraft.peers import FILTERS, Question, Reply
from truedraft.testing import MarkovModel

VOCAB = 12


def rows(count: int = 40) -> torch.Tensor:
    return 2.0 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}, {"temperature": 0.0}],
)
def test_in_our_order_it_is_our_own_distribution(options: dict[str, float]) -> None:
    params = SamplingParams(**{"temperature": 0.7, **options})
    found = filtered(rows(), params, FILTERS, 0.0).probs
    torch.testing.assert_close(found, probs_from_logits(rows(), params))


def test_the_order_of_filters_matters() -> None:
    # Of (0.5, 0.3, 0.2) a nucleus of 0.75 keeps two; at temperature 2 the third is needed, too.
    logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    params = SamplingParams(temperature=2.0, top_p=0.75)
    first = filtered(logits, params, ("temperature", "top_p"), 0.0).probs
    last = filtered(logits, params, ("top_p", "temperature"), 0.0).probs
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
    ours = filtered(logits, params, filters, off)
    sure, usable = ~ours.doubtful.any(dim=-1), ours.slack.isfinite()
    assert 0 < int(sure.sum()) < len(sure)
    assert int((usable & ~sure).sum()) > 0
    generator = torch.Generator().manual_seed(4)
    for _ in range(60):
        moved = logits + off * (2.0 * torch.rand(logits.shape, generator=generator, dtype=torch.float64) - 1.0)
        theirs = filtered(moved, params, filters, 0.0).probs
        assert not (theirs > 0.0)[~ours.within].any()
        assert ((theirs > 0.0) == (ours.probs > 0.0))[usable[:, None] & ~ours.doubtful].all()
        kept = (ours.probs > 0.0) & ~ours.doubtful & usable[:, None]
        # Logits that are off by d may put log-probabilities off by twice that, which `moved` was made for.
        farthest = (theirs.log() - ours.probs.log()).abs().masked_fill(~kept, 0.0).amax(dim=-1)
        assert (farthest <= ours.slack + off / params.temperature)[usable].all()


def test_a_greedy_near_tie_is_not_sure_and_both_may_be() -> None:
    logits = torch.tensor([[1.0, 0.99, 0.0], [1.0, 0.5, 0.0]], dtype=torch.float64)
    found = filtered(logits, SamplingParams(), FILTERS, 0.01)
    assert found.probs.tolist() == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert found.slack.isfinite().tolist() == [False, True]
    assert found.within.tolist() == [[True, True, False], [True, False, False]]


def model(eos: tuple[int, ...] = ()) -> MarkovModel:
    return MarkovModel.random(6, seed=1, eos_token_ids=eos)


def reply(*tokens: int, ended: str = "length") -> Reply:
    return Reply(tokens, None, ended)


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
    judge = Judge(target, FILTERS, Allowance(0.0, ""))
    asked = Question((1, 2), SamplingParams(temperature=1.0, max_tokens=8))
    (law,) = judge.laws([(asked, reply(0, ended="stop"))])
    torch.testing.assert_close(law.probs.sum(dim=-1), torch.ones(2, dtype=torch.float64))
    assert law.probs[:, 4].tolist() == [0.0, 0.0]
    plain = torch.softmax(law.logits, dim=-1)
    torch.testing.assert_close(law.probs[:, 5], plain[:, 5] + plain[:, 4])
    assert law.tokens == [0, 5]


def test_penalties_look_at_the_answer_so_far() -> None:
    judge = Judge(model(), FILTERS, Allowance(0.0, ""))
    params = SamplingParams(temperature=1.0, frequency_penalty=2.0, max_tokens=8)
    (law,) = judge.laws([(Question((1, 2), params), reply(3, 3, 3))])
    (free,) = judge.laws([(Question((1, 2), replace(params, frequency_penalty=0.0)), reply(3, 3, 3))])
    assert (free.logits - law.logits)[:, 3].tolist() == pytest.approx([0.0, 2.0, 4.0])


def test_the_allowance_is_what_the_engine_tells_but_no_more_than_rounding_does() -> None:
    target = model()
    judge = Judge(target, FILTERS, Allowance(0.0, ""))
    asked = Question((1, 2), SamplingParams(max_tokens=8))
    (law,) = judge.laws([(asked, reply(0, 1, 2))])
    own = torch.log_softmax(law.logits, -1).gather(-1, torch.tensor([[0], [1], [2]]))[:, 0]
    near = replace(reply(0, 1, 2), logprobs=tuple((own + 0.004).tolist()))
    far = replace(reply(0, 1, 2), logprobs=tuple((own + 1.0).tolist()))
    assert measured_allowance(target, None, [(asked, near)])[0].log_ratio == pytest.approx(0.006)
    found, differences = measured_allowance(target, None, [(asked, far)])
    assert found.log_ratio == pytest.approx(0.015)
    assert differences is not None
    assert differences.tolist() == pytest.approx([1.0] * 3)
    assert found.at(0.5) == pytest.approx(0.03)
