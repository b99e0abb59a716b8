"""Engines with planted faults of known size, and sound ones: what a certificate of engines must tell apart.

Each is truedraft's own engine over the embedded models, with chains of four drafted tokens, but for one thing. What
that does to the distribution of each emitted token is worked out from the known stack at the engine's own texts: see
`Seen` and `Planted.law`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from support.faulty_parts import (
    cuts_unlikely_draws,
    draws_by_gumbel,
    draws_in_bfloat16,
    emitted_by_bfloat16,
    emitted_by_cutting,
    emitted_by_shared_noise,
    emitted_judged_at_one,
    judges_at_one,
    keeps_rejected,
    llama_cpp_filters,
    loses_accepted,
    nucleus_off_by_one,
    recovers_by_the_same_noise,
    replaced_probs,
)
from truedraft import SamplingParams, load_model
from truedraft.certify import faults
from truedraft.certify.checks import Stack
from truedraft.certify.sampling import plain_logits, plain_probs, scored_answers
from truedraft.control import Budget, FixedBudget
from truedraft.core.probs import probs_from_logits, total_variation
from truedraft.drafters import Cascade, DraftModel, NoDrafter, PromptLookup
from truedraft.embedded import heldout_prompts_file
from truedraft.models.base import LanguageModel
from truedraft.peers.asking import FILTERS
from truedraft.testing import scaled
from truedraft.verification import SpeculativeSampling

LENGTH = 4
"""Of a chain of drafted tokens."""
LEAST = 0.06
"""The mean total variation of a planted fault over emitted tokens, at least."""
EDGE = 0.01
"""A token at the edge of top-p counts from so much mass on."""
_FLAT = 0.3
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
    return Models(load_model("embedded:target", dtype=dtype), load_model("embedded:draft", dtype=dtype))


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
        p: `[tokens, vocab]`: the target's distribution there, as the request asks for it.
        q: `[tokens, vocab]`: the draft's, as it draws.
        used: `[tokens, vocab]`: what the rule was given for the target's.
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


Law = Callable[[Seen], Tensor]
"""The distributions that tokens were emitted from, `[tokens, vocab]`."""


@dataclass(frozen=True, slots=True)
class Planted:
    """An engine of truedraft's with one thing changed, or none.

    Attributes:
        name: what is changed.
        params: sampling options at which it shows.
        parts: target, drafter and rule for requests of given options.
        law: what it emits, at tokens of the target's distribution where it does not touch them; None where what is
            wrong is no distribution of tokens.
        touches: tokens that the fault can put off, `[tokens]`.
        asked: the options that the engine really works with.
        draft: the draft model that it draws with, of which `Seen.q` is.
        filters: the order in which it makes distributions.
        ends: how an answer's end is found: see `STOPS`.
    """

    name: str
    params: SamplingParams
    parts: Callable[[Models, SamplingParams], Stack]
    law: Law | None = None
    touches: Callable[[Seen], Tensor] = lambda seen: seen.judged
    asked: Callable[[SamplingParams], SamplingParams] = lambda params: params
    draft: Callable[[Models], LanguageModel] = lambda models: models.draft
    filters: tuple[str, ...] = FILTERS
    ends: str = "right"

    def seen(
        self,
        models: Models,
        answers: int = 32,
        length: int = 24,
        *,
        first_seed: int = 0,
        params: SamplingParams | None = None,
    ) -> Seen:
        """Let it answer the beginnings of files, and gather what was known of each token.

        Args:
            models: the sound ones.
            answers: how many, in batches of 32.
            length: tokens of each.
            first_seed: of the first answer.
            params: other options than its own.
        """
        wanted = params or self.params
        asked = self.asked(wanted)
        rows: list[Seen] = []
        stack = self.parts(models, wanted)
        prompts = beginnings()
        batches = scored_answers(
            stack,
            prompts,
            asked,
            len(prompts),
            judge=models.target,
            first_seed=first_seed,
            records_probs=True,
            length=length,
        )
        for _, batch in zip(range(-(-answers // len(prompts))), batches, strict=False):
            texts = [(scored.before, list(scored.tokens)) for scored in batch]
            p = [self._right(logits, wanted) for logits in plain_logits(models.target, texts)]
            q = plain_probs(self.draft(models), texts, asked)
            for scored, own_p, own_q in zip(batch, p, q, strict=True):
                judged = torch.tensor([each.q is not None or bool(each.candidates) for each in scored.decisions])
                place = torch.arange(len(scored.tokens))
                depth = torch.tensor([each.depth for each in scored.decisions])
                room = (place > 0) & (depth < LENGTH) & (place < len(scored.tokens) - LENGTH - 1)
                used = torch.stack(
                    [p_ if (p_ := each.used) is not None else torch.zeros_like(own_p[0]) for each in scored.decisions]
                )
                rows.append(Seen(own_p, own_q, used, torch.tensor(list(scored.tokens)), judged, judged | room))
        return Seen(*(torch.cat([getattr(row, name) for row in rows]) for name in Seen.__slots__))

    def _right(self, logits: Tensor, params: SamplingParams) -> Tensor:
        """The distributions `[tokens, vocab]` that a sound engine of this order of filters makes of logits."""
        if self.filters == FILTERS:
            return probs_from_logits(logits, params)
        return llama_cpp_filters(probs_from_logits(logits, SamplingParams(temperature=1.0)), params)


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

    def law(seen: Seen) -> Tensor:
        found = seen.p.clone()
        found[seen.judged] = form(seen.p[seen.judged], seen.q[seen.judged])
        return found

    return law


def _everywhere(seen: Seen) -> Tensor:
    return torch.ones_like(seen.judged)


def _shared(models: Models, params: SamplingParams) -> Stack:
    stack = _chain(models, scaled(models.draft, _FLAT))
    return stack.but(drafter=draws_by_gumbel(stack.drafter), rule=recovers_by_the_same_noise(stack.rule))


def _off_by_one(more: int) -> Callable[[Models, SamplingParams], Stack]:
    def parts(models: Models, params: SamplingParams) -> Stack:
        stack = _chain(models)
        return stack.but(rule=replaced_probs(stack.rule, lambda p: nucleus_off_by_one(p, params.top_p, more)))

    return parts


def _in_order_of_llama_cpp(models: Models, params: SamplingParams) -> Stack:
    stack = _chain(models)
    return stack.but(rule=replaced_probs(stack.rule, lambda p: llama_cpp_filters(p, params)))


def _lookup(models: Models) -> Stack:
    return _chain(models).but(drafter=PromptLookup(num_speculative_tokens=LENGTH, min_ngram=1))


def _sure(seen: Seen) -> Tensor:
    """Of candidates that are always accepted: the token itself."""
    found = seen.p.clone()
    found[seen.judged] = torch.nn.functional.one_hot(seen.tokens[seen.judged], seen.p.shape[-1]).to(found)
    return found


_WARM = SamplingParams(temperature=1.0)
_NUCLEUS = SamplingParams(temperature=1.0, top_p=0.6)
_UNFILTERED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_STOP = SamplingParams(temperature=0.7, stop=("\n",), max_tokens=48)

FAULTS = (
    Planted(
        "shared noise",
        SamplingParams(temperature=3.0, top_p=0.5),
        _shared,
        _at_judged(emitted_by_shared_noise),
        draft=lambda models: scaled(models.draft, _FLAT),
    ),
    Planted(
        "temperature twice",
        SamplingParams(temperature=0.7),
        lambda models, params: _chain(models),
        lambda seen: seen.used,
        _everywhere,
        asked=lambda params: replace(params, temperature=params.temperature**2),
    ),
    Planted(
        "greedy above 0",
        SamplingParams(temperature=0.7),
        lambda models, params: _chain(models),
        lambda seen: torch.nn.functional.one_hot(seen.tokens, seen.p.shape[-1]).to(seen.p),
        _everywhere,
        asked=lambda params: replace(params, temperature=0.0),
    ),
    Planted(
        "top-p keeps one too many",
        _NUCLEUS,
        _off_by_one(1),
        lambda seen: nucleus_off_by_one(seen.used, 0.6, 1),
        lambda seen: total_variation(nucleus_off_by_one(seen.used, 0.6, 1), seen.p) >= EDGE,
        asked=lambda params: replace(params, top_p=1.0),
    ),
    Planted(
        "top-p drops the crossing one",
        _NUCLEUS,
        _off_by_one(-1),
        lambda seen: nucleus_off_by_one(seen.used, 0.6, -1),
        lambda seen: total_variation(nucleus_off_by_one(seen.used, 0.6, -1), seen.p) >= EDGE,
        asked=lambda params: replace(params, top_p=1.0),
    ),
    Planted(
        "residual replaced by p",
        _WARM,
        lambda models, params: (stack := _chain(models)).but(rule=faults.residual_is_target(stack.rule)),
        _at_judged(faults.emitted_by_target_residual),
    ),
    Planted(
        "cut by its own probability",
        _WARM,
        lambda models, params: (stack := _chain(models)).but(drafter=cuts_unlikely_draws(stack.drafter, _CUT_BELOW)),
        lambda seen: torch.where(seen.opened[:, None], emitted_by_cutting(seen.p, seen.q, _CUT_BELOW), seen.p),
        lambda seen: seen.opened,
    ),
    Planted(
        "stale state keeps a rejected token",
        _WARM,
        lambda models, params: (stack := _chain(models)).but(target=keeps_rejected(stack.target)),
        lambda seen: seen.used,
        _everywhere,
    ),
    Planted(
        "stale state loses an accepted token",
        _WARM,
        lambda models, params: (stack := _chain(models)).but(target=loses_accepted(stack.target)),
        lambda seen: seen.used,
        _everywhere,
    ),
    Planted("stop inside a block is ignored", _STOP, lambda models, params: _chain(models), ends="past"),
    Planted("stop inside a block ends it late", _STOP, lambda models, params: _chain(models), ends="late"),
    Planted(
        "drawn in bfloat16, judged in float32",
        _WARM,
        lambda models, params: (stack := _chain(models)).but(drafter=draws_in_bfloat16(stack.drafter)),
        _at_judged(emitted_by_bfloat16),
    ),
    Planted(
        "q judged at temperature 1",
        SamplingParams(temperature=0.5),
        lambda models, params: (stack := _chain(models)).but(rule=judges_at_one(stack.rule, params.temperature)),
        _at_judged(lambda p, q: emitted_judged_at_one(p, q, 0.5)),
    ),
    Planted(
        "n-gram candidates always accepted",
        _WARM,
        lambda models, params: (stack := _lookup(models)).but(rule=faults.accepts_always(stack.rule)),
        _sure,
    ),
)
"""Each is one of the eight that are asked for, or one more that public threads name."""


def _right(seen: Seen) -> Tensor:
    return seen.p


def _sound(name: str, parts: Callable[[Models], Stack], params: SamplingParams = _WARM) -> Planted:
    return Planted(name, params, lambda models, _: parts(models), _right)


def _tree(models: Models) -> Stack:
    drafter = DraftModel(models.draft, branching=(3, 2, 1))
    return _chain(models).but(drafter=drafter, controller=FixedBudget(drafter.limits))


def _cascade(models: Models) -> Stack:
    drafter = Cascade(PromptLookup(), DraftModel(models.draft, num_speculative_tokens=LENGTH))
    return _chain(models).but(drafter=drafter, controller=FixedBudget(drafter.limits))


SOUND = (
    _sound("plain", lambda models: _chain(models).but(drafter=NoDrafter(), controller=None)),
    _sound("draft", _chain),
    _sound("draft at 0.7, top-p 0.9", _chain, SamplingParams(temperature=0.7, top_p=0.9)),
    _sound("prompt lookup", _lookup),
    _sound("tree", _tree),
    _sound("cascade", _cascade),
    _sound("bfloat16", lambda models: _chain(embedded_models("bfloat16"))),
    Planted(
        "filters in llama.cpp's order",
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05),
        _in_order_of_llama_cpp,
        lambda seen: llama_cpp_filters(seen.used, SOUND[-1].params),
        asked=lambda params: replace(params, temperature=1.0, **_UNFILTERED),
        filters=("top_k", "top_p", "min_p", "temperature"),
    ),
)


def named(name: str) -> Planted:
    """One of them."""
    return next(each for each in (*FAULTS, *SOUND) if each.name == name)
