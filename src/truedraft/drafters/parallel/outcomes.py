"""What a verdict on a drafted chain will likeliest be, as far as the draft can tell.

An outcome guessed wrongly costs time, never an answer, so a guess may look at whatever it likes, also at the number
that will draw the bonus token: it decides nothing. Which token the target draws with that number depends on the
target's distribution alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from truedraft.core.noise import KeyedNoise, Purpose
from truedraft.core.params import SamplingParams
from truedraft.core.probs import draw, probs_from_logits

_SHARPER = 2.0
"""Powers of the draft's probabilities. It is right about the target's choice more often than it is sure of it, for both
are torn between the same tokens: of the embedded pair's greedy steps, four outcomes by its probabilities alone held
0.76, by their squares 0.85, by higher powers less."""


class Outcome(NamedTuple):
    """How a step may end.

    Attributes:
        accepted: drafted tokens that stay.
        token: the recovered or bonus token behind them.
    """

    accepted: int
    token: int


def likeliest_outcomes(
    logits: Tensor, drafted: Sequence[int], params: SamplingParams, noise: KeyedNoise, count: int
) -> list[Outcome]:
    """The likeliest outcomes of a step that judges a chain, the likeliest first.

    A function of these arguments alone: neither of times nor of how far anything got.

    Args:
        logits: `[drafted + 1, vocab]` of the draft: behind the text, then behind each drafted token.
        drafted: the chain.
        params: of the request, which change no logits of single tokens.
        noise: with which the step judges.
        count: most outcomes.
    """
    chances = _chances(logits, drafted, params, noise)  # [drafted + 1, vocab]
    vocab = chances.shape[-1]
    places = torch.arange(len(drafted))
    ids = torch.tensor(list(drafted), dtype=torch.int64)
    reached = torch.ones(len(drafted) + 1, dtype=chances.dtype)
    reached[1:] = chances[places, ids].cumprod(0)
    chances *= reached[:, None]
    chances[places, ids] = 0.0  # accepted there: the step goes on
    best = chances.flatten().topk(min(count, chances.numel()))
    found = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [Outcome(*divmod(place, vocab)) for chance, place in found if chance > 0.0]


def _chances(logits: Tensor, drafted: Sequence[int], params: SamplingParams, noise: KeyedNoise) -> Tensor:
    """How likely each token `[drafted + 1, vocab]` is the target's at its place, where the ones before were right.

    - Greedy: the draft's probabilities, sharpened.
    - Coupled: the noise is known, so log q + G is what is ranked; softmax of it, sharpened.
    - Independent draws: whether they stay, and what is recovered, hangs on p more than on q. So all are taken to stay;
      the bonus token is the one that its number would draw from q, then others by q.
    """
    if params.greedy:
        return torch.softmax(_SHARPER * logits.float(), dim=-1)
    if params.seeded:
        scores = probs_from_logits(logits, params).log()
        for depth, row in enumerate(scores):
            gumbel = noise.gumbel(depth, logits.shape[-1], logits.device)
            if gumbel is not None:
                row += gumbel.to(row.dtype)
        return torch.softmax(_SHARPER * scores, dim=-1)
    last = probs_from_logits(logits[-1:], params)  # [1, vocab]
    chances = torch.zeros(logits.shape, dtype=last.dtype)
    chances[range(len(drafted)), list(drafted)] = 1.0
    chances[-1] = last[0]
    number = noise.uniform(Purpose.BONUS, len(drafted))
    bonus = int(draw(last, torch.tensor([number], dtype=torch.float64)))
    if bonus < logits.shape[-1]:
        chances[-1, bonus] = 1.0
    return chances
