"""Which blocks a run reads: short ones while the learning rate is high, long ones while it decays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from truedraft.errors import TrainingError
from truedraft.training.blocks import BlockSampler
from truedraft.training.loop import Phase

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from truedraft.training.schedule import WarmupStableDecay


@dataclass(frozen=True)
class Curriculum:
    """Lengths of sequences and sizes of batches, in tokens.

    Attention costs less in short sequences, so most of the training uses them; the decay uses long ones, so
    that every position of the context has been trained.
    """

    stable_length: int = 512
    decay_length: int = 2048
    tokens_per_step: int = 4096
    tokens_per_pass: int = 4096  # what one forward pass holds; the rest is accumulated

    def __post_init__(self) -> None:
        for length in (self.stable_length, self.decay_length):
            if length < 1 or self.tokens_per_step % length:
                raise TrainingError(
                    f"tokens_per_step ({self.tokens_per_step}) must be a multiple of the sequence length ({length})"
                )

    def fitting(self, context: int) -> Curriculum:
        """The same with sequences no longer than a model's context; they still divide a step and a pass."""
        unit = math.gcd(self.tokens_per_step, min(self.tokens_per_pass, self.tokens_per_step))
        longest = next(length for length in range(min(context, unit), 0, -1) if unit % length == 0)
        return replace(
            self,
            stable_length=self.stable_length if self.stable_length <= context else longest,
            decay_length=self.decay_length if self.decay_length <= context else longest,
        )

    def phases(self, stream: NDArray[np.uint32], schedule: WarmupStableDecay, *, seed: int) -> list[Phase]:
        """The stable stretch and the decay; each draws its blocks from a seed of its own."""
        parts = [
            (schedule.stable_steps, self.stable_length, 2 * seed),
            (schedule.decay_steps, self.decay_length, 2 * seed + 1),
        ]
        return [self._phase(stream, steps, length, seed=seed) for steps, length, seed in parts if steps]

    def _phase(self, stream: NDArray[np.uint32], steps: int, length: int, *, seed: int) -> Phase:
        return Phase(
            steps=steps,
            sampler=BlockSampler(stream, length, seed),
            sequences_per_step=self.tokens_per_step // length,
            sequences_per_pass=max(1, min(self.tokens_per_pass, self.tokens_per_step) // length),
        )
