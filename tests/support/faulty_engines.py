"""Engines with planted faults of known size, and sound ones: what a certificate of engines must tell apart.

Each is truedraft's own engine over the embedded models, with chains of four drafted tokens, but for one thing. What
that does to the distribution of each emitted token is worked out from the known stack at the engine's own texts: see
`Seen` and `Planted.law`.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from support.embedded_models import embedded
from support.faulty_parts import (
    cuts_unlikely_draws,
    draws_by_gumbel,
    draws_in_bfloat16,
    keeps_rejected,
    llama_cpp_filters,
    nucleus_off_by_one,
    recovers_by_the_same_noise,
    replaced_probs,
)
from truedraft import SamplingParams
from truedraft.certify import faults
from truedraft.certify.checks import Stack
from truedraft.certify.sampling import Scored, plain_logits, plain_probs, scored_answers
from truedraft.core.probs import probs_from_logits, total_variation
from truedraft.drafters import Cascade, DraftModel, NoDrafter, PromptLookup
from truedraft.engine.policy import Budget, FixedBudget
from truedraft.measure.peers.asking import FILTERS
from truedraft.models.base import LanguageModel
from truedraft.models.embedded import heldout_prompts_file
from truedraft.testing import scaled
from truedraft.verification import Rule, SpeculativeSampling

LENGTH = 4
"""Of a chain of drafted tokens."""
LEAST = 0.06
"""The mean total variation of a planted fault over emitted tokens, at least."""
EDGE = 0.01
"""A token at the edge of top-p counts from so much mass on."""
_FLAT = 0.2
_CUT_BELOW = 0.15
_BEGINNING = 16


@dataclass(frozen=True, slots=True)
class Models:
    """What engines are made of, loaded once."""

    target: LanguageModel
    draft: LanguageModel


@functools.cache
def embedded_models(dtype: str = "float32") -> Models:
    """The embedded pair."""
    return Models(embedded(dtype=dtype), embedded("draft", dtype=dtype))


@functools.cache
def beginnings(count: int = 32) -> tuple[tuple[int, ...], ...]:
    """Prompts: the first tokens of held-out files."""
    tokenizer = embedded_models().target.tokenizer
    assert tokenizer is not None
    texts = [json.loads(line)["text"] for line in heldout_prompts_file().read_text().splitlines()[:count]]
    return tuple(tuple(tokenizer.encode(text)[:_BEGINNING]) for text in texts)


@dataclass(frozen=True, slots=True)
class Seen:
    """Emitted tokens, and all that was known before each of them.

    Attributes:
        p: `[tokens, vocab]`: what a sound engine draws from there.
        q: `[tokens, vocab]`: what the draft was drawn from, or would have been; one-hot at a deterministic candidate.
        used: `[tokens, vocab]`: what the engine made for its rule; p where greedy requests need none.
        tokens: `[tokens]`.
        judged: `[tokens]`: whether a draft was judged there.
        opened: `[tokens]`: whether one was drawn there, be it shown or not.
    """

    p: Tensor
    q: Tensor
    used: Tensor
    tokens: Tensor
    judged: Tensor
    opened: Tensor

    @classmethod
    def of(cls, scored: Scored, p: Tensor, q: Tensor) -> Seen:
        """Those of an answer; `p` and `q` `[tokens, vocab]` come from plain forwards."""
        drawn = [each.q is not None or bool(each.candidates) for each in scored.decisions]
        count = len(scored.tokens)
        # No draft is drawn for the first token, at the end of a whole chain, and little of one at the end of an answer.
        opened = [
            own or (0 < place < count - LENGTH - 1 and decision.depth < LENGTH)
            for place, (own, decision) in enumerate(zip(drawn, scored.decisions, strict=True))
        ]
        q = q.clone()
        for place, decision in enumerate(scored.decisions):
            if decision.candidates:
                q[place] = torch.nn.functional.one_hot(torch.tensor(decision.candidates[0]), q.shape[-1])
        used = [p[i] if each.used is None else each.used for i, each in enumerate(scored.decisions)]
        return cls(p, q, torch.stack(used), torch.tensor(scored.tokens), torch.tensor(drawn), torch.tensor(opened))

    @classmethod
    def together(cls, parts: Sequence[Seen]) -> Seen:
        """Those of several answers."""
        return cls(*(torch.cat([getattr(part, each.name) for part in parts]) for each in fields(cls)))


Law = Callable[[Seen, SamplingParams], Tensor]
"""The distributions that tokens were emitted from, `[tokens, vocab]`, under the options that were asked for."""


def _judged(seen: Seen, law: Tensor) -> Tensor:
    return seen.judged


def _all(seen: Seen, law: Tensor) -> Tensor:
    return torch.ones_like(seen.judged)


@dataclass(frozen=True, slots=True)
class Planted:
    """An engine of truedraft's with one thing changed, or none.

    Attributes:
        name: what is changed.
        params: sampling options at which it shows.
        parts: target, drafter and rule for requests of given options.
        law: what it emits; None where what is wrong is no distribution of tokens.
        touches: of tokens and their laws, which the fault can put off, `[tokens]`.
        asked: the options that the engine really works with.
        draft: the draft model that it draws with.
        filters: the order in which it makes distributions.
        ends: where stop texts are looked for: "right", behind every token; behind the last token of a step alone, so
            that an answer goes "past" one inside of a step; or there, in all that was written, so that it ends "late".
    """

    name: str
    params: SamplingParams
    parts: Callable[[Models, SamplingParams], Stack]
    law: Law | None = None
    touches: Callable[[Seen, Tensor], Tensor] = _judged
    asked: Callable[[SamplingParams], SamplingParams] = lambda params: params
    draft: Callable[[Models], LanguageModel] = lambda models: models.draft
    filters: tuple[str, ...] = FILTERS
    ends: str = "right"

    def seen(self, models: Models, rounds: int = 1, length: int = 24) -> Seen:
        """Let it answer the beginnings of files, and gather what was known of each token.

        Args:
            models: the sound ones.
            rounds: how often each, by other seeds.
            length: tokens of an answer.
        """
        asked, prompts = self.asked(self.params), beginnings()
        stack = self.parts(models, self.params)
        batches = scored_answers(
            stack, prompts, asked, len(prompts), judge=models.target, records_probs=True, length=length
        )
        found = []
        for batch in itertools.islice(batches, rounds):
            texts = [(scored.before, scored.tokens) for scored in batch]
            p = [self.right(logits) for logits in plain_logits(models.target, texts)]
            q = plain_probs(self.draft(models), texts, asked)
            found += [Seen.of(*each) for each in zip(batch, p, q, strict=True)]
        return Seen.together(found)

    def right(self, logits: Tensor) -> Tensor:
        """The distributions `[tokens, vocab]` that a sound engine of this order of filters makes of logits."""
        if self.filters == FILTERS:
            return probs_from_logits(logits, self.params)
        return llama_cpp_filters(probs_from_logits(logits, SamplingParams(temperature=1.0)), self.params)


@dataclass(frozen=True, slots=True)
class Size:
    """How large a fault is, computed.

    Attributes:
        tokens: of a sample of answers.
        touched: the share of them that the fault can put off.
        over_touched: the mean total variation of these tokens' distributions against the target's.
        over_all: of all tokens.
    """

    tokens: int
    touched: float
    over_touched: float
    over_all: float

    @classmethod
    def of(cls, planted: Planted, seen: Seen, law: Tensor) -> Size:
        """That of a fault whose law `[tokens, vocab]` is known."""
        off, touched = total_variation(law, seen.p), planted.touches(seen, law)
        return cls(len(off), float(touched.float().mean()), float(off[touched].mean()), float(off.mean()))


def _chain(models: Models, draft: LanguageModel | None = None) -> Stack:
    drafter = DraftModel(models.draft if draft is None else draft, num_speculative_tokens=LENGTH)
    return Stack(
        models.target,
        drafter,
        SpeculativeSampling(),
        controller=FixedBudget(Budget(depth=LENGTH, width=1, nodes=LENGTH)),
    )


def _at_judged(form: Callable[[Tensor, Tensor], Tensor]) -> Law:
    """The law of a fault that shows where a draft is judged, from p and q there."""

    def law(seen: Seen, params: SamplingParams) -> Tensor:
        found = seen.p.clone()
        found[seen.judged] = form(seen.p[seen.judged], seen.q[seen.judged])
        return found

    return law


def _used(seen: Seen, params: SamplingParams) -> Tensor:
    """Of a rule that is lossless against what it is given."""
    return seen.used


def _right(seen: Seen, params: SamplingParams) -> Tensor:
    return seen.p


# ------------------------------------------------------------------------------------------------ faults


def _with(**changes: Callable[[Any, SamplingParams], Any]) -> Callable[[Models, SamplingParams], Stack]:
    """The chain, some of whose parts are made of what they were and of options."""

    def parts(models: Models, params: SamplingParams) -> Stack:
        stack = _chain(models)
        return stack.but(**{name: change(getattr(stack, name), params) for name, change in changes.items()})

    return parts


def _shared(models: Models, params: SamplingParams) -> Stack:
    stack = _chain(models, _flat_draft(models))
    return stack.but(drafter=draws_by_gumbel(stack.drafter), rule=recovers_by_the_same_noise(stack.rule))


def _flat_draft(models: Models) -> LanguageModel:
    return scaled(models.draft, _FLAT)  # far from the target: what is shared shows after rejections alone


def _sharper(seen: Seen, params: SamplingParams) -> Tensor:
    """Of a temperature T that is applied twice, without filters: p^(1 / T), scaled to 1."""
    sharp = seen.p.pow(1.0 / params.temperature)
    return sharp / sharp.sum(dim=-1, keepdim=True)


def _likeliest(seen: Seen, params: SamplingParams) -> Tensor:
    return torch.nn.functional.one_hot(seen.p.argmax(dim=-1), seen.p.shape[-1]).to(seen.p)


def _off_by_one(name: str, more: int) -> Planted:
    def cut(rule: Rule, params: SamplingParams) -> Rule:
        return replaced_probs(rule, lambda p: nucleus_off_by_one(p, params.top_p, more))

    def law(seen: Seen, params: SamplingParams) -> Tensor:
        return nucleus_off_by_one(seen.used, params.top_p, more)  # the engine made no nucleus

    def touches(seen: Seen, law: Tensor) -> Tensor:
        return total_variation(law, seen.p) >= EDGE

    return Planted(name, _NUCLEUS, _with(rule=cut), law, touches, lambda params: replace(params, top_p=1.0))


def _emitted_by_cutting(seen: Seen, params: SamplingParams) -> Tensor:
    return torch.where(seen.opened[:, None], faults.dropped_below(_CUT_BELOW).emitted(seen.p, seen.q), seen.p)


def _stale(name: str, break_it: Callable[[LanguageModel], LanguageModel]) -> Planted:
    return Planted(name, _WARM, _with(target=lambda target, _: break_it(target)), _used, _all)


def _judges_at_one(rule: Rule, params: SamplingParams) -> Rule:
    return faults.judges_another_temperature(rule, 1.0 / (params.temperature or 1.0))  # 0 is greedy


def _emitted_judged_at_one(seen: Seen, params: SamplingParams) -> Tensor:
    return _at_judged(faults.draft_judged_at(1.0 / params.temperature).emitted)(seen, params)


def _accepts_ngrams(models: Models, params: SamplingParams) -> Stack:
    stack = _lookup(models)
    return stack.but(rule=faults.accepts_always(stack.rule))


def _draft(models: Models, params: SamplingParams) -> Stack:
    return _chain(models)


_WARM = SamplingParams(temperature=1.0)
_COOL = SamplingParams(temperature=0.7)
_NUCLEUS = SamplingParams(temperature=1.0, top_p=0.5)
_STOP = SamplingParams(temperature=0.7, stop=("\n",), max_tokens=48)
_RESIDUAL_IS_P = _with(rule=lambda rule, _: faults.residual_is_target(rule))
_CUTS = _with(drafter=lambda drafter, _: cuts_unlikely_draws(drafter, _CUT_BELOW))
_IN_BFLOAT16 = _with(drafter=lambda drafter, _: draws_in_bfloat16(drafter))

FAULTS = (
    Planted(
        "shared noise",
        SamplingParams(temperature=5.0, top_p=0.2),
        _shared,
        _at_judged(faults.ONE_GUMBEL.emitted),
        draft=_flat_draft,
    ),
    Planted(
        "temperature twice",
        _COOL,
        _draft,
        _sharper,
        _all,
        lambda params: replace(params, temperature=params.temperature**2),
    ),
    Planted("greedy above 0", _COOL, _draft, _likeliest, _all, lambda params: replace(params, temperature=0.0)),
    _off_by_one("top-p keeps one too many", 1),
    _off_by_one("top-p drops the crossing one", -1),
    Planted("residual replaced by p", _WARM, _RESIDUAL_IS_P, _at_judged(faults.RESIDUAL_IS_P.emitted)),
    Planted("cut by its own probability", _WARM, _CUTS, _emitted_by_cutting, lambda seen, law: seen.opened),
    _stale("stale state keeps a rejected token", keeps_rejected),
    _stale("stale state loses an accepted token", faults.loses_last_accepted),
    Planted("stop inside a block is ignored", _STOP, _draft, ends="past"),
    Planted("stop inside a block ends it late", _STOP, _draft, ends="late"),
    Planted("drawn in bfloat16, judged in float32", _WARM, _IN_BFLOAT16, _at_judged(faults.IN_BFLOAT16.emitted)),
    Planted(
        "q judged at temperature 1", SamplingParams(temperature=0.5), _with(rule=_judges_at_one), _emitted_judged_at_one
    ),
    Planted("n-gram candidates always accepted", _WARM, _accepts_ngrams, _at_judged(faults.KEEPS_ALL.emitted)),
)
"""The eight that are asked for, two of them in two ways, and behind them three that public threads name."""

# ------------------------------------------------------------------------------------------------ sound ones


def _sound(name: str, parts: Callable[[Models], Stack], params: SamplingParams = _WARM) -> Planted:
    return Planted(name, params, lambda models, _: parts(models), _right)


def _plain(models: Models) -> Stack:
    return _chain(models).but(drafter=NoDrafter(), controller=None)


def _lookup(models: Models) -> Stack:
    return _chain(models).but(drafter=PromptLookup(num_speculative_tokens=LENGTH, min_ngram=1))


def _tree(models: Models) -> Stack:
    drafter = DraftModel(models.draft, branching=(3, 2, 1))
    return _chain(models).but(drafter=drafter, controller=FixedBudget(drafter.limits))


def _cascade(models: Models) -> Stack:
    drafter = Cascade(PromptLookup(), DraftModel(models.draft, num_speculative_tokens=LENGTH))
    return _chain(models).but(drafter=drafter, controller=FixedBudget(drafter.limits))


def _in_order_of_llama_cpp(rule: Rule, params: SamplingParams) -> Rule:
    return replaced_probs(rule, lambda p: llama_cpp_filters(p, params))


SOUND = (
    _sound("plain", _plain),
    _sound("draft", _chain),
    _sound("draft at 0.7, top-p 0.9", _chain, SamplingParams(temperature=0.7, top_p=0.9)),
    _sound("prompt lookup", _lookup),
    _sound("tree", _tree),
    _sound("cascade", _cascade),
    _sound("bfloat16", lambda models: _chain(embedded_models("bfloat16"))),
    Planted(
        "filters in llama.cpp's order",
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05),
        _with(rule=_in_order_of_llama_cpp),
        _right,
        asked=lambda params: replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
        filters=("top_k", "top_p", "min_p", "temperature"),
    ),
)


def named(name: str) -> Planted:
    """One of them.

    Raises:
        KeyError: there is none.
    """
    return {each.name: each for each in (*FAULTS, *SOUND)}[name]
