"""Heads in training: what loss, loop and measurement need to know of them, whatever their kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from truedraft.training.optimizer import MixedOptimizer, OptimizerConfig

if TYPE_CHECKING:
    from truedraft.models.lm_head import LmHead


class Trainee(Protocol):
    """Heads that guess at `reach` places behind the token that was drawn from a vector."""

    @property
    def module(self) -> nn.Module:
        """What is trained."""

    @property
    def lm_head(self) -> LmHead:
        """Of the target, on the module's device."""

    @property
    def reach(self) -> int:
        """How many tokens are guessed, behind the one that was drawn from a vector."""

    @property
    def word(self) -> str:
        """What the log calls a place: a head, or a place."""

    @property
    def outputs(self) -> Sequence[nn.Linear | None]:
        """What each place ends in; None is the target's LM head."""

    def vectors(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """What enters the output at each place: `[reach, positions, exit_width]`.

        Args:
            hidden: `[positions, width]`: vectors that entered the target's LM head.
            tokens: `[positions, reach]`, int64: the token drawn from each, and those behind it; place k (from 0) reads
                at most the first k + 1 and is about the one behind these.
        """


def place_logits(trainee: Trainee, place: int, vectors: Tensor) -> Tensor:
    """Logits `[positions, vocab]` at a place, for what enters its output `[positions, exit_width]`."""
    output = trainee.outputs[place]
    return trainee.lm_head(vectors) if output is None else trainee.lm_head.finish(output(vectors))


def heads_optimizer(trainee: Trainee, config: OptimizerConfig) -> MixedOptimizer:
    """Muon for matrices, AdamW for biases and outputs of the heads' own."""
    return MixedOptimizer(trainee.module, config, [output.weight for output in trainee.outputs if output is not None])
