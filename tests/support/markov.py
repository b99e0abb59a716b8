"""What Markov tables write, and tables with broken rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from truedraft.models.base import ForwardOutput, Segment
from truedraft.testing import MarkovModel, altered


def greedy(model: MarkovModel, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens behind a prompt, by the table alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.probs_after(tokens).argmax()))
    return tokens[len(prompt) :]


def spoiled(model: MarkovModel, spoil: Callable[[Tensor, tuple[int, int]], object]) -> MarkovModel:
    """A table whose forwards have each row of logits `[vocab]` changed in place, by the last two tokens before it."""

    def forward(segments: Sequence[Segment]) -> ForwardOutput:
        output = model.forward(segments)
        logits = output.logits.clone()
        for row, (first, last) in zip(logits, output.hidden.long().tolist(), strict=True):
            spoil(row, (first, last))
        return replace(output, logits=logits)

    return altered(model, forward=forward)
