"""Replies of engines, a model of six tokens that they are said to run, and answers whose distributions are given."""

from __future__ import annotations

import torch
from torch import Tensor

from truedraft import SamplingParams
from truedraft.certify.engines.answer_probs import Allowance, AnswerProbs, filtered
from truedraft.measure.peers import FILTERS, Question, Reply
from truedraft.testing import MarkovModel

SAMPLED = SamplingParams(temperature=1.0)


def model(eos: tuple[int, ...] = ()) -> MarkovModel:
    return MarkovModel.random(6, seed=1, eos_token_ids=eos)


def reply(*tokens: int, ended: str = "length") -> Reply:
    return Reply(tokens, None, ended)


def within(log_ratio: float) -> Allowance:
    return Allowance(log_ratio, log_ratio, "")


def answer_by(
    logits: Tensor,
    tokens: list[int],
    params: SamplingParams = SAMPLED,
    *,
    slack: float = 0.0,
    prompt: tuple[int, ...] = (0, 1),
) -> AnswerProbs:
    """An answer by the logits `[tokens, vocab]` at its tokens, float64, which rounding may move by `slack`."""
    found = filtered(logits, params, FILTERS, within(slack))
    own = found.within.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return AnswerProbs(Question(prompt, params), tokens, logits, found.probs, found.doubtful, ~own, found.gain)
