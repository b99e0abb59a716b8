"""The token that Gumbel noise chooses, by definition."""

from __future__ import annotations

import torch
from torch import Tensor

from truedraft.core.probs import most_likely


def coupled_choice(probs: Tensor, gumbel: Tensor) -> Tensor:
    """argmax(log p(v) + G(v)) for each row `[rows]`, the lowest id among equals.

    Args:
        probs: `[rows, vocab]`.
        gumbel: `[rows, vocab]` or `[vocab]`, float64.
    """
    return most_likely(torch.log(probs.double()).add_(gumbel))
