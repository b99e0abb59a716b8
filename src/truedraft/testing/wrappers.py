"""Models, drafters and rules with one thing changed: to look at what they do, or to plant a fault in them."""

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
    """A shallow copy of an object, some of whose attributes or methods are others; all else is shared with it.

    Weights, caches and states stay one, so only one of the two may be at work at a time. What the object asks of
    itself it asks of the copy.

    Worked example: `altered(model, forward=watched)` is the model, but that its forwards go through `watched`, which
    may call `model.forward`.

    Args:
        part: is left as it is.
        changes: by name; a function takes the place of a method and is called without `self`.

    Raises:
        AttributeError: there is no such attribute, or it cannot be set.
    """
    twin = copy.copy(part)
    for name, change in changes.items():
        getattr(part, name)  # a misspelt name would change nothing
        setattr(twin, name, change)
    return twin


def scaled(model: LanguageModel, factor: float) -> LanguageModel:
    """A model whose logits are multiplied by a factor: itself at another temperature, a draft that errs in a known way.

    Args:
        model: runs the forwards.
        factor: of its logits, which become float32.
    """

    return _with_logits(model, lambda logits: logits.float() * factor)


def _with_logits(model: LanguageModel, change: Callable[[Tensor], Tensor], **more: Any) -> LanguageModel:
    """A model whose forwards give other logits `[rows, vocab]`, also those that show layers; and other changes."""

    def showing(segments: Sequence[Segment], layers: Sequence[int]) -> ForwardOutput:
        output = model.forward_showing(segments, layers) if layers else model.forward(segments)
        return replace(output, logits=change(output.logits))

    return altered(model, forward=lambda segments: showing(segments, ()), forward_showing=showing, **more)


def reduced(model: LanguageModel, kept: Sequence[int]) -> LanguageModel:
    """A model that gives all its probability to a few tokens, so that distributions of several tokens can be summed.

    Args:
        model: runs the forwards.
        kept: the ids that stay possible; the logits of all others, also those made of vectors by its LM head, are -inf.
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
        shared_heads=lambda blocks: None,  # a faster way would not know which ids are kept
    )
