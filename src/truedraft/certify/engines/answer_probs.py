"""How far rounding may move an engine's log-probabilities from the judge's: measured, or given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truedraft.certify.sampling import plain_logits
from truedraft.core.params import SamplingParams
from truedraft.core.shaping import Shaping
from truedraft.measure.peers import Question, Reply
from truedraft.models.base import LanguageModel


@dataclass(frozen=True, slots=True)
class Allowance:
    """How far a correct engine's log-probabilities may be from the judge's, at temperature 1; `origin` is in words."""

    log_ratio: float  # bound for sums over many tokens, as if each log-probability were off by it
    edge: float  # largest |log p' - log p| of any single token; decides at filters' edges
    origin: str

    def at(self, params: SamplingParams) -> float:
        """The log ratio under the options' temperature and penalties; greedy requests compare logits as they are."""
        return min(self.log_ratio * penalty_factor(params) / (1.0 if params.greedy else params.temperature), FAR)


FAR = 300.0  # largest log ratio; more would overflow, and from here on there is no evidence
EXACT = Allowance(0.0, 0.0, "nothing is rounded")


def penalty_factor(params: SamplingParams) -> float:
    """Factor by which penalties increase an error in logits; the repetition penalty multiplies them."""
    return max(params.repetition_penalty, 1.0 / params.repetition_penalty)


