"""What Markov tables write."""

from __future__ import annotations

from collections.abc import Sequence

from truedraft.testing import MarkovModel


def greedy(model: MarkovModel, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens behind a prompt, by the table alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.probs_after(tokens).argmax()))
    return tokens[len(prompt) :]
