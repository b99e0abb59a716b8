"""Engines with planted faults, and sound ones: what a certificate of engines must tell apart.

Each is truedraft's own engine over the embedded models, with chains of four drafted tokens, but for one thing.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from support.embedded_models import embedded
from support.faulty_parts import llama_cpp_filters, nucleus_off_by_one, replaced_probs
from truedraft import SamplingParams
from truedraft.certify import faults
from truedraft.certify.checks import Stack
from truedraft.drafters import Cascade, DraftModel, NoDrafter, PromptLookup
from truedraft.engine.policy import Budget, FixedBudget
from truedraft.measure.peers.asking import FILTERS
from truedraft.models.base import LanguageModel
from truedraft.models.embedded import heldout_prompts_file
from truedraft.verification import Rule, SpeculativeSampling

LENGTH = 4
"""Of a chain of drafted tokens."""


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
def beginnings() -> list[list[int]]:
    """Prompts: the first tokens of held-out files."""
    tokenizer = embedded_models().target.tokenizer
    assert tokenizer is not None
    texts = [json.loads(line)["text"] for line in heldout_prompts_file().read_text().splitlines()[:32]]
    return [tokenizer.encode(text)[:16] for text in texts]


@dataclass(frozen=True, slots=True)
class Planted:
    """An engine of truedraft's with one thing changed, or none.

    Attributes:
        params: sampling options at which it shows.
        parts: target, drafter and rule for requests of given options.
        asked: the options that the engine really works with.
        filters: the order in which it makes distributions.
    """

    name: str
    params: SamplingParams
    parts: Callable[[Models, SamplingParams], Stack]
    asked: Callable[[SamplingParams], SamplingParams] = lambda params: params
    filters: tuple[str, ...] = FILTERS


def _chain(models: Models, params: SamplingParams | None = None) -> Stack:
    drafter = DraftModel(models.draft, num_speculative_tokens=LENGTH)
    controller = FixedBudget(Budget(depth=LENGTH, width=1, nodes=LENGTH))
    return Stack(models.target, drafter, SpeculativeSampling(), controller=controller)


def _lookup(models: Models, params: SamplingParams | None = None) -> Stack:
    return _chain(models).but(drafter=PromptLookup(num_speculative_tokens=LENGTH, min_ngram=1))


def _with(**changes: Callable[[Any, SamplingParams], Any]) -> Callable[[Models, SamplingParams], Stack]:
    """The chain, some of whose parts are made of what they were and of options."""

    def parts(models: Models, params: SamplingParams) -> Stack:
        stack = _chain(models)
        return stack.but(**{name: change(getattr(stack, name), params) for name, change in changes.items()})

    return parts


def _off_by_one(name: str, more: int) -> Planted:
    def cut(rule: Rule, params: SamplingParams) -> Rule:
        return replaced_probs(rule, lambda p: nucleus_off_by_one(p, params.top_p, more))

    params = SamplingParams(temperature=1.0, top_p=0.5)
    return Planted(name, params, _with(rule=cut), lambda params: replace(params, top_p=1.0))


def _judges_at_one(rule: Rule, params: SamplingParams) -> Rule:
    return faults.judges_another_temperature(rule, 1.0 / (params.temperature or 1.0))  # 0 is greedy


def _accepts_ngrams(models: Models, params: SamplingParams) -> Stack:
    stack = _lookup(models)
    return stack.but(rule=faults.accepts_always(stack.rule))


_WARM, _COOL = SamplingParams(temperature=1.0), SamplingParams(temperature=0.7)

FAULTS = (
    Planted("temperature twice", _COOL, _chain, lambda params: replace(params, temperature=params.temperature**2)),
    Planted("greedy above 0", _COOL, _chain, lambda params: replace(params, temperature=0.0)),
    _off_by_one("top-p keeps one too many", 1),
    _off_by_one("top-p drops the crossing one", -1),
    Planted(
        "stale state loses an accepted token",
        _WARM,
        _with(target=lambda target, params: faults.loses_last_accepted(target)),
    ),
    Planted("q judged at temperature 1", SamplingParams(temperature=0.5), _with(rule=_judges_at_one)),
    Planted("n-gram candidates always accepted", _WARM, _accepts_ngrams),
)


def _tree(models: Models, params: SamplingParams) -> Stack:
    drafter = DraftModel(models.draft, branching=(3, 2, 1))
    return _chain(models).but(drafter=drafter, controller=FixedBudget(drafter.limits))


def _cascade(models: Models, params: SamplingParams) -> Stack:
    drafter = Cascade(PromptLookup(), DraftModel(models.draft, num_speculative_tokens=LENGTH))
    return _chain(models).but(drafter=drafter, controller=FixedBudget(drafter.limits))


SOUND = (
    Planted("plain", _WARM, lambda models, _: _chain(models).but(drafter=NoDrafter(), controller=None)),
    Planted("draft", _WARM, _chain),
    Planted("draft at 0.7, top-p 0.9", SamplingParams(temperature=0.7, top_p=0.9), _chain),
    Planted("prompt lookup", _WARM, _lookup),
    Planted("tree", _WARM, _tree),
    Planted("cascade", _WARM, _cascade),
    Planted("bfloat16", _WARM, lambda models, _: _chain(embedded_models("bfloat16"))),
    Planted(
        "filters in llama.cpp's order",
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05),
        _with(rule=lambda rule, params: replaced_probs(rule, lambda p: llama_cpp_filters(p, params))),
        asked=lambda params: replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
        filters=("top_k", "top_p", "min_p", "temperature"),
    ),
)


def named(name: str) -> Planted:
    """One of them; KeyError if there is none."""
    return {each.name: each for each in (*FAULTS, *SOUND)}[name]
