"""Learning-rate schedules: plain functions from a step to a multiplier of the peak rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class WarmupStableDecay:
    """Linear warm-up, a constant stretch, then a decay to `floor` by 1 - sqrt (2405.18392).

    Until the decay begins, the trajectory does not depend on when it will begin. So a checkpoint of the stable
    stretch can be branched: decayed now into a usable model, and trained on later.
    """

    warmup_steps: int
    stable_steps: int  # the warm-up included
    decay_steps: int
    floor: float = 0.0

    @property
    def total_steps(self) -> int:
        """Warm-up, stable stretch and decay together."""
        return self.stable_steps + self.decay_steps

    def shortened(self, steps: int) -> WarmupStableDecay:
        """The same in fewer steps, with the same share of them in the decay."""
        if steps >= self.total_steps:
            return self
        decay = min(steps - 1, round(steps * self.decay_steps / self.total_steps))
        stable = steps - decay
        return replace(self, warmup_steps=min(self.warmup_steps, stable), stable_steps=stable, decay_steps=decay)

    def __call__(self, step: int) -> float:
        """The multiplier for the update number `step`, counted from 0."""
        if step < min(self.warmup_steps, self.stable_steps):
            return (step + 1) / self.warmup_steps
        if step < self.stable_steps:
            return 1.0
        done = (step - self.stable_steps + 1) / (self.decay_steps + 1)
        return self.floor + (1.0 - self.floor) * (1.0 - math.sqrt(min(1.0, done)))
