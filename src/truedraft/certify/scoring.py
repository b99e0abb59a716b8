"""The target's laws at every place of texts, by plain forwards over them: what emitted tokens are held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from truedraft.core.laws import law_from_logits
from truedraft.core.sampling import SamplingParams
from truedraft.core.trees import chain_shape
from truedraft.models.base import LanguageModel, Segment

_CHUNK = 256
"""Tokens of a text in one forward, as in the engine's prefill."""
_ENTRIES = 1 << 25
"""Logits that one forward may give."""

Text = tuple[Sequence[int], Sequence[int]]
"""A prompt, and the tokens behind it."""


@torch.inference_mode()
def plain_logits(target: LanguageModel, texts: Sequence[Text]) -> list[Tensor]:
    """The target's logits after every prefix that ends in a prompt's last token or later.

    Args:
        target: run without any drafted token: each text is one chain in an empty cache.
        texts: prompts of at least one token, and the tokens behind them.

    Returns:
        For each text `[tokens behind the prompt, vocab]`: row i is what the target gave before token i.
    """
    found: list[Tensor] = []
    for group in _groups(texts, target.vocab_size):
        found.extend(_together(target, group))
    return found


def plain_laws(target: LanguageModel, texts: Sequence[Text], params: SamplingParams) -> list[Tensor]:
    """The same as laws under sampling options: `[tokens behind the prompt, vocab]`, float32."""
    return [law_from_logits(logits, params) for logits in plain_logits(target, texts)]


def _groups(texts: Sequence[Text], vocab: int) -> Iterator[list[Text]]:
    """Texts that one row of forwards deals with."""
    group: list[Text] = []
    rows = 0
    for text in texts:
        if group and (rows + len(text[1])) * vocab > _ENTRIES:
            yield group
            group, rows = [], 0
        group.append(text)
        rows += len(text[1])
    if group:
        yield group


def _together(target: LanguageModel, texts: Sequence[Text]) -> list[Tensor]:
    caches = [target.new_cache() for _ in texts]
    rows: list[list[Tensor]] = [[] for _ in texts]
    try:
        longest = max(len(prompt) + len(tokens) - 1 for prompt, tokens in texts)
        for start in range(0, longest, _CHUNK):
            parts = []
            for number, (prompt, tokens) in enumerate(texts):
                ids = [*prompt, *tokens[:-1]][start : start + _CHUNK]
                if ids and tokens:
                    wanted = range(max(0, len(prompt) - 1 - start), len(ids))
                    segment = Segment(caches[number], torch.tensor(ids), chain_shape(len(ids)), wanted)
                    parts.append((number, segment))
            logits = target.forward([segment for _, segment in parts]).logits
            counts = [len(segment.rows) for _, segment in parts]
            for (number, segment), own in zip(parts, logits.split(counts), strict=True):
                segment.cache.commit(range(len(segment.shape)))
                rows[number].append(own)
    finally:
        for cache in caches:
            target.release_cache(cache)
    empty = torch.empty(0, target.vocab_size, device=target.device)
    return [torch.cat(own) if own else empty for own in rows]
