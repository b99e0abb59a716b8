"""Caches after each verdict on drafted tokens, and those of plain decoding, for any language model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from truedraft.core.tree import TreeShape, chain_shape
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.cache import RequestCache

CHAIN, TREE = chain_shape(6), TreeShape((-1, 0, 0, 2, 1, 3))
DRAFTED = (3, 5, 7, 11, 13, 17)


def read(
    model: LanguageModel, ids: Sequence[int], prompt: int | None = None, cuts: Sequence[int] = ()
) -> tuple[RequestCache, Tensor]:
    """A cache that holds some tokens, and the logits at the last one.

    Args:
        model: reads.
        ids: all of them; after the prompt one at a time.
        prompt: how many are the prompt; None is all.
        cuts: where its parts end, besides its end.
    """
    cache, begin, prompt = model.new_cache(), 0, len(ids) if prompt is None else prompt
    for end in (*cuts, prompt, *range(prompt + 1, len(ids) + 1)):
        own, count = torch.tensor(ids[begin:end]), end - begin
        of_prompt = max(min(end, prompt) - begin, 0)
        logits = model.forward([Segment(cache, own, chain_shape(count), (count - 1,), prompt=of_prompt)]).logits
        cache.commit(range(count))
        begin = end
    return cache, logits[-1]


def verdicts(
    model: LanguageModel, prompt: Sequence[int], *shapes: TreeShape, drafted: Sequence[int] = DRAFTED
) -> Iterator[tuple[RequestCache, Tensor, list[int]]]:
    """For each node of some trees: the cache after its path was accepted, its logits, and all tokens of the text."""
    for shape in shapes:
        for node in range(len(shape)):
            cache, _ = read(model, prompt)
            logits = model.forward([Segment(cache, torch.tensor(drafted), shape, range(len(shape)))]).logits[node]
            cache.commit(shape.path(node))
            yield cache, logits, [*prompt, *(drafted[place] for place in shape.path(node))]
            model.release_cache(cache)


def assert_same_entries(one: RequestCache, other: RequestCache, close: float = 1e-4) -> None:
    assert one.length == other.length
    for mine, theirs in zip(one.entries(), other.entries(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=close, atol=close)
