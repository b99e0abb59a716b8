"""What a target says of each token of an engine's answer, under the request's options, and how far rounding reaches.

Another engine's kernels round otherwise than ours, so its probability of a token may differ from ours by a factor: each
engine whose log-probabilities lie within an allowance of ours is sound. Filters cut where a sum or a rank crosses a
bound, and there rounding decides: a token that may lie on either side is doubtful. Nothing is asked of doubtful tokens,
and whether one keeps those of mass a or not moves the others by a factor of 1 / (1 - a) at most. All of that depends on
the text before a token and never on the token. A token that no rounding lets through is outside.
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
        doubtful: `[tokens, vocab]`, bool: tokens that rounding within the allowance may keep or not.
        outside: `[tokens]`, bool: whether the token lies where no such rounding lets it through.
        slack: `[tokens]`: how far the log-probability of a token that is not doubtful may be off; infinite where
            nothing can be said.
    """

    question: Question
    tokens: Sequence[int]
    logits: Tensor
    probs: Tensor
    doubtful: Tensor
    outside: Tensor
    slack: Tensor

    @property
    def sure(self) -> Tensor:
        """Rows without a doubtful token of which something can be said, `[tokens]`, bool."""
        return ~self.doubtful.any(dim=-1) & self.slack.isfinite()

    @property
    def text(self) -> list[int]:
        """Prompt and answer."""
        return [*self.question.prompt, *self.tokens]

    def under(self, params: SamplingParams, filters: Sequence[str]) -> Tensor:
        """The distributions that other options, or another order of filters, would make: `[tokens, vocab]`."""
        return filtered(self.logits, params, filters, 0.0).probs


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
        found = filtered(shaped, params, self.filters, self.allowance.log_ratio)
        probs, doubtful, within = found.probs, found.doubtful, found.within
        if ends[1:]:
            probs, doubtful, within = probs.clone(), doubtful.clone(), within.clone()
            probs[:, ends[0]] += probs[:, ends[1:]].sum(dim=-1)
            probs[:, ends[1:]] = 0.0
            for each in (doubtful, within):
                each[:, ends[0]] = each[:, ends].any(dim=-1)
        outside = ~within.gather(-1, torch.tensor(list(tokens))[:, None])[:, 0]
        return Law(question, tokens, shaped, probs, doubtful, outside, found.slack)


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


@dataclass(frozen=True, slots=True)
class Filtered:
    """What filters make of logits.

    Attributes:
        probs: `[rows, vocab]`.
        doubtful: `[rows, vocab]`, bool: tokens that rounding may keep or not.
        within: `[rows, vocab]`, bool: tokens that some rounding keeps.
        slack: `[rows]`: how far log-probabilities of the tokens that are not doubtful may be off.
    """

    probs: Tensor
    doubtful: Tensor
    within: Tensor
    slack: Tensor


def filtered(logits: Tensor, params: SamplingParams, filters: Sequence[str], log_ratio: float) -> Filtered:
    """Distributions made by filters in an order, and where rounding might have cut otherwise.

    Args:
        logits: `[rows, vocab]`, float64.
        params: temperature, top-k, top-p and min-p; greedy takes the likeliest token, ties to the lowest id.
        filters: names of `FILTERS`, in their order; those missing are not applied.
        log_ratio: how far each log-probability may be off at temperature 1.
    """
    if params.greedy:
        return _greedy(logits, log_ratio)
    scores, off = logits, log_ratio
    within = torch.isfinite(logits)
    surely = within.clone()
    lost = torch.zeros(len(logits), dtype=torch.bool)
    for name in filters:
        if name == "temperature":
            scores, off = scores / params.temperature, off / params.temperature
            continue
        edge = _EDGES[name](scores, params, off)
        if edge is not None:
            kept, may, must = edge
            lost |= (within & ~surely).any(dim=-1)  # what this filter sees hangs on an earlier doubt
            within, surely = within & may, surely & must
            scores = scores.masked_fill(~kept, -math.inf)
    # Behind an earlier doubt a filter may have looked at other tokens than ours did: none is surely forbidden there.
    within = within | (lost[:, None] & torch.isfinite(logits))
    doubtful = within & ~surely
    return Filtered(
        torch.softmax(scores, dim=-1), doubtful, within, _slack(logits, params, doubtful, within, off, lost)
    )


def _greedy(logits: Tensor, log_ratio: float) -> Filtered:
    near = logits >= logits.amax(dim=-1, keepdim=True) - 2.0 * log_ratio
    tied = near.sum(dim=-1) > 1
    probs = torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    slack = torch.where(tied, math.inf, log_ratio).double()
    return Filtered(probs, near & tied[:, None], near, slack)


def _slack(
    logits: Tensor, params: SamplingParams, doubtful: Tensor, within: Tensor, off: float, lost: Tensor
) -> Tensor:
    """How far the tokens that are not doubtful may be off, `[rows]`.

    With all doubtful tokens kept they have the mass 1 - a, with none of them 1.
    """
    whole = torch.softmax((logits / params.temperature).masked_fill(~within, -math.inf), dim=-1)
    # Rounding may make the doubtful ones heavier.
    a = 1.0 - 1.0 / (1.0 + (whole * doubtful).sum(dim=-1) / (whole * ~doubtful).sum(dim=-1) * math.exp(2.0 * off))
    return torch.where(lost | (a > _MOST_DOUBT), math.inf, off - torch.log1p(-a.clamp_max(_MOST_DOUBT)))


_MOST_DOUBT = 0.5
_Edge = tuple[Tensor, Tensor, Tensor]
"""Which tokens are kept, which may be, and which surely are."""


def _top_k(scores: Tensor, params: SamplingParams, off: float) -> _Edge | None:
    if not 0 < params.top_k < scores.shape[-1]:
        return None
    best = scores.topk(params.top_k + 1, dim=-1).values
    least, following = best[:, -2:-1], best[:, -1:]
    # Which of equals stay is the engine's own affair.
    return scores >= least, scores >= least - 2.0 * off, scores > following + 2.0 * off


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
    unsort = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1]).expand_as(order))
    kept = sums[:, :-1] < p
    return kept.gather(-1, unsort), may.gather(-1, unsort), surely.gather(-1, unsort)


def _min_p(scores: Tensor, params: SamplingParams, off: float) -> _Edge | None:
    if params.min_p <= 0.0:
        return None
    best = scores.amax(dim=-1, keepdim=True)
    least = best + math.log(params.min_p)
    return scores >= least, scores >= least - 2.0 * off, (scores >= least + 2.0 * off) | (scores == best)


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
