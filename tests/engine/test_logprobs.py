"""Logarithms of probability: those of the rows that tokens were judged by, raw or as the options made them."""

from __future__ import annotations

import math

import pytest
import torch

from support.answers import fixed
from truedraft import Engine, SamplingParams
from truedraft.core.logprobs import TokenLogprobs, token_logprobs
from truedraft.core.probs import probs_from_logits
from truedraft.core.verdict import Origin
from truedraft.drafters import DraftModel
from truedraft.testing import MarkovModel

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def target() -> MarkovModel:
    return MarkovModel.random(8, seed=1)


def drafted(target: MarkovModel) -> Engine:
    return fixed(target, DraftModel(MarkovModel.random(8, seed=2), branching=(2, 2)), entropy=3)


def test_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.25, 0.25, 0.5]]))
    first, second = token_logprobs(logits, [1, 0], 2)
    assert (first.token, first.rank, [token for token, _ in first.top]) == (1, 2, [0, 1])
    assert first.logprob == pytest.approx(math.log(0.3))
    assert (second.token, second.rank) == (0, 2)
    assert token_logprobs(logits, [2], 0)[0].top == ()
    assert token_logprobs(logits, [], 3) == ()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_raw_ones_are_the_targets_own(target: MarkovModel, temperature: float) -> None:
    params = SamplingParams(max_tokens=30, temperature=temperature, logprobs=3, presence_penalty=1.0, top_k=4)
    answer = drafted(target).generate(PROMPT, params)
    assert {Origin.ACCEPTED, Origin.RECOVERED} <= set(answer.origins), "rejected drafts among them"
    assert answer.logprobs is not None and len(answer.logprobs) == 30
    for place, each in enumerate(answer.logprobs):
        probs = target.probs_after([*PROMPT, *answer.token_ids[:place]])
        assert each.token == answer.token_ids[place]
        assert each.logprob == pytest.approx(math.log(probs[each.token]))
        assert each.rank == int((probs > probs[each.token]).sum()) + 1
        assert [token for token, _ in each.top] == probs.topk(3).indices.tolist()


def test_processed_ones_are_of_what_tokens_are_drawn_from(target: MarkovModel) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.7, top_k=3, logprobs=8, logprobs_mode="processed")
    answer = drafted(target).generate(PROMPT, params)
    assert answer.logprobs is not None
    for place, each in enumerate(answer.logprobs):
        logits = target.probs_after([*PROMPT, *answer.token_ids[:place]]).log()[None]
        probs = probs_from_logits(logits, params)[0]
        assert each.logprob == pytest.approx(math.log(probs[each.token]))
        assert sum(math.exp(logprob) for _, logprob in each.top) == pytest.approx(1.0)
        assert sum(logprob == -math.inf for _, logprob in each.top) == 5


@pytest.mark.parametrize("prompt", [[3], PROMPT, [1, 2, 3] * 12])
def test_those_of_a_prompt(target: MarkovModel, prompt: list[int]) -> None:
    answer = drafted(target).generate(prompt, SamplingParams(max_tokens=4, prompt_logprobs=1))
    assert answer.logprobs is None and answer.prompt_logprobs is not None
    assert [each.token for each in answer.prompt_logprobs] == prompt[1:]
    for place, each in enumerate(answer.prompt_logprobs):
        assert each.logprob == pytest.approx(math.log(target.probs_after(prompt[: place + 1])[each.token]))


def test_nobody_else_gets_any_and_tokens_stay_the_same(target: MarkovModel) -> None:
    plain = drafted(target).generate(PROMPT, SamplingParams(max_tokens=20))
    both = drafted(target).generate(
        [PROMPT, PROMPT], [SamplingParams(max_tokens=20, logprobs=0, prompt_logprobs=0), SamplingParams(max_tokens=20)]
    )
    assert [each.token_ids for each in both] == [plain.token_ids] * 2
    assert both[1].logprobs is None and both[1].prompt_logprobs is None


def test_a_stream_has_them_piece_by_piece(target: MarkovModel) -> None:
    pieces = list(drafted(target).stream(PROMPT, SamplingParams(max_tokens=20, logprobs=1)))
    each: list[TokenLogprobs] = [one for piece in pieces for one in piece.logprobs]
    answer = pieces[-1].answer
    assert answer is not None and each == answer.logprobs
