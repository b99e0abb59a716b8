"""What a target says of each token of an engine's answer, under the request's options, and how far rounding reaches.

Another engine's kernels round otherwise than ours, so its probability of a token may differ from ours by a factor: each
engine whose log-probabilities lie within an allowance of ours is sound. Filters cut where a sum or a rank crosses a
bound, and there rounding decides: a row whose cut may lie elsewhere is passed over, which depends on the text before
its token and never on the token. A token that no rounding lets through is outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.certify.sampling import plain_logits
from truedraft.core.params import SamplingParams
from truedraft.core.shaping import Shaping
from truedraft.models.base import LanguageModel
from truedraft.peers import Question, Reply

_NUCLEUS = 1e-6
"""How far a sum of float64 probabilities that came from float32 logits may be off."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """How far a sound engine's log-probabilities may lie from the judge's.

    Attributes:
        log_ratio: most of |log p' - log p| at temperature 1, for each token.
        told: in words, where it comes from.
    """

    log_ratio: float
    told: str

    def at(self, temperature: float) -> float:
        """The same for distributions at a temperature, which divides logits; greedy compares them as they are."""
        return self.log_ratio / temperature if temperature > 0.0 else self.log_ratio


@dataclass(frozen=True, slots=True)
class Law:
    """The target's distributions at the tokens of one answer.

    Attributes:
        question: what was asked.
        tokens: of the answer, an end of text included; several ids that end a text count as the first of them.
        logits: `[tokens, vocab]`, float64: after penalties and biases, before temperature and filters.
        probs: `[tokens, vocab]`, float64: what each token should have been drawn from.
        sure: `[tokens]`, bool: whether no rounding within the allowance moves a filter's cut.
        outside: `[tokens]`, bool: whether the token lies where no such rounding lets it through.
        slack: the allowance at the request's temperature.
    """

    question: Question
    tokens: Sequence[int]
    logits: Tensor
    probs: Tensor
    sure: Tensor
    outside: Tensor
    slack: float

    @property
    def text(self) -> list[int]:
        """Prompt and answer."""
        return [*self.question.prompt, *self.tokens]

    def under(self, params: SamplingParams, filters: Sequence[str]) -> Tensor:
        """The distributions that other options, or another order of filters, would make: `[tokens, vocab]`."""
        return filtered(self.logits, params, filters, 0.0)[0]


class Judge:
    """Scores answers under a target's own forward, each token at its own prefix.

    Args:
        target: the model that the engine is said to run.
        filters: the order in which the engine makes a distribution, as `PeerFacts.filters`.
        allowance: for rounding.
    """

    def __init__(self, target: LanguageModel, filters: Sequence[str], allowance: Allowance) -> None:
        self.target = target
        self.filters = tuple(filters)
        self.allowance = allowance

    def laws(self, answered: Sequence[tuple[Question, Reply]]) -> list[Law]:
        """One for each answer; those of equal length share forwards.

        Raises:
            TruedraftError: the target failed.
        """
        ended = [(question, ended_tokens(self.target, question, reply)) for question, reply in answered]
        rows = iter(plain_logits(self.target, [(question.prompt, tokens) for question, tokens in ended if tokens]))
        return [self._law(question, tokens, next(rows)) for question, tokens in ended if tokens]

    def _law(self, question: Question, tokens: Sequence[int], logits: Tensor) -> Law:
        params, ends = question.params, list(self.target.eos_token_ids)
        shaping = Shaping(params, question.prompt, len(question.prompt), ends, (), self.target.vocab_size)
        shaped = shaping.of_paths(logits, [tokens[:place] for place in range(len(tokens))]).double()
        slack = self.allowance.at(params.temperature)
        probs, sure, within = filtered(shaped, params, self.filters, self.allowance.log_ratio)
        own = within.gather(-1, torch.tensor(list(tokens))[:, None])[:, 0]
        if ends[1:]:
            probs = probs.clone()
            probs[:, ends[0]] += probs[:, ends[1:]].sum(dim=-1)
            probs[:, ends[1:]] = 0.0
            whole = within[:, ends].any(dim=-1)
            own = torch.where(torch.tensor([token == ends[0] for token in tokens]), whole, own)
        return Law(question, tokens, shaped, probs, sure, ~own, slack)


def ended_tokens(target: LanguageModel, question: Question, reply: Reply) -> list[int]:
    """The tokens of an answer that the target's distribution decided: with the end of text, without what is behind it.

    An answer that stopped by itself drew an end of text. Where stop texts were asked for it may have stopped by these,
    so none is counted.
    """
    ends, tokens = list(target.eos_token_ids), list(reply.token_ids)
    first = next((place for place, token in enumerate(tokens) if token in ends), None)
    if first is not None:
        return [*tokens[:first], ends[0]]
    params = question.params
    by_itself = reply.finish_reason == "stop" and not params.stop and not params.stop_token_ids
    return [*tokens, ends[0]] if by_itself and ends and len(tokens) < params.max_tokens else tokens


# ---------------------------------------------------------------------------------------- distributions and their edges


def filtered(
    logits: Tensor, params: SamplingParams, filters: Sequence[str], log_ratio: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Distributions made by filters in an order, and where rounding might have cut otherwise.

    Args:
        logits: `[rows, vocab]`, float64.
        params: temperature, top-k, top-p and min-p; greedy takes the likeliest token, ties to the lowest id.
        filters: names of `FILTERS`, in their order; those missing are not applied.
        log_ratio: how far each log-probability may be off at temperature 1.

    Returns:
        Distributions `[rows, vocab]`; for each row whether no filter's edge is in doubt, bool `[rows]`; and which
        tokens some rounding within `log_ratio` may let through, bool `[rows, vocab]`.
    """
    if params.greedy:
        best = logits.amax(dim=-1, keepdim=True)
        near = logits >= best - 2.0 * log_ratio
        probs = torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
        return probs, near.sum(dim=-1) == 1, near
    scores, off = logits, log_ratio
    sure = torch.ones(len(logits), dtype=torch.bool)
    within = torch.isfinite(logits)
    for name in filters:
        if name == "temperature":
            scores, off = scores / params.temperature, off / params.temperature
            continue
        edge = _EDGES[name](scores, params, off)
        if edge is not None:
            kept, may, certain = edge
            sure, within = sure & certain, within & may
            scores = scores.masked_fill(~kept, -math.inf)
    return torch.softmax(scores, dim=-1), sure, within


