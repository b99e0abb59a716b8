"""How far rounding may put an engine's log-probabilities off from the judge's: measured, or stated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.certify.sampling import plain_logits
from truedraft.core.params import SamplingParams
from truedraft.measure.peers import Question, Reply
from truedraft.models.base import LanguageModel


@dataclass(frozen=True, slots=True)
class Allowance:
    """How far a sound engine's log-probabilities may lie from the judge's, at temperature 1.

    Attributes:
        log_ratio: whatever sums over many tokens gains no more than if each were off by that: bets, and events.
        edge: most of |log p' - log p| of any one token: what decides on which side of a filter's edge it lies.
        told: in words, where it comes from.
    """

    log_ratio: float
    edge: float
    told: str

    def at(self, params: SamplingParams) -> float:
        """The log ratio of the distributions that options make; greedy compares logits as they are."""
        return min(self.log_ratio * stretch(params) / (1.0 if params.greedy else params.temperature), FAR)


FAR = 300.0
"""Log ratio from which on nothing can be said; more would overflow."""
EXACT = Allowance(0.0, 0.0, "nothing is rounded")


def stretch(params: SamplingParams) -> float:
    """How much more of an error there is in logits behind penalties: those of repetition multiply."""
    return max(params.repetition_penalty, 1.0 / params.repetition_penalty)


def judging_logits(model: LanguageModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
    """A model's logits before each token behind prompts, one text after another, where they are judged: on the CPU."""
    return [rows.cpu() for rows in plain_logits(model, texts)]


def measured_allowance(
    judge: LanguageModel,
    rounded: LanguageModel | None,
    answered: Sequence[tuple[Question, Reply]],
) -> tuple[Allowance, Tensor | None]:
    """How far an engine's kernels may put log-probabilities off, from a few answers.

    Where the engine tells log-probabilities of its tokens, one and a half times what 99 % of them differ by from the
    judge's. Where that is more than four times what rounding the same weights to `rounded`'s dtype does to likeliest
    tokens it is no rounding, and where the engine tells none nothing is known: then one and a half times that of
    `rounded`. At the edges of filters one token decides, and the largest error of a row is more than that of its
    likeliest token: by so much as in `rounded`, too.

    Args:
        judge: the target, in the dtype that judges.
        rounded: the same weights as coarse as the engine may hold them; None where there is none, then what the engine
            tells is taken up to what the judge's own dtype does at most.
        answered: greedy answers, with raw log-probabilities if the engine tells them.

    Returns:
        The allowance, and the differences of told log-probabilities `[tokens]`, ours taken off; None without any.
    """
    measured = None if rounded is None else _rounding(judge, rounded, answered)
    typical, spread = measured or (_UNMEASURED[(rounded or judge).dtype], _SPREAD)
    limit = typical if measured is None else _LEEWAY * typical
    differences = _told_differences(judge, answered)
    if len(differences) >= _FEWEST:
        seen = _most(differences.abs())
        words = f"{_MARGIN:g} times {seen:.2g}, by which the engine's own log-probabilities differ"
        if seen > limit:  # what is no rounding allows for nothing
            seen = typical
            words = f"{_MARGIN:g} times {seen:.2g}; its own log-probabilities differ by more than rounding does"
    else:
        seen = typical
        words = f"{_MARGIN:g} times {seen:.2g}, " + (
            "which is taken for rounding where none was measured" if measured is None else "which a coarser dtype makes"
        )
    log_ratio = _MARGIN * max(seen, _FINEST)
    return Allowance(log_ratio, spread * log_ratio, words), differences if len(differences) else None


def _told_differences(judge: LanguageModel, answered: Sequence[tuple[Question, Reply]]) -> Tensor:
    """Log-probabilities as the engine tells them less the judge's, of all tokens that have any, `[tokens]`."""
    told = [(question, reply) for question, reply in answered if _tells(reply)]
    rows = judging_logits(judge, [(question.prompt, reply.token_ids) for question, reply in told])
    found = [torch.empty(0, dtype=torch.float64)]
    for logits, (_, reply) in zip(rows, told, strict=True):
        places = torch.tensor(reply.token_ids)[:, None]
        own = torch.log_softmax(logits.double(), dim=-1).gather(-1, places)[:, 0]
        found.append(torch.tensor(reply.logprobs, dtype=torch.float64) - own)
    return torch.cat(found)


def _tells(reply: Reply) -> bool:
    """Whether there is a log-probability of each token, and a number."""
    values = reply.logprobs or ()
    return bool(values) and len(values) == len(reply.token_ids) and all(map(math.isfinite, values))


def _rounding(
    judge: LanguageModel, rounded: LanguageModel, answered: Sequence[tuple[Question, Reply]]
) -> tuple[float, float] | None:
    """What 99 % of the likeliest tokens' log-probabilities differ by in two dtypes, and by how much more a row's do.

    Over prompts and answers, for an engine that answers nothing must not seem exact; None where even these are short.
    """
    texts = []
    for question, reply in answered:
        first = max(1, len(question.prompt) - _FROM_PROMPTS)
        if behind := [*question.prompt[first:], *reply.token_ids]:
            texts.append((question.prompt[:first], behind))
    likeliest, largest = [], []
    for exact, coarse in zip(judging_logits(judge, texts), judging_logits(rounded, texts), strict=True):
        own = torch.log_softmax(exact.double(), dim=-1)
        differences = (torch.log_softmax(coarse.double(), dim=-1) - own).abs()
        likeliest.append(differences.gather(-1, own.argmax(dim=-1, keepdim=True))[:, 0])
        largest.append(differences.masked_fill(own < math.log(_NOTABLE), 0.0).amax(dim=-1))
    if sum(map(len, likeliest)) < _FEWEST:
        return None
    typical = max(_FINEST, _most(torch.cat(likeliest)))
    return typical, max(1.0, _most(torch.cat(largest)) / typical)


_MARGIN = 1.5
_FINEST = 1e-4
"""What other kernels may do in float32."""
_UNMEASURED = {torch.float64: 0.01, torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.15}
"""What is taken for rounding by a dtype where none can be measured: two to three times what we saw."""
_SPREAD = 2.5
"""By how much the largest error of a row exceeds that of its likeliest token, where it cannot be measured: 2.1 seen."""
_FEWEST = 32
_FROM_PROMPTS = 64
_NOTABLE = 1e-3
_LEEWAY = 4.0
_QUANTILE = 0.99


def _most(differences: Tensor) -> float:
    """What 99 % of them do not exceed."""
    return float(differences.quantile(_QUANTILE))
