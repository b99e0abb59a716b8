"""How far rounding may move an engine's log-probabilities from the judge's: measured, or given."""

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
    """How far a correct engine's log-probabilities may be from the judge's, at temperature 1.

    Attributes:
        log_ratio: bound for sums over many tokens (bets and events), as if each log-probability were off by it.
        edge: largest |log p' - log p| of any single token, which decides on which side of a filter's edge it is.
        told: the origin, in words.
    """

    log_ratio: float
    edge: float
    told: str

    def at(self, params: SamplingParams) -> float:
        """The log ratio under the options' temperature and penalties; greedy requests compare logits as they are."""
        return min(self.log_ratio * stretch(params) / (1.0 if params.greedy else params.temperature), FAR)


FAR = 300.0
"""Largest log ratio; more would overflow, and from here on there is no evidence."""
EXACT = Allowance(0.0, 0.0, "nothing is rounded")


def stretch(params: SamplingParams) -> float:
    """Factor by which penalties increase an error in logits; the repetition penalty multiplies them."""
    return max(params.repetition_penalty, 1.0 / params.repetition_penalty)


def judging_logits(model: LanguageModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
    """A model's logits before each token after the prompts, on the CPU, where they are judged."""
    return [rows.cpu() for rows in plain_logits(model, texts)]


def measured_allowance(
    judge: LanguageModel,
    rounded: LanguageModel | None,
    answered: Sequence[tuple[Question, Reply]],
) -> tuple[Allowance, Tensor | None]:
    """Measure how far an engine's kernels may move log-probabilities, from a few answers.

    If the engine returns log-probabilities of its tokens, the allowance is 1.5 times the 99 % quantile of their
    differences from the judge's. If that quantile is more than four times the effect of rounding the same weights to
    `rounded`'s dtype on the most likely tokens, it is not rounding; then, and if the engine returns none, the allowance
    is 1.5 times the effect of `rounded`. At filter edges a single token decides, so the ratio of a row's largest error
    to that of its most likely token is measured, too.

    Args:
        judge: the target, in the dtype that judges.
        rounded: the same weights in the engine's likely precision. With None, the engine's log-probabilities are
            accepted up to the largest effect of the judge's own dtype.
        answered: greedy answers, with raw log-probabilities if the engine returns them.

    Returns:
        The allowance, and the engine's log-probabilities minus ours `[tokens]`; None without any.
    """
    measured = None if rounded is None else _rounding(judge, rounded, answered)
    typical, spread = measured or (_UNMEASURED[(rounded or judge).dtype], _SPREAD)
    limit = typical if measured is None else _LEEWAY * typical
    differences = _logprob_differences(judge, answered)
    if len(differences) >= _FEWEST:
        seen = _most(differences.abs())
        words = f"{_MARGIN:g} times {seen:.2g}, by which the engine's own log-probabilities differ"
        if seen > limit:  # what is not rounding adds no allowance
            seen = typical
            words = f"{_MARGIN:g} times {seen:.2g}; its own log-probabilities differ by more than rounding does"
    else:
        seen = typical
        words = f"{_MARGIN:g} times {seen:.2g}, " + (
            "which is taken for rounding where none was measured" if measured is None else "which a coarser dtype makes"
        )
    log_ratio = _MARGIN * max(seen, _FINEST)
    return Allowance(log_ratio, spread * log_ratio, words), differences if len(differences) else None


def _logprob_differences(judge: LanguageModel, answered: Sequence[tuple[Question, Reply]]) -> Tensor:
    """The engine's log-probabilities minus the judge's, of all tokens that have any, `[tokens]`."""
    reported = [(question, reply) for question, reply in answered if _tells(reply)]
    rows = judging_logits(judge, [(question.prompt, reply.token_ids) for question, reply in reported])
    found = [torch.empty(0, dtype=torch.float64)]
    for logits, (_, reply) in zip(rows, reported, strict=True):
        places = torch.tensor(reply.token_ids)[:, None]
        own = torch.log_softmax(logits.double(), dim=-1).gather(-1, places)[:, 0]
        found.append(torch.tensor(reply.logprobs, dtype=torch.float64) - own)
    return torch.cat(found)


def _tells(reply: Reply) -> bool:
    values = reply.logprobs or ()
    return bool(values) and len(values) == len(reply.token_ids) and all(map(math.isfinite, values))


def _rounding(
    judge: LanguageModel, rounded: LanguageModel, answered: Sequence[tuple[Question, Reply]]
) -> tuple[float, float] | None:
    """The 99 % quantile of the most likely tokens' differences between two dtypes, and a row's largest relative to it.

    It includes prompts, so that an engine that answers nothing does not seem exact; None with too few tokens.
    """
    texts = []
    for question, reply in answered:
        first = max(1, len(question.prompt) - _FROM_PROMPTS)
        if following := [*question.prompt[first:], *reply.token_ids]:
            texts.append((question.prompt[:first], following))
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
"""The least effect of other kernels in float32."""
_UNMEASURED = {torch.float64: 0.01, torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Rounding by dtype where it cannot be measured: two to three times what we observed."""
_SPREAD = 2.5
"""Ratio of a row's largest error to that of its most likely token where it cannot be measured; we observed 2.1."""
_FEWEST = 32
_FROM_PROMPTS = 64
_NOTABLE = 1e-3
_LEEWAY = 4.0
_QUANTILE = 0.99


def _most(differences: Tensor) -> float:
    return float(differences.quantile(_QUANTILE))
