"""What heads guess beside noise that the target shares: replayed on sampled text, by noise that could have drawn it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from truedraft.training.guesses import guesses_along
from truedraft.training.likely_paths import HeadGuesses, guessed
from truedraft.training.traces import Trace

if TYPE_CHECKING:
    from truedraft.heads.medusa import MedusaHeads
    from truedraft.models.lm_head import LmHead


def noise_behind(log_probs: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise G under which argmax(log p + G) gives the tokens that were drawn: `[rows, vocab]`.

    Drawn from its law given those tokens, so that token and noise together are as if the noise had come first. The
    largest log p + G is a Gumbel variable that does not depend on which token has it, and the others are Gumbel
    variables below it.

    Args:
        log_probs: `[rows, vocab]`, of the law that each token was drawn from.
        tokens: `[rows]`, int64.
        generator: of the noise.
    """
    largest = _gumbel(log_probs[:, :1].shape, generator)
    free = log_probs + _gumbel(log_probs.shape, generator)
    values = -torch.logaddexp(-largest, -free)  # below the largest
    values.scatter_(1, tokens[:, None], largest)
    return values - log_probs


def _gumbel(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return -torch.empty(shape).exponential_(generator=generator).clamp(min=1e-30).log()


@torch.no_grad()
def coupled_along(
    heads: MedusaHeads, lm_head: LmHead, traces: Sequence[Trace], count: int, seed: int = 0
) -> HeadGuesses:
    """What `drafters.coupled_guesses` gives at temperature 1, at every position of some traces.

    Args:
        heads: guess; they compute on their own device and in their own dtype.
        lm_head: of the target that wrote the traces.
        traces: drawn at temperature 1, by any noise.
        count: guesses of a head that are kept.
        seed: of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = [HeadGuesses.along(heads, lm_head, [], count)]
    for trace in traces:
        log_probs = lm_head(trace.hidden.to(lm_head.weight.device)).float().log_softmax(dim=-1).cpu()
        noise = noise_behind(log_probs, trace.tokens, generator)
        heard = _with_noise(guesses_along(heads, lm_head, [trace]), noise)
        parts.append(guessed(heard, [trace], heads.config, count))
    return HeadGuesses.joined(parts)


def _with_noise(guesses: Iterable[tuple[Tensor, Tensor]], noise: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits `[heads, rows, vocab]` at the positions of a trace, each with the noise `[tokens, vocab]` of its token."""
    first = 1
    for logits, tokens in guesses:
        places = torch.arange(first, first + len(tokens))
        own = [noise[(places + head).clamp(max=len(noise) - 1)] for head in range(len(logits))]
        yield logits.float() + torch.stack(own).to(logits.device), tokens
        first += len(tokens)