def judging_logits(model: LanguageModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
    """A model's logits before each token after the prompts, on the CPU, where they are judged."""
    return [rows.cpu() for rows in plain_logits(model, texts)]


def measured_allowance(
    judge: LanguageModel, rounded: LanguageModel | None, answered: Sequence[tuple[Question, Reply]]
) -> tuple[Allowance, Tensor | None]:
    """Measure how far an engine's kernels may move log-probabilities, from a few greedy answers.

    If the engine returns raw log-probabilities of its tokens, the allowance is 1.5 times the 99 % quantile of their
    differences from the judge's. If that quantile is more than four times the effect of rounding the same weights to
    `rounded`'s dtype on the most likely tokens, it is not rounding; then, and if the engine returns none, the allowance
    is 1.5 times the effect of `rounded`. At filter edges a single token decides, so the ratio of a row's largest error
    to that of its most likely token is measured, too.

    Args:
        rounded: the same weights in the engine's likely precision. With None, the engine's log-probabilities are
            accepted up to the largest effect of the judge's own dtype.

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
    reported = [(question, reply) for question, reply in answered if _has_logprobs(reply)]
    rows = judging_logits(judge, [(question.prompt, reply.token_ids) for question, reply in reported])
    found = [torch.empty(0, dtype=torch.float64)]
    for logits, (_, reply) in zip(rows, reported, strict=True):
        places = torch.tensor(reply.token_ids)[:, None]
        own = torch.log_softmax(logits.double(), dim=-1).gather(-1, places)[:, 0]
        found.append(torch.tensor(reply.logprobs, dtype=torch.float64) - own)
    return torch.cat(found)


def _has_logprobs(reply: Reply) -> bool:
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
_FINEST = 1e-4  # the least effect of other kernels in float32
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


_NUCLEUS = 1e-6  # largest error of a sum of float64 probabilities that came from float32 logits


@dataclass(frozen=True, slots=True)
class AnswerProbs:
    """The target's distributions at the tokens of one answer, float64."""

    question: Question
    tokens: Sequence[int]  # with an end of text; all end-of-text ids are mapped to the first
    logits: Tensor  # [tokens, vocab]: after penalties and biases, before temperature and filters
    probs: Tensor  # [tokens, vocab]: what each token should have been drawn from
    doubtful: Tensor  # [tokens, vocab], bool: rounding within the allowance may keep them or not
    outside: Tensor  # [tokens], bool: no such rounding keeps the token
    gain: Tensor  # [tokens]: the most that rounding may give a bet, per unit of total variation; may be infinite
    likeliest: Tensor | None = None  # [tokens, kept]: ids that bets distinguish; None is all
    ends: Sequence[int] = ()  # ids that end a text

    @property
    def sure(self) -> Tensor:
        return ~self.doubtful.any(dim=-1) & self.gain.isfinite()

    @property
    def text(self) -> list[int]:
        return [*self.question.prompt, *self.tokens]

    def under(self, params: SamplingParams, filters: Sequence[str]) -> Tensor:
        return with_one_end(filtered(self.logits, params, filters).probs, self.ends)

    def folded(self, values: Tensor) -> Tensor:
        """Masses of tokens `[tokens, vocab]` as those of `likeliest` and, last, of all others together."""
        if self.likeliest is None:
            return values
        others = values.scatter(-1, self.likeliest, 0.0).sum(dim=-1, keepdim=True)
        return torch.cat([values.gather(-1, self.likeliest), others], dim=-1)

    def places(self) -> Tensor:
        """Columns `[tokens]` in folded masses: with `likeliest` (7, 2), the tokens 2, 7 and 5 are at 1, 0 and 2."""
        tokens = torch.tensor(list(self.tokens))
        if self.likeliest is None:
            return tokens
        here = self.likeliest == tokens[:, None]
        return torch.where(here.any(dim=-1), here.int().argmax(dim=-1), self.likeliest.shape[-1])


@dataclass(frozen=True, slots=True)
class Judge:
    """Scores answers under a target's own forward, with an engine's order of filters and its possible draft models."""

    target: LanguageModel
    filters: Sequence[str]
    allowance: Allowance
    drafts: Mapping[str, LanguageModel] = field(default_factory=dict)

    def answer_probs(self, answered: Sequence[tuple[Question, Reply]]) -> list[AnswerProbs]:
        ended = [(question, ended_tokens(self.target, question, reply)) for question, reply in answered]
        rows = iter(judging_logits(self.target, [(question.prompt, tokens) for question, tokens in ended if tokens]))
        return [self._of_answer(question, tokens, next(rows)) for question, tokens in ended if tokens]

    def _of_answer(self, question: Question, tokens: Sequence[int], logits: Tensor) -> AnswerProbs:
        params, ends = question.params, list(self.target.eos_token_ids)
        shaping = Shaping(params, question.prompt, len(question.prompt), ends, (), self.target.vocab_size)
        shaped = shaping.of_paths(logits, [tokens[:place] for place in range(len(tokens))]).double()
        found = filtered(shaped, params, self.filters, self.allowance)
        probs, doubtful, within = (with_one_end(each, ends) for each in (found.probs, found.doubtful, found.within))
        outside = ~within.gather(-1, torch.tensor(list(tokens))[:, None])[:, 0]
        few = min(_LIKELIEST, probs.shape[-1])
        likeliest = None if few == probs.shape[-1] else shaped.topk(few, dim=-1).indices
        return AnswerProbs(question, tokens, shaped, probs, doubtful, outside, found.gain, likeliest, ends)


_LIKELIEST = 8192


def with_one_end(values: Tensor, ends: Sequence[int]) -> Tensor:
    """Masses or flags of tokens `[rows, vocab]`, with all end-of-text ids merged into the first."""
    if len(ends) < 2:
        return values
    one = values.clone()
    one[:, list(ends)] = False
    several = values[:, list(ends)]
    one[:, ends[0]] = several.any(dim=-1) if values.dtype is torch.bool else several.sum(dim=-1)
    return one


def ended_tokens(target: LanguageModel, question: Question, reply: Reply) -> list[int]:
    """The tokens of an answer up to and including the first end of text.

    An answer that stopped by itself drew one, unless it may have stopped by the request's stop texts.
    """
    ends, tokens = list(target.eos_token_ids), list(reply.token_ids)
    first = next((place for place, token in enumerate(tokens) if token in ends), None)
    if first is not None:
        return [*tokens[:first], ends[0]]
    params = question.params
    by_itself = reply.finish_reason not in _CUT and not params.stop and not params.stop_token_ids
    if not (by_itself and ends and len(tokens) < params.max_tokens) or unknown_end(target, reply) is not None:
        return tokens
    return [*tokens, ends[0]]


def unknown_end(target: LanguageModel, reply: Reply) -> int | None:
    """The special token that an answer ended with, if the target does not end a text with it; None if there is none."""
    if target.tokenizer is None or reply.finish_reason in _CUT or not reply.token_ids:
        return None
    last = reply.token_ids[-1]
    return last if last in target.tokenizer.skipped_ids and last not in target.eos_token_ids else None


_CUT = ("length", "abort", "aborted", "cancelled", "content_filter", "error", "timeout")
"""Finish reasons of answers that did not end by themselves; engines use various names for an end of text."""


@dataclass(frozen=True, slots=True)
class Filtered:
    """Filtered distributions and the effect of rounding on them."""

    probs: Tensor  # [rows, vocab]
    doubtful: Tensor  # [rows, vocab], bool: rounding may keep them or not
    within: Tensor  # [rows, vocab], bool: some rounding keeps them
    gain: Tensor  # [rows], as in `AnswerProbs`


def filtered(logits: Tensor, params: SamplingParams, filters: Sequence[str], allowance: Allowance = EXACT) -> Filtered:
    """Distributions after filters in an order, and the tokens that rounding might have kept or removed.

    Greedy requests take the most likely token, ties to the lowest id. `logits` `[rows, vocab]` are float64.
    """
    off, edge = (min(each * penalty_factor(params), FAR) for each in (allowance.log_ratio, allowance.edge))
    if params.greedy:
        return _greedy(logits, edge)
    scores = logits
    finite = within = surely = torch.isfinite(logits)
    lost = torch.zeros(len(logits), dtype=torch.bool)
    for name in filters:
        if name == "temperature":
            scores = scores / params.temperature
            off, edge = (min(each / params.temperature, FAR) for each in (off, edge))
            continue
        found = _EDGES[name](scores, params, edge)
        if found is not None:
            kept, may, must = found
            lost |= (within & ~surely).any(dim=-1)  # what this filter sees depends on an earlier doubt
            within, surely = within & may, surely & must
            scores = scores.masked_fill(~kept, -math.inf)
    # After an earlier doubt a filter may have seen other tokens than ours: none is surely forbidden there.
    within = within | (lost[:, None] & finite)
    doubtful = within & ~surely
    gain = _gain(logits, params, doubtful, within, off).masked_fill(lost, math.inf)
    return Filtered(torch.softmax(scores, dim=-1), doubtful, within, gain)


def _greedy(logits: Tensor, edge: float) -> Filtered:
    """If no rounding makes another token the most likely, an engine has no choice, and rounding gives a bet nothing."""
    near = logits >= logits.amax(dim=-1, keepdim=True) - 2.0 * edge
    tied = near.sum(dim=-1) > 1
    probs = torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    return Filtered(probs, near & tied[:, None], near, torch.where(tied, math.inf, 0.0).double())


def _gain(logits: Tensor, params: SamplingParams, doubtful: Tensor, within: Tensor, off: float) -> Tensor:
    """The most that rounding may give a bet, per unit of total variation, `[rows]`.

    A bet on a pays (a - p) / p, and over the tokens that are not doubtful a and p have the same mass. The engine's own
    distribution there is p e^d / Z with |d| <= x: sum (a - p) e^d is at most 2 sinh(x) TV. Z is at least e^-x, and less
    by the doubtful tokens, of mass A of all that may be kept, which the engine may have left out: e^-x (1 - A). So it
    gains expm1(2 x) / (1 - A) TV.
    """
    if not bool(doubtful.any()):  # many rows of a large vocabulary have none
        return torch.full((len(logits),), math.expm1(2.0 * off), dtype=torch.float64)
    whole = torch.softmax((logits / params.temperature).masked_fill(~within, -math.inf), dim=-1)
    left = (whole * ~doubtful).sum(dim=-1)
    return torch.where(left < LEAST_SURE, math.inf, math.expm1(2.0 * off) / left)


LEAST_SURE = 0.5
_Edge = tuple[Tensor, Tensor, Tensor]  # tokens that are kept, that may be kept, and that surely are


def _top_k(scores: Tensor, params: SamplingParams, off: float) -> _Edge | None:
    if not 0 < params.top_k < scores.shape[-1]:
        return None
    best = scores.topk(params.top_k + 1, dim=-1).values
    least, following = best[:, -2:-1], best[:, -1:]
    # The engine chooses which of equals stay.
    return scores >= least, scores >= least - 2.0 * off, scores > following + 2.0 * off


def _top_p(scores: Tensor, params: SamplingParams, off: float) -> _Edge | None:
    """A token is kept if the mass before it is less than p.

    At least, that is the mass of tokens that are more likely by more than rounding; at most, of all that may be. If
    each probability may be off by a factor of e^d, the odds of a mass may be off by e^2d.
    """
    if params.top_p >= 1.0:
        return None
    probs, count = torch.softmax(scores, dim=-1), _FIRST
    while (found := _nucleus(probs, params.top_p, off, count)) is None:
        count *= 8
    return found


def _nucleus(probs: Tensor, p: float, off: float, count: int) -> _Edge | None:
    every = count >= probs.shape[-1]
    ordered, order = probs.sort(dim=-1, descending=True, stable=True) if every else probs.topk(count, dim=-1)
    sums = torch.nn.functional.pad(ordered.cumsum(dim=-1), (1, 0))
    kept = sums[:, :-1] < p
    factor, rising = math.exp(2.0 * off), -ordered  # `searchsorted` needs rising values
    least = sums.gather(-1, torch.searchsorted(rising, rising * factor))
    most = sums.gather(-1, torch.searchsorted(rising, rising / factor, right=True)) - ordered
    may = least / (least + (1.0 - least).clamp_min(0.0) * factor) < p + _NUCLEUS
    surely = most / (most + (1.0 - most).clamp_min(0.0) / factor) < p - _NUCLEUS
    surely[:, 0] |= ordered[:, 0] > factor * ordered[:, 1]  # nothing comes before it
    if not every and bool((may[:, -1] | (sums[:, -1] < p + _NUCLEUS)).any()):
        return None
    nothing = torch.zeros_like(probs, dtype=torch.bool)
    return nothing.scatter(-1, order, kept), nothing.scatter(-1, order, may), nothing.scatter(-1, order, surely)


_FIRST = 4096  # tokens that are sorted at first: a vocabulary may be forty times as large


def _min_p(scores: Tensor, params: SamplingParams, off: float) -> _Edge | None:
    if params.min_p <= 0.0:
        return None
    best = scores.amax(dim=-1, keepdim=True)
    least = best + math.log(params.min_p)
    return scores >= least, scores >= least - 2.0 * off, (scores >= least + 2.0 * off) | (scores == best)


_EDGES = {"top_k": _top_k, "top_p": _top_p, "min_p": _min_p}
