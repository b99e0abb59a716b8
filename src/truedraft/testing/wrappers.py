"""Models, drafters and rules with one change: to observe them, or to inject a fault."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from truedraft.core.top_k import TopK
from truedraft.models.base import ForwardOutput, LanguageModel, Segment

Changed = TypeVar("Changed")


def altered(part: Changed, **changes: Any) -> Changed:
    """A shallow copy of an object with some attributes or methods replaced; all else is shared with it.

    Weights, caches and states are shared, so only one of the two may run at a time. Calls of the object to itself go to
    the copy.

    Worked example: `altered(model, forward=watched)` is the model, except that its forwards call `watched`, which may
    call `model.forward`.

    Args:
        changes: by name; a function replaces a method and is called without `self`.

    Raises:
        AttributeError: there is no such attribute, or it cannot be set.
    """
    twin = copy.copy(part)
    for name, change in changes.items():
        getattr(part, name)  # a misspelt name would change nothing
        setattr(twin, name, change)
    return twin


def scaled(model: LanguageModel, factor: float) -> LanguageModel:
    """A model with logits multiplied by a factor: itself at another temperature, or a draft with a known error.

    The logits become float32.
    """

    return _with_logits(model, lambda logits: logits.float() * factor)


def _with_logits(model: LanguageModel, change: Callable[[Tensor], Tensor], **more: Any) -> LanguageModel:
    """A model with changed logits `[rows, vocab]` in all its forwards, and other changes."""

    def showing(segments: Sequence[Segment], layers: Sequence[int]) -> ForwardOutput:
        output = model.forward_showing(segments, layers) if layers else model.forward(segments)
        return replace(output, logits=change(output.logits))

    return altered(model, forward=lambda segments: showing(segments, ()), forward_showing=showing, **more)


def reduced(model: LanguageModel, kept: Sequence[int]) -> LanguageModel:
    """A model that gives all its probability to a few tokens, so that distributions of several tokens can be summed.

    Args:
        kept: the possible ids; the logits of all others are -inf, also those that its LM head computes from hidden
            states.
    """
    ids = list(kept)

    def only_kept(logits: Tensor) -> Tensor:  # [rows, vocab]
        found = logits.new_full(logits.shape, float("-inf"))
        found[:, ids] = logits[:, ids]
        return found

    def unembed(vectors: Tensor) -> Tensor:
        return only_kept(model.unembed(vectors))

    return _with_logits(
        model,
        only_kept,
        unembed=unembed,
        likeliest=lambda vectors, count: TopK.of(unembed(vectors), count),
        shared_heads=lambda blocks: None,  # a faster way would not restrict the ids
    )
