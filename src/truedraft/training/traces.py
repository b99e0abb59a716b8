"""Traces: what the target wrote, with the vector from which each token was drawn."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from truedraft.errors import DataError


@dataclass(frozen=True)
class Trace:
    """One answer of the target, as heads see it.

    At a step whose last token is `tokens[i]`, head k (from 0) reads `hidden[i]` and guesses `tokens[i + 1 + k]`.

    Attributes:
        tokens: `[n]`, int64: the answer; its first token is the one that the prompt's forward gives.
        hidden: `[n, width]`: the vectors that entered the target's LM head, each the one that gave its token.
        stopped: whether the last token ended the answer and is not a part of it; otherwise it ended at its length.

    Raises:
        DataError: there are not as many vectors as tokens.
    """

    tokens: Tensor
    hidden: Tensor
    stopped: bool = False

    def __post_init__(self) -> None:
        """Each token has its vector."""
        if self.tokens.dim() != 1 or self.hidden.dim() != 2 or len(self.tokens) != len(self.hidden):
            raise DataError(
                "a trace needs tokens [n] and as many vectors [n, width], got shapes "
                f"{list(self.tokens.shape)} and {list(self.hidden.shape)}"
            )

    @property
    def steps(self) -> int:
        """Most steps that decoding it can take: one from each token but the last."""
        return max(0, len(self.tokens) - 1)
