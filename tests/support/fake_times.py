"""A clock that only tests and their doubles move; models, drafters and step times by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.proposal import Proposal
from truedraft.drafters.base import DraftRequest, StepOutcome
from truedraft.engine.policy import Goodput, StepTimes
from truedraft.models.base import ForwardOutput, Segment
from truedraft.testing import MarkovModel, ScriptedDrafter, altered


class FakeClock:
    """Seconds; each look takes `reading_s`."""

    def __init__(self, reading_s: float = 0.0) -> None:
        self.now = 100.0
        self._reading_s = reading_s

    def __call__(self) -> float:
        self.now += self._reading_s
        return self.now


class FakeTimes(StepTimes):
    """Seconds of steps by rows, the last of them for all that follow, and of a drafted token by drafter (others:
    `token_s`); a further request costs a fifth of the first."""

    def __init__(self, steps: Sequence[float], tokens: Mapping[str, float], token_s: float = 0.0) -> None:
        self.steps, self.tokens, self.token_s = steps, tokens, token_s

    def step_s(self, rows: int, contexts: Sequence[int], greedy: bool) -> float:
        return self.steps[min(rows, len(self.steps) - 1)]

    def drafting_s(self, drafter: str, requests: int, depth: int, greedy: bool) -> float:
        return self.tokens.get(drafter, self.token_s) * depth * (1.0 + 0.2 * (requests - 1))


class EvenGoodput(Goodput):
    """Goodput at even costs, so that what it decides hangs on verdicts alone."""

    def begin(self, times: StepTimes) -> None:
        super().begin(FakeTimes([1.0 + 0.002 * rows for rows in range(2_000)], {}, token_s=0.05))


def timed_model(
    clock: FakeClock, cost: Callable[[int, tuple[int, ...]], float], context_length: int = 2048
) -> MarkovModel:
    """A Markov table whose forwards take known seconds, by rows and the contexts of the requests."""
    model = MarkovModel(torch.full((3, 3, 3), 1 / 3, dtype=torch.float64), context_length=context_length)

    def forward(segments: Sequence[Segment]) -> ForwardOutput:
        rows = sum(len(segment.tokens) for segment in segments)
        clock.now += cost(rows, tuple(segment.cache.length for segment in segments))
        return model.forward(segments)

    return altered(model, forward=forward)


class TimedDrafter(ScriptedDrafter):
    """Proposes a chain as deep as its budget, in known seconds: 1 ms to begin, 2 ms a token, 3 ms to observe."""

    def __init__(self, clock: FakeClock, depth: int = 4, most: int = 1_000) -> None:
        super().__init__(lambda tokens: [], depth=depth)
        self.clock, self.most = clock, most
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
