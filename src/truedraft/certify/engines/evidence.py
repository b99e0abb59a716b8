"""Bets against the hypothesis that an engine's tokens follow the target: products of likelihood ratios.

For an alternative a and a weight w, fixed before the token is seen, (1 - w) p + w a over p is a likelihood ratio. Its
mean is 1 if the token follows p. If it follows a p' that rounding made of p, its mean is at most 1 + w g TV(a, p) with
the gain g of `AnswerProbs`. Nothing is bet on doubtful tokens: a is p there. Divided by that, the products are
e-processes (Ville): the mean over alternatives and weights ever reaches 1/a with probability at most a, whatever the
stopping time. In the long run the product is largest for the alternative nearest to the engine's distribution, so it
names the fault. An alternative depends only on the text before a token. Faults of draft verification need the
distributions of a named draft model, or candidates copied from the text as in n-gram speculation.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from truedraft.certify import faults
from truedraft.certify.e_process import ALARM, CERTAIN, EProcess, EventTests, TokenTests, log_mean
from truedraft.certify.engines.answer_probs import (
    LEAST_SURE,
    AnswerProbs,
    Judge,
    filtered,
    judging_logits,
    with_one_end,
)
from truedraft.certify.faults import argmax
from truedraft.certify.sampling import Decision, Scored
from truedraft.core.params import SamplingParams
from truedraft.measure.peers import FILTERS

COPIED = "copied from the text"  # name of the candidates that are copied as in n-gram speculation
_NGRAM = 3
_CUTS = (0.05, 0.15, 0.3, 0.5)
_JUDGED_AT = 2.0
_BEHIND = 2  # tokens after which a state that was not rolled back may show


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
    judged = [_of_judging(draft)[: 1 if params.greedy else None] for draft in drafts]
    drawn = replace(params, temperature=1.0)
    others = (
        [_options("drawn at temperature 1", "sampling at temperature 0", drawn, FILTERS)]
        if params.greedy
        else _of_options(params, filters)
    )
    return [*_of_state(), *others, *itertools.chain(*judged)]


def _without_draft(name: str, fault: str, probs: Callable[[AnswerProbs], Tensor]) -> Alternative:
    """By distributions over all tokens that need no draft."""
    return Alternative(name, fault, lambda own, drafts: own.folded(probs(own)))


def _options(name: str, fault: str, params: SamplingParams, filters: Sequence[str]) -> Alternative:
    return _without_draft(name, fault, lambda own: own.under(params, filters))


def _of_options(params: SamplingParams, filters: Sequence[str]) -> list[Alternative]:
    def other(name: str, fault: str, **changed: Any) -> Alternative:
        return _options(name, fault, replace(params, **changed), filters)

    likeliest = "the likeliest token", "greedy above temperature 0"
    found = [Alternative(*likeliest, lambda own, drafts: argmax(own.folded(own.probs)))]
    t = params.temperature
    found += [
        other(f"{factor:g} times the temperature", "another temperature", temperature=factor * t)
        for factor in (0.5, 0.75, 1.33, 2.0)
    ]
    if abs(t - 1.0) > 0.05:
        found.append(other("temperature twice", "temperature applied twice", temperature=t * t))
        found.append(other("temperature 1", "temperature ignored", temperature=1.0))
    if params.top_p < 1.0:
        off_by_one = "top-p off by one token"
        found.append(other("no top-p", "top-p ignored", top_p=1.0))
        found.append(_without_draft("one token more", off_by_one, lambda own: _resized(own, filters, 1)))
        found.append(_without_draft("one token less", off_by_one, lambda own: _resized(own, filters, -1)))
    if params.top_k > 0:
        found.append(other("no top-k", "top-k ignored", top_k=0))
        for k in (params.top_k + 1, params.top_k - 1):
            found += [other(f"top-k {k}", "top-k off by one token", top_k=k)] * (k > 0)
    if params.min_p > 0.0:
        found.append(other("no min-p", "min-p ignored", min_p=0.0))
    plain = SamplingParams(temperature=1.0)
    active = tuple(name for name in filters if getattr(params, name) != getattr(plain, name))
    orders = {tuple(name for name in order if name in active) for order in (FILTERS, _TEMPERATURE_LAST, _MIN_P_FIRST)}
    found += [
        _options(f"order {', '.join(order)}", "filters in another order", params, order)
        for order in sorted(orders - {active})
    ]
    return found


_TEMPERATURE_LAST = ("top_k", "top_p", "min_p", "temperature")
_MIN_P_FIRST = ("temperature", "min_p", "top_k", "top_p")


def _of_state() -> list[Alternative]:
    fault = "state of another text"
    return [
        _without_draft("one token earlier", fault, lambda own: _earlier(own.probs, 1)),
        _without_draft("two tokens earlier", fault, lambda own: _earlier(own.probs, 2)),
        _without_draft("any place of the answer", fault, lambda own: _running_mean(own.probs)),
        _without_draft("the last token again", fault, _last_again),
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
        f"{draft}: {fine.detail}", fine.name, lambda own, drafts: own.folded(_judged(fine, own.probs, drafts[draft]))
    )
    return [*found, *map(by, drawing), whole]


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


def _last_again(answer: AnswerProbs) -> Tensor:
    again = torch.zeros_like(answer.probs)
    first = len(answer.question.prompt)
    last = torch.tensor(answer.text[first - 1 : first - 1 + len(answer.tokens)])
    return again.scatter_(-1, last[:, None], 1.0)


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


def drafted(answer: AnswerProbs, judge: Judge) -> dict[str, Tensor]:
    """The drafts' distributions at the tokens of an answer, under its options."""
    found = {COPIED: ngram_candidates(answer)}
    for name, model in judge.drafts.items():
        found[name] = torch.zeros_like(answer.probs)
        known = next((place for place, token in enumerate(answer.text) if token >= model.vocab_size), len(answer.text))
        # A row depends only on tokens before its own, so its own token may be one that the draft does not have.
        first, last = len(answer.question.prompt), min(known + 1, len(answer.text), model.context_length)
        if known < first or last <= first:  # a draft that cannot read the text proposes nothing
            continue
        following = [*answer.text[first : last - 1], 0]  # no row sees the last
        (logits,) = judging_logits(model, [(answer.question.prompt, following)])
        ids = min(model.vocab_size, judge.target.vocab_size)
        rows = torch.full((len(logits), judge.target.vocab_size), -math.inf, dtype=torch.float64)
        rows[:, :ids] = logits[:, :ids]
        probs = filtered(rows, answer.question.params, judge.filters).probs
        found[name][: len(rows)] = with_one_end(probs, answer.ends)
    return found