_Edge = tuple[Tensor, Tensor, Tensor]
"""Which tokens are kept, which may be, and for each row whether that is the same."""


def _top_k(scores: Tensor, params: SamplingParams, off: float) -> _Edge | None:
    if not 0 < params.top_k < scores.shape[-1]:
        return None
    least = scores.topk(params.top_k, dim=-1).values[:, -1:]
    kept, may = scores >= least, scores >= least - 2.0 * off
    # Which of equals stay is the engine's own affair.
    return kept, may, may.sum(dim=-1) == params.top_k


def _top_p(scores: Tensor, params: SamplingParams, off: float) -> _Edge | None:
    """A token is kept where the mass before it is less than p.

    At the least that is the mass of tokens that are likelier by more than rounding, at the most that of all that may
    be; and where each probability may be off by a factor of e^d, so may a mass's odds by e^2d.
    """
    if params.top_p >= 1.0:
        return None
    p, factor = params.top_p, math.exp(2.0 * off)
    ordered, order = torch.softmax(scores, dim=-1).sort(dim=-1, descending=True, stable=True)
    sums = torch.nn.functional.pad(ordered.cumsum(dim=-1), (1, 0))
    rising = -ordered  # which `searchsorted` needs
    least = sums.gather(-1, torch.searchsorted(rising, rising * factor))
    most = sums.gather(-1, torch.searchsorted(rising, rising / factor, right=True)) - ordered
    may = least / (least + (1.0 - least).clamp_min(0.0) * factor) < p + _NUCLEUS
    surely = most / (most + (1.0 - most).clamp_min(0.0) / factor) < p - _NUCLEUS
    surely[:, 0] |= ordered[:, 0] > factor * ordered[:, 1]  # nothing comes before it
    certain = ((may == surely) | (ordered == 0.0)).all(dim=-1)
    unsort = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1]).expand_as(order))
    kept = sums[:, :-1] < p
    return kept.gather(-1, unsort), may.gather(-1, unsort), certain


