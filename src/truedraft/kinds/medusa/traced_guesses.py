"""The heads' guesses at the positions of traces, and the ranks of the target's tokens among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.kinds.medusa.module import MedusaHeads
from truedraft.measure.replay import Trace, chunks_of, starts_of, tree_depths
from truedraft.models.lm_head import LmHead

LOGITS = 1 << 24
"""Maximum number of logits in memory: 64 MiB in float32."""


@dataclass(frozen=True)
class HeadGuesses:
    """The heads' guesses at each position of traces, and the ranks of the target's tokens among them.

    Attributes:
        log_probs: float32 `[heads, positions, guesses]`: log probabilities of the likeliest guesses, descending.
        ranks: int64 `[positions, heads]`: number of ids that rank before the true token; -1 if none is drafted.
        depths: `[positions]`: possible depth of a tree, see `tree_depths`.
    """

    log_probs: Tensor
    ranks: Tensor
    depths: NDArray[Any]
    starts: tuple[int, ...]

    @classmethod
    def along(
        cls, heads: MedusaHeads, lm_head: LmHead, traces: Sequence[Trace], count: int, logits_at_once: int = LOGITS
    ) -> HeadGuesses:
        """Evaluate every position, with `count` guesses per head; traces must have the temperature of drafting."""
        return cls._of(heads, guesses_along(heads, lm_head, traces, logits_at_once), traces, count)

    @classmethod
    @torch.no_grad()
    def coupled(
        cls, heads: MedusaHeads, lm_head: LmHead, traces: Sequence[Trace], count: int, seed: int = 0
    ) -> HeadGuesses:
        """For seeded requests at temperature 1, with noise that could have drawn the traces."""
        generator = torch.Generator().manual_seed(seed)
        parts = [cls.along(heads, lm_head, [], count)]
        for trace in traces:
            log_probs = lm_head(trace.hidden.to(lm_head.weight.device)).float().log_softmax(dim=-1).cpu()
            noise = noise_behind(log_probs, trace.tokens, generator)
            parts.append(cls._of(heads, _with_noise(guesses_along(heads, lm_head, [trace]), noise), [trace], count))
        return cls.joined(parts)

    @classmethod
    def _of(
        cls, heads: MedusaHeads, logits: Iterable[tuple[Tensor, Tensor]], traces: Sequence[Trace], count: int
    ) -> HeadGuesses:
        config = heads.config
        count = min(count, config.vocab_size)
        log_probs = [torch.zeros(config.heads, 0, count)]
        ranks = [torch.zeros(0, config.heads, dtype=torch.int64)]
        for own, tokens in logits:
            own_s = own.float()  # the order of equally likely ids does not change their probabilities
            log_probs.append((own_s.topk(count).values - own_s.logsumexp(dim=-1, keepdim=True)).cpu())
            ranks.append(torch.where(tokens < 0, -1, true_ranks(own, tokens)).cpu())
        depths = tree_depths(traces, config.heads)
        return cls(torch.cat(log_probs, dim=1), torch.cat(ranks), depths, starts_of(traces))

    @classmethod
    def joined(cls, parts: Sequence[HeadGuesses]) -> HeadGuesses:
        starts = [0]
        for part in parts:
            starts += [starts[-1] + start for start in part.starts[1:]]
        log_probs = torch.cat([each.log_probs for each in parts], dim=1)
        depths = np.concatenate([each.depths for each in parts])
        return cls(log_probs, torch.cat([each.ranks for each in parts]), depths, tuple(starts))


@torch.no_grad()
def guesses_along(
    heads: MedusaHeads, lm_head: LmHead, traces: Sequence[Trace], logits_at_once: int = LOGITS
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits `[heads, rows, vocab]` at some positions, and the true tokens `[rows, heads]`, int64; -1 if undrafted."""
    weight = next(heads.parameters())
    rows = max(1, logits_at_once // (heads.config.heads * heads.config.vocab_size))
    for hidden, drawn, tokens in chunks_of(traces, heads.config.heads, rows):
        embedded = lm_head.embed(drawn.to(weight.device))
        logits = heads.logits(hidden.to(weight.device, weight.dtype), lm_head, lm_head.finish, embedded)
        yield logits, tokens.to(weight.device)


def true_ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Number of ids that rank before each token, `[rows, heads]`, int64; the vocabulary size for token -1.

    `logits` are `[heads, rows, vocab]`; of equal ones the lower id ranks first.
    """
    tokens = tokens.T
    own = logits.gather(-1, tokens.clamp(min=0)[..., None])
    before = torch.arange(logits.shape[-1], device=logits.device) < tokens[..., None]
    ahead = (logits > own).sum(-1) + ((logits == own) & before).sum(-1)
    return torch.where(tokens < 0, logits.shape[-1], ahead).T


def noise_behind(log_probs: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise G under which argmax(log p + G) gives the drawn tokens: `[rows, vocab]`.

    Drawn from its distribution given those tokens, so that both are distributed as if the noise had come first. The
    largest log p + G is a Gumbel variable that does not depend on which token has it; the others are below it.

    `log_probs`, `[rows, vocab]`, are of the distribution that each token was drawn from.
    """
    largest = _gumbel(log_probs[:, :1].shape, generator)
    free = log_probs + _gumbel(log_probs.shape, generator)
    values = -torch.logaddexp(-largest, -free)  # below the largest
    values.scatter_(1, tokens[:, None], largest)
    return values - log_probs


def _gumbel(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return -torch.empty(shape).exponential_(generator=generator).clamp(min=1e-30).log()


def _with_noise(guesses: Iterable[tuple[Tensor, Tensor]], noise: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Plus the noise `[tokens, vocab]` of a trace's tokens."""
    first = 1
    for logits, tokens in guesses:
        places = torch.arange(first, first + len(tokens))
        own = [noise[(places + head).clamp(max=len(noise) - 1)] for head in range(len(logits))]
        yield logits.float() + torch.stack(own).to(logits.device), tokens
        first += len(tokens)
