"""Log probabilities of the tokens of an answer, from the rows used for verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.core import transfers


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one token: its own, its `rank` (1 for the likeliest), and the likeliest, descending."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of one token per row of `[rows, vocab]`, not NaN; rows beyond the tokens are ignored."""
    if not tokens:
        return ()
    rows = logits[: len(tokens)]
    rows = torch.log_softmax(rows if rows.dtype == torch.float64 else rows.float(), dim=-1)
    ids = transfers.upload(list(tokens), rows.device)
    own = rows.gather(-1, ids[:, None])
    ranks = (rows > own).sum(dim=-1) + 1
    top = rows.topk(min(count, rows.shape[-1]), dim=-1)
    numbers = transfers.fetch([own, ranks, top.indices, top.values])
    width = top.indices.shape[-1]
    likeliest = list(zip(map(int, numbers[2]), numbers[3], strict=True))
    return tuple(
        TokenLogprobs(token, logprob, int(rank), tuple(likeliest[place * width : (place + 1) * width]))
        for place, (token, logprob, rank) in enumerate(zip(tokens, numbers[0], numbers[1], strict=True))
    )
