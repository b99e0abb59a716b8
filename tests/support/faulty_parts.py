"""Parts with a fault, beside those of `truedraft.certify.faults`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from truedraft.certify.faults import commits_wrongly, given_another
from truedraft.core import probs as L
from truedraft.core.params import SamplingParams
from truedraft.models.base import LanguageModel
from truedraft.models.cache import RequestCache
from truedraft.testing import altered
from truedraft.verification import Rule

Changed = TypeVar("Changed")


def replaced_probs(rule: Rule, change: Callable[[Tensor], Tensor]) -> Rule:
    """A rule that judges against other distributions than the engine made for it."""
    return given_another(rule, lambda proposal, probs, noise: (proposal, change(probs), noise))


def nucleus_off_by_one(p: Tensor, top_p: float, more: int) -> Tensor:
    """Distributions `[tokens, vocab]` cut to the nucleus and one token more (`more` 1) or less (-1; at least one)."""
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    count = (ordered.cumsum(dim=-1, dtype=torch.float64) < top_p).sum(dim=-1, keepdim=True) + 1 + more
    kept = torch.arange(p.shape[-1]) < count.clamp(1, p.shape[-1])
    found = torch.zeros_like(p).scatter_(-1, order, ordered * kept)
    return found / found.sum(dim=-1, keepdim=True)


def llama_cpp_filters(p: Tensor, params: SamplingParams) -> Tensor:
    """Of distributions at temperature 1 `[tokens, vocab]`: top-k, top-p, min-p, and the temperature behind them."""
    logits = p.log()
    kept = L.probs_from_logits(logits, replace(params, temperature=1.0))
    return L.probs_from_logits(kept.log(), SamplingParams(temperature=params.temperature))


def keeps_rejected(model: LanguageModel) -> LanguageModel:
    """As a recurrent state that is not rolled back: the first rejected token takes the last accepted one's place."""

    def wrong(cache: RequestCache, path: Sequence[int]) -> Sequence[int]:
        return (*path[:-1], path[-1] + 1) if path and path[-1] + 1 < cache.uncommitted else path

    return commits_wrongly(model, wrong)


# ------------------------------------------------------------------------------------------------ calls


def raising(part: Changed, words: str = "no idea", **when: Callable[..., object]) -> Changed:
    """A part of which some methods raise a RuntimeError where what is given for them says so of their arguments."""

    def method(name: str, raises: Callable[..., object]) -> Callable[..., Any]:
        call = getattr(part, name)

        def called(*given: Any) -> Any:
            if raises(*given):
                raise RuntimeError(words)
            return call(*given)

        return called

    return altered(part, **{name: method(name, raises) for name, raises in when.items()})
