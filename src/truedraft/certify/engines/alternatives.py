"""Alternative distributions that faulty engines sample from; bets on them name the fault.

Each depends only on the text before a token. Faults of draft verification need the distributions of a named draft
model, or candidates copied from the text as in n-gram speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from truedraft.certify import faults
from truedraft.certify.engines.answer_probs import AnswerProbs
from truedraft.certify.faults import argmax
from truedraft.core.params import SamplingParams
from truedraft.measure.peers import FILTERS

COPIED = "copied from the text"
"""Name of the candidates that are copied as in n-gram speculation."""
_NGRAM = 3
_CUTS = (0.05, 0.15, 0.3, 0.5)
_JUDGED_AT = 2.0
_BEHIND = 2
"""Tokens after which a state that was not rolled back may show."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A distribution that a faulty engine may sample from, and the class of fault that it represents.

    `probs` gives it, float64 and folded (`AnswerProbs.folded`), from an answer and its drafts; a row that equals p bets
    nothing.
    """

    name: str
    fault: str
    probs: Callable[[AnswerProbs, Mapping[str, Tensor]], Tensor]


def alternatives_for(params: SamplingParams, filters: Sequence[str], drafts: Sequence[str]) -> list[Alternative]:
    """The alternatives that differ from the target under some options, an order of filters and named drafts."""
    found = _of_state()
    if not params.greedy:
        found += [*_of_temperature(params, filters), *_of_filters(params, filters)]
        found += [one for draft in drafts for one in _of_judging(draft)]
    else:
        found.append(
            _options("drawn at temperature 1", "sampling at temperature 0", replace(params, temperature=1.0), FILTERS)
        )
        found += [one for draft in drafts for one in _of_judging(draft)[:1]]
    return found


def _options(name: str, fault: str, params: SamplingParams, filters: Sequence[str]) -> Alternative:
    return Alternative(name, fault, lambda own, drafts: own.folded(own.under(params, filters)))


def _of_temperature(params: SamplingParams, filters: Sequence[str]) -> list[Alternative]:
    t = params.temperature
    found = [
        Alternative(
            "the likeliest token",
            "greedy above temperature 0",
            lambda own, drafts: argmax(own.folded(own.probs)),
        ),
        *(
            _options(
                f"{factor:g} times the temperature",
                "another temperature",
                replace(params, temperature=factor * t),
                filters,
            )
            for factor in (0.5, 0.75, 1.33, 2.0)
        ),
    ]
    if abs(t - 1.0) > 0.05:
        twice = replace(params, temperature=t * t)
        found += [
            _options("temperature twice", "temperature applied twice", twice, filters),
            _options("temperature 1", "temperature ignored", replace(params, temperature=1.0), filters),
        ]
    return found


def _of_filters(params: SamplingParams, filters: Sequence[str]) -> list[Alternative]:
    found = []
    if params.top_p < 1.0:
        found += [
            _options("no top-p", "top-p ignored", replace(params, top_p=1.0), filters),
            Alternative(
                "one token more",
                "top-p off by one token",
                lambda own, drafts: own.folded(_resized(own, filters, 1)),
            ),
            Alternative(
                "one token less",
                "top-p off by one token",
                lambda own, drafts: own.folded(_resized(own, filters, -1)),
            ),
        ]
    if params.top_k > 0:
        found.append(_options("no top-k", "top-k ignored", replace(params, top_k=0), filters))
        for more in (1, -1) if params.top_k > 1 else (1,):
            other = replace(params, top_k=params.top_k + more)
            found.append(_options(f"top-k {other.top_k}", "top-k off by one token", other, filters))
    if params.min_p > 0.0:
        found.append(_options("no min-p", "min-p ignored", replace(params, min_p=0.0), filters))
    plain = SamplingParams(temperature=1.0)
    active = [name for name in filters if getattr(params, name) != getattr(plain, name)]
    orders = {tuple(name for name in order if name in active) for order in (FILTERS, _TEMPERATURE_LAST, _MIN_P_FIRST)}
    found += [
        _options(f"order {', '.join(order)}", "filters in another order", params, order)
        for order in sorted(orders - {tuple(active)})
        if active
    ]
    return found


_TEMPERATURE_LAST = ("top_k", "top_p", "min_p", "temperature")
_MIN_P_FIRST = ("temperature", "min_p", "top_k", "top_p")


def _of_state() -> list[Alternative]:
    fault = "state of another text"
    return [
        Alternative("one token earlier", fault, lambda own, drafts: own.folded(_earlier(own.probs, 1))),
        Alternative("two tokens earlier", fault, lambda own, drafts: own.folded(_earlier(own.probs, 2))),
        Alternative("any place of the answer", fault, lambda own, drafts: own.folded(_running_mean(own.probs))),
        Alternative("the last token again", fault, _last_again),
    ]


def _of_judging(draft: str) -> list[Alternative]:
    def by(fault: faults.Fault) -> Alternative:
        return Alternative(
            f"{draft}: {fault.detail}",
            fault.name,
            lambda own, drafts: _judged(fault, own.folded(own.probs), own.folded(drafts[draft])),
        )

    found = [by(each) for each in (faults.KEEPS_ALL, faults.RESIDUAL_IS_P, faults.ONE_NUMBER)]
    if draft == COPIED:  # nothing was drawn, so there is no fault of drawing
        return found
    drawing = (faults.ONE_GUMBEL, faults.draft_judged_at(_JUDGED_AT), *map(faults.dropped_below, _CUTS))
    # Bfloat16 loses sums of many small cells, so all tokens are kept.
    fine = faults.IN_BFLOAT16
    whole = Alternative(
        f"{draft}: {fine.detail}",
        fine.name,
        lambda own, drafts: own.folded(_judged(fine, own.probs, drafts[draft])),
    )
    return [*found, *map(by, drawing), whole]


# ---------------------------------------------------------------------------------------- their distributions


def _judged(fault: faults.Fault, p: Tensor, q: Tensor) -> Tensor:
    """Distribution under a faulty rule; p where there is no draft, and at the first token, which the prefill draws."""
    drafted = q.sum(dim=-1, keepdim=True) > 0.5
    drafted[0] = False
    return torch.where(drafted, fault.emitted(p, torch.where(drafted, q, p)), p)


def _resized(answer: AnswerProbs, filters: Sequence[str], more: int) -> Tensor:
    wide = answer.under(replace(answer.question.params, top_p=1.0), filters)
    sizes = ((answer.probs > 0.0).sum(dim=-1, keepdim=True) + more).clamp_min(1)
    values, order = wide.topk(min(int(sizes.max()), wide.shape[-1]), dim=-1)
    kept = torch.zeros_like(wide).scatter_(-1, order, values * (torch.arange(values.shape[-1]) < sizes))
    return kept / kept.sum(dim=-1, keepdim=True)


def _earlier(probs: Tensor, tokens: int) -> Tensor:
    return torch.cat([probs[:tokens], probs[:-tokens]])[: len(probs)] if len(probs) > tokens else probs


def _running_mean(probs: Tensor) -> Tensor:
    if len(probs) <= _BEHIND:
        return probs
    counts = torch.arange(1, len(probs), dtype=probs.dtype)[:, None]
    means = probs.cumsum(dim=0)[:-1] / counts
    return torch.cat([probs[:_BEHIND], means[_BEHIND - 1 :]])


def _last_again(answer: AnswerProbs, drafts: Mapping[str, Tensor]) -> Tensor:
    again = torch.zeros_like(answer.probs)
    first = len(answer.question.prompt)
    last = torch.tensor(answer.text[first - 1 : first - 1 + len(answer.tokens)])
    return answer.folded(again.scatter_(-1, last[:, None], 1.0))


def ngram_candidates(answer: AnswerProbs) -> Tensor:
    """One-hot rows of the token after the latest match of the last three tokens or fewer, longest first; else zeros."""
    text, first = answer.text, len(answer.question.prompt)
    found = torch.zeros_like(answer.probs)
    seen: dict[tuple[int, ...], int] = {}
    for place in range(1, len(text)):
        if place >= first:
            for size in range(_NGRAM, 0, -1):
                following = seen.get(tuple(text[max(0, place - size) : place]))
                if following is not None:
                    found[place - first, text[following]] = 1.0
                    break
        for size in range(1, _NGRAM + 1):
            if place >= size:
                seen[tuple(text[place - size : place])] = place
    return found