WEIGHTS = (0.1, 0.3, 0.6, 0.9, 0.99)
_FLOOR = 1e-4  # replaces p where p has no mass, so that one token on a filter's edge does not decide by itself
_FORBIDDEN = 1e-6  # mass that a correct engine may have where p has none
_SUMMING = 1e-6
_TRUST = (15.0, 60.0, 250.0)
_SAME = (0.1, 0.4)


@dataclass(frozen=True, slots=True)
class Bet:
    """Result of one alternative, at the weight with the largest evidence; `mean_tv` is between p and its mixture."""

    name: str
    fault: str
    log_evidence: float
    weight: float
    mean_tv: float


def _grown(weights: Tensor, ratio: Tensor, allowed: Tensor) -> Tensor:
    return torch.log1p(weights * (ratio - 1.0)) - torch.log1p(weights * allowed + _SUMMING)


class Bets:
    """Bets on several alternatives over one stream of tokens."""

    def __init__(self, alternatives: Sequence[Alternative]) -> None:
        self._alternatives = list(alternatives)
        self._logs = torch.zeros(len(self._alternatives), len(WEIGHTS), dtype=torch.float64)
        self._far = torch.zeros(len(self._alternatives), dtype=torch.float64)
        self._tokens = 0

    def add(self, answer: AnswerProbs, drafts: Mapping[str, Tensor]) -> None:
        """Update with an answer, and each draft's distributions `[tokens, vocab]`; a row without mass is no draft."""
        self._tokens += int(answer.gain.isfinite().sum())
        p, doubtful = answer.folded(answer.probs), answer.folded(answer.doubtful.double()) > 0.0
        for number, alternative in enumerate(self._alternatives):
            self._logs[number] += self._growth(answer, p, alternative.probs(answer, drafts), ~doubtful, number)

    def lose(self, tokens: int, log_ratio: float) -> None:
        """Pay for dropped tokens as for lost bets, 1 - w and the largest effect of rounding: dropping gains nothing."""
        weights = torch.tensor(WEIGHTS, dtype=torch.float64)
        most = math.expm1(2.0 * log_ratio) / LEAST_SURE + _FORBIDDEN / _FLOOR
        self._logs += tokens * (torch.log1p(-weights) - torch.log1p(weights * most + _SUMMING))

    def _growth(self, answer: AnswerProbs, p: Tensor, a: Tensor, sure: Tensor, number: int) -> Tensor:
        tokens = answer.places()[:, None]
        # Its mass on the tokens that are not doubtful is set to p's there.
        sizes = [(each * sure).sum(dim=-1, keepdim=True) for each in (p, a)]
        a = torch.where(sure & (sizes[1] > 0.0), a * (sizes[0] / sizes[1].clamp_min(1e-300)), p)
        distance = 0.5 * (a - p).abs().sum(dim=-1)
        own, other = (each.gather(-1, tokens)[:, 0] for each in (p, a))
        ratio = torch.where(own > 0.0, other / own, other / _FLOOR)
        ratio = torch.where(sure.gather(-1, tokens)[:, 0], ratio, 1.0)  # also for a doubtful token without mass in p
        # Pays for forbidden tokens that a correct engine may emit.
        allowed = answer.gain * distance + _FORBIDDEN / _FLOOR * (a * (p == 0.0)).sum(dim=-1)
        weights = torch.tensor(WEIGHTS, dtype=torch.float64)
        usable = answer.gain.isfinite()
        self._far[number] += float(distance[usable].sum())
        ratio, allowed = ratio[usable, None], allowed[usable, None]
        return _grown(weights, ratio, allowed).sum(dim=0)

    @property
    def log_evidence(self) -> float:
        return log_mean(self._logs)

    def results(self) -> list[Bet]:
        each = torch.logsumexp(self._logs, dim=-1) - math.log(len(WEIGHTS))
        found = []
        for number, alternative in enumerate(self._alternatives):
            weight = WEIGHTS[int(self._logs[number].argmax())]
            far = weight * float(self._far[number]) / max(self._tokens, 1)
            found.append(Bet(alternative.name, alternative.fault, float(each[number]), weight, far))
        return sorted(found, key=lambda bet: -bet.log_evidence)


