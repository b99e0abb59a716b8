"""Doubles for measuring: a clock that models and drafters move, so that costs are known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from support.fake_times import FakeClock
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.proposal import Proposal
from truedraft.drafters.base import DraftRequest, StepOutcome
from truedraft.models.base import ForwardOutput, Segment
from truedraft.testing import MarkovModel, ScriptedDrafter

Cost = Callable[[int, tuple[int, ...]], float]


class TimedModel(MarkovModel):
    """A Markov table whose forwards take known seconds and note what they were asked.

    `cost` gives seconds from rows and the contexts of the requests.
    """

    cost: Cost
    clock: FakeClock

    @classmethod
    def of(cls, clock: FakeClock, cost: Cost, context_length: int = 2048) -> TimedModel:
        model = cls(torch.full((3, 3, 3), 1 / 3, dtype=torch.float64), context_length=context_length)
        model.clock, model.cost = clock, cost
        return model

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        rows = sum(len(segment.tokens) for segment in segments)
        self.clock.now += self.cost(rows, tuple(segment.cache.length for segment in segments))
        return super().forward(segments)


class TimedDrafter(ScriptedDrafter):
    """Proposes a chain as deep as its budget, in known seconds: 1 ms to begin, 2 ms a token, 3 ms to observe."""

    def __init__(self, clock: FakeClock, depth: int = 4, most: int = 1_000) -> None:
        super().__init__(lambda tokens: [], depth=depth)
        self.clock = clock
        self.most = most
        self.budgets: list[Budget] = []
        self.live: set[int] = set()
        self.longest = 0

    def begin(self, request: DraftRequest) -> None:
        self.live.add(request.id)

    def end(self, request: DraftRequest) -> None:
        super().end(request)
        self.live.remove(request.id)

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        self.budgets.extend(budgets)
        self.longest = max(self.longest, len(batch[0].tokens) + budgets[0].depth)
        self._script = lambda tokens: [[1] * min(budgets[0].depth, self.most)]
        proposals = super().propose(batch, budgets, noise)
        self.clock.now += 1e-3 + 2e-3 * len(proposals[0].tree)
        return proposals

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        super().observe(batch, outcomes)
        self.clock.now += 3e-3
