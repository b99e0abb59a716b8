"""What heads say at the positions of traces, and how they rank what the target said there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from truedraft.training.traces import Trace

if TYPE_CHECKING:
    from truedraft.heads.medusa import MedusaHeads
    from truedraft.models.lm_head import LmHead

LOGITS = 1 << 24
"""Logits that are held at a time: 64 MiB in float32."""


@torch.no_grad()
def guesses_along(
    heads: MedusaHeads, lm_head: LmHead, traces: Sequence[Trace], logits_at_once: int = LOGITS
) -> Iterator[tuple[Tensor, Tensor]]:
    """What heads say at the positions of some traces, a few of them at a time.

    Yields:
        Logits `[heads, rows, vocab]` on the heads' device and in their dtype, and the true tokens `[rows, heads]`,
        int64; -1 where none is drafted.
    """
    weight = next(heads.parameters())
    rows = max(1, logits_at_once // (heads.config.heads * heads.config.vocab_size))
    for hidden, drawn, tokens in _chunks(traces, heads.config.heads, rows):
        embedded = lm_head.embed(drawn.to(weight.device))
        logits = heads.logits(hidden.to(weight.device, weight.dtype), lm_head, lm_head.finish, embedded)
        yield logits, tokens.to(weight.device)


_Chunk: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Positions: their vectors `[rows, width]`, the tokens `[rows]` drawn from these, and those behind `[rows, heads]`; -1
where none is drafted."""


def _chunks(traces: Sequence[Trace], heads: int, rows: int) -> Iterator[_Chunk]:
    """Positions of all traces, a number of them at a time."""
    waiting: list[_Chunk] = []
    size = 0
    for trace in traces:
        for first in range(0, trace.steps, rows):
            places = torch.arange(first, min(first + rows, trace.steps))
            if size + len(places) > rows and waiting:
                yield _together(waiting)
                waiting, size = [], 0
            after = places[:, None] + 1 + torch.arange(heads)
            inside = after < trace.steps  # the last token is never drafted: the step that emits it ends the answer
            tokens = torch.where(inside, trace.tokens.cpu()[after.clamp(max=trace.steps)], -1)
            here = slice(first, first + len(places))
            waiting.append((trace.hidden[here], trace.tokens[here], tokens))
            size += len(places)
    if waiting:
        yield _together(waiting)


def _together(parts: Sequence[_Chunk]) -> _Chunk:
    hidden, drawn, tokens = zip(*parts, strict=True)
    return torch.cat(hidden), torch.cat(drawn), torch.cat(tokens)


def true_ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """How many ids rank before each token: `[rows, heads]`, int64; the vocabulary for token -1.

    Args:
        logits: `[heads, rows, vocab]`; of equal ones the lower id ranks first.
        tokens: `[rows, heads]`, int64.
    """
    tokens = tokens.T
    own = logits.gather(-1, tokens.clamp(min=0)[..., None])
    before = torch.arange(logits.shape[-1], device=logits.device) < tokens[..., None]
    ahead = (logits > own).sum(-1) + ((logits == own) & before).sum(-1)
    return torch.where(tokens < 0, logits.shape[-1], ahead).T