def _min_p(scores: Tensor, params: SamplingParams, off: float) -> _Edge | None:
    if params.min_p <= 0.0:
        return None
    least = scores.amax(dim=-1, keepdim=True) + math.log(params.min_p)
    kept, may, surely = scores >= least, scores >= least - 2.0 * off, scores >= least + 2.0 * off
    surely |= scores == scores.amax(dim=-1, keepdim=True)
    return kept, may, (may == surely).all(dim=-1)


_EDGES = {"top_k": _top_k, "top_p": _top_p, "min_p": _min_p}


# ---------------------------------------------------------------------------------------- how far rounding reaches


def measured_allowance(
    judge: LanguageModel,
    rounded: LanguageModel | None,
    answered: Sequence[tuple[Question, Reply]],
) -> tuple[Allowance, Tensor | None]:
    """How far an engine's kernels may put log-probabilities off, from a few answers.

    Where the engine tells log-probabilities of its tokens, one and a half times what 99 % of them differ by from the
    judge's. Where that is more than four times what rounding the same weights to `rounded`'s dtype does it is no
    rounding, and where the engine tells none nothing is known: then one and a half times that of `rounded`.

    Args:
        judge: the target, in the dtype that judges.
        rounded: the same weights as coarse as the engine may hold them; None where there is none, then what the engine
            tells is taken up to a hundredth.
        answered: greedy answers, or sampled ones, with raw log-probabilities if the engine tells them.

    Returns:
        The allowance, and the differences of told log-probabilities `[tokens]`, ours taken off; None without any.
    """
    texts = [(question.prompt, reply.token_ids) for question, reply in answered if reply.token_ids]
    own = _log_probs(judge, texts)
    coarse = None if rounded is None else max(_FINEST, _most((_log_probs(rounded, texts) - own).abs()))
    told = [reply.logprobs for _, reply in answered if reply.token_ids]
    if told and all(values is not None for values in told):
        differences = torch.tensor([value for values in told for value in values or ()], dtype=torch.float64) - own
        limit = _UNMEASURED if coarse is None else _LEEWAY * coarse
        seen = _most(differences.abs())
        words = f"{_MARGIN:g} times {seen:.2g}, by which the engine's own log-probabilities differ"
        if seen > limit:  # what is no rounding allows for nothing
            seen = limit if coarse is None else coarse
            words = f"{_MARGIN:g} times {seen:.2g}; its own log-probabilities differ by more than rounding does"
        return Allowance(_MARGIN * seen, words), differences
    if coarse is None:
        return Allowance(_MARGIN * _UNMEASURED, f"{_MARGIN:g} times {_UNMEASURED:g}, as nothing was measured"), None
    return Allowance(_MARGIN * coarse, f"{_MARGIN:g} times {coarse:.2g}, which a coarser dtype makes"), None


def _log_probs(model: LanguageModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """The logarithms of probability that a model gives to the tokens behind prompts, one text after another."""
    found = [
        torch.log_softmax(rows.double(), dim=-1).gather(-1, torch.tensor(list(tokens))[:, None])[:, 0]
        for rows, (_, tokens) in zip(plain_logits(model, texts), texts, strict=True)
    ]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.float64)


_MARGIN = 1.5
_UNMEASURED = 0.01
_FINEST = 1e-4
"""What other kernels may do in float32."""
_LEEWAY = 4.0
_QUANTILE = 0.99


def _most(differences: Tensor) -> float:
    """What 99 % of them do not exceed."""
    return float(differences.quantile(_QUANTILE)) if len(differences) else 0.0
