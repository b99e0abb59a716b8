"""A contestant answers groups of prompts. Ours: the engine, plain or with a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from truedraft.bench.breakdown import StepCosts
from truedraft.bench.rows import Outcome
from truedraft.core.counters import Counters
from truedraft.core.sampling import SamplingParams
from truedraft.engine import Engine, StepRecord
from truedraft.errors import ModelError

PLAIN = "plain"


class Contestant(ABC):
    """One way of answering.

    Attributes:
        name: for reports; unique in a run.
        ours: whether it is this package's engine, which promises the tokens of plain decoding.
        costs: what its steps should cost; None where nobody measured.
    """

    name: str
    ours: bool
    costs: StepCosts | None = None

    @abstractmethod
    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Outcome:
        """Answer prompts, given as token ids, together.

        Raises:
            TruedraftError: one of them could not be answered.
        """


class OurEngine(Contestant):
    """Our engine.

    Args:
        name: for reports.
        engine: composed of target, drafter and rule.
        costs: curves of its target and drafter.
    """

    ours = True

    def __init__(self, name: str, engine: Engine, costs: StepCosts | None = None) -> None:
        self.name = name
        self.engine = engine
        self.costs = costs

    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Outcome:
        """Answer prompts in one batch; see `Contestant.answer`."""
        steps: list[StepRecord] = []
        self.engine.listeners.append(steps.append)
        try:
            answers = self.engine.generate([list(prompt) for prompt in prompts], params)
        finally:
            self.engine.listeners.pop()
        broken = next((answer.error for answer in answers if answer.error is not None), None)
        if broken is not None:
            raise ModelError(broken)
        counters = sum((answer.stats for answer in answers), Counters())
        decoding = [step for step in steps if not step.prefill]
        return Outcome(
            token_ids=tuple(tuple(answer.token_ids) for answer in answers),
            first_token_s=tuple(answer.timing.first_token_s for answer in answers),
            prefill_s=sum(step.total_s for step in steps if step.prefill),
            forwards=len(decoding),
            draft_forwards=sum(self._draft_forwards(step) for step in decoding),
            context_tokens=sum(sum(step.contexts) for step in decoding),
            target_calls=counters.target_calls,
            mean_acceptance_length=counters.mean_acceptance_length,
            counters=counters,
            steps=steps,
        )

    def _draft_forwards(self, step: StepRecord) -> int:
        """A draft model runs once a level for the whole batch; no level lies below the drafter's limit or the nodes."""
        if getattr(self.engine.drafter, "model", None) is None:
            return 0
        return min(self.engine.drafter.limits.depth, step.nodes)