class Repeated:
    """Bets on counts after equal beginnings, for a few prompts that are sent many times.

    At a beginning that came n times, (counts + c p) / (n + c) is the predicted distribution of the next token if the
    engine has its own distribution there: a Dirichlet prior around p with concentration c. So any change of the joint
    distribution of the first tokens shows, even by no known fault. Other bets are on the token that the last answer had
    at the same place: answers share it if they share their noise.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self._last: dict[tuple[int, ...], int] = {}
        self._logs = torch.zeros(len(_TRUST) + len(_SAME), dtype=torch.float64)

    def add(self, answer: AnswerProbs) -> None:
        for place, token in enumerate(answer.tokens):
            beginning = (*answer.question.prompt, -1, *answer.tokens[:place])
            if bool(answer.gain[place].isfinite()) and not bool(answer.doubtful[place, token]):
                self._logs += self._of_counts(beginning, answer, place)
                self._last[beginning] = token
                self._counts[beginning][token] += 1

    def _of_counts(self, beginning: tuple[int, ...], answer: AnswerProbs, place: int) -> Tensor:
        counts, p, token = self._counts[beginning], answer.probs[place], answer.tokens[place]
        total, gain = sum(counts.values()), float(answer.gain[place])
        if not total:
            return torch.zeros_like(self._logs)
        mass = float(p[~answer.doubtful[place]].sum())
        own = float(p[token]) or _FLOOR
        seen = torch.tensor(list(counts))
        shares = torch.tensor([mass * counts[one] / total for one in counts], dtype=torch.float64)
        distance = float((shares - p[seen]).clamp_min(0.0).sum())
        last = self._last[beginning]
        bets = [(total / (total + trust), mass * counts[token] / total, distance) for trust in _TRUST]
        bets += [(weight, mass * float(token == last), mass - float(p[last])) for weight in _SAME]
        weights, shares, distances = torch.tensor(bets, dtype=torch.float64).unbind(1)
        return _grown(weights, shares / own, gain * distances)

    @property
    def log_evidence(self) -> float:
        return log_mean(self._logs)

    @property
    def log_shared(self) -> float:
        return log_mean(self._logs[len(_TRUST) :])


_OUTSIDE = 1e-6  # share of tokens outside the options' support that a correct engine may emit
_FIRM = math.log(20.0)


class Evidence:
    """Tests of a stream of answers: bets on faults, events as in stack certificates, counts of repeated beginnings.

    Args:
        filters: the engine's order.
        drafts: names of the drafts with distributions for each answer.
        slack: the allowance at the request's temperature.

    Attributes:
        process: all evidence combined; known faults have the largest weight, because they are assumed to be likelier.
        dropped: number of dropped answers. They may have been dropped for their content, so the rest is a selection.
            Bets pay for each as if they had lost on all of its tokens; the evidence of events and counts is frozen.
    """

    def __init__(
        self, vocab: int, params: SamplingParams, filters: Sequence[str], drafts: Sequence[str], slack: float
    ) -> None:  # fmt: skip
        self._bets = Bets(alternatives_for(params, filters, drafts))
        self._events = TokenTests(vocab, log_ratio=slack)
        self._outside = EventTests(["tokens that the options forbid"])
        self._repeated = Repeated()
        self.process = EProcess(bets=6.0, events=2.0, counts=1.0, outside=1.0)
        self._slack = slack
        self._events_were: float | None = None
        self._answers = 0
        self.dropped = 0
        self.tokens = 0
        self.sure = 0
        self.outside = 0

    def add(self, answer: AnswerProbs, drafts: Mapping[str, Tensor], *, repeated: bool) -> None:
        self._answers += 1
        self._bets.add(answer, drafts)
        if repeated and not self.dropped:
            self._repeated.add(answer)
        self._outside.add(torch.full((len(answer.tokens), 1), _OUTSIDE, dtype=torch.float64), answer.outside[:, None])
        # No draft is known, which `coupled` means to the events.
        nothing = [Decision(place, None, ()) for place in range(len(answer.tokens))]
        scored = Scored(answer.probs, answer.tokens, answer.question.prompt, nothing, 0, coupled=True)
        self._events.add(scored, answer.sure, self.dropped / (self._answers + self.dropped))
        self.tokens += len(answer.tokens)
        self.sure += int(answer.sure.sum())
        self.outside += int(answer.outside.sum())
        # Only after whole answers, because whether one is dropped depends on its end.
        self.process.see(self.log_parts(), self.tokens)

    def lose(self, answers: int, tokens: int) -> None:
        """Account for dropped answers of at most `tokens` tokens each."""
        if answers and self._events_were is None:
            self._events_were = self.log_parts()["events"]
        self.dropped += answers
        self._bets.lose(answers * tokens, self._slack)

    def log_parts(self) -> dict[str, float]:
        """The logarithm of each part's evidence so far; each is an e-process, and so is their mean."""
        parts = {"events": self._events.log_evidence()}
        if self._events_were is not None:
            parts["events"] = self._events_were
        parts["outside"] = float(self._outside.log_evidence()[0])
        return parts | {"bets": self._bets.log_evidence, "counts": self._repeated.log_evidence}

    def bets(self) -> list[Bet]:
        return self._bets.results()

    @property
    def fault(self) -> str:
        """The class of fault that the evidence names; "" if nothing is firm. Shared noise is named first."""
        best, shared = self.bets()[0], self._repeated.log_shared
        parts = self.log_parts()
        if shared > max(best.log_evidence, _FIRM):
            return "answers share their noise"
        if best.log_evidence > _FIRM:
            return best.fault
        return "no known one" if max(parts.values()) > math.log(ALARM) else ""

    def smallest_detectable(self) -> float:
        """Total variation that some test over all tokens finds with probability 0.99, on its event."""
        return self._events.smallest_detectable(self.process.share("events") / ALARM)

    def facts(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "tokens_away_from_edges": self.sure,
            "tokens_outside": self.outside,
            "answers_dropped": self.dropped,
            "log10_evidence": self.process.log10,
            "log10_of_parts": {name: value / math.log(10.0) for name, value in self.log_parts().items()},
            "tokens_until": {f"{level:g}": self.process.reached.get(level) for level in (ALARM, CERTAIN)},
            "fault": self.fault,
            "smallest_detectable_tv": self.smallest_detectable(),
            "bets": [
                {"alternative": bet.name, "fault": bet.fault, "log10_evidence": bet.log_evidence / math.log(10.0),
                 "weight": bet.weight, "mean_tv": bet.mean_tv}
                for bet in self.bets()[:5]
            ],
            "answers_alike_log10": self._repeated.log_shared / math.log(10.0),
        }  # fmt: skip
