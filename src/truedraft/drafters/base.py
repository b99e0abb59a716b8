"""The contract of a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.proposals import DrawKind, Proposal
from truedraft.core.sampling import SamplingParams
from truedraft.drafters.size_plans import SizePlan
from truedraft.models.base import LanguageModel


@dataclass(eq=False, slots=True)
class DraftRequest:
    """What a drafter sees of a request; the engine owns and grows it.

    Attributes:
        id: unique in its engine.
        params: sampling options.
        tokens: prompt and answer so far; all but the last are in the target's cache.
    """

    id: int
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What became of one request in one step.

    Attributes:
        proposal: what was proposed.
        path: accepted nodes of it, from the root's child down, cut where the answer ended.
        tokens: what was emitted.
        hidden: `[rows, width]`: vectors that entered the LM head, row 0 at the last token of the context, row i + 1
            at node i; None unless the drafter declared `needs_hidden`, or after a part of a prompt that is not its
            last.
    """

    proposal: Proposal
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    hidden: Tensor | None


class Drafter(ABC):
    """Proposes token trees and observes what became of them.

    The engine calls `begin` once for each request, then for each step `propose` and `observe` with all requests that
    took part, then `end`. A part of a prompt is a step with an empty proposal, and `observe` follows it too.

    Attributes:
        name: for reports.
        limits: upper limits on what it proposes; a controller decides within them.
        needs_hidden: whether `observe` must be given the vectors that enter the target's LM head.
    """

    name: ClassVar[str]
    limits: Budget
    needs_hidden: ClassVar[bool] = False

    @property
    @abstractmethod
    def kinds(self) -> frozenset[DrawKind]:
        """The kinds of draws that it makes for sampled requests."""

    def check(self, target: LanguageModel) -> None:  # noqa: B027 - most drafters fit every target
        """Refuse a target that it does not fit, before anything runs.

        Raises:
            CompositionError: says why.
        """

    def begin(self, request: DraftRequest) -> None:  # noqa: B027 - optional
        """A request starts; its prompt is in `request.tokens`."""

    def size_plans(self, params: SamplingParams) -> Sequence[SizePlan]:
        """Sizes to choose from by measuring, for requests with such options.

        Empty where they were chosen, or where nobody measured what they bring.
        """
        return ()

    @abstractmethod
    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        """Guess for each request, within its budget; at budget zero no work is done and the proposal is empty.

        Whether a draw exists may depend on tokens already in the proposal, never on the token that it draws
        (DESIGN section 2, predictable choice).
        """

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:  # noqa: B027 - optional
        """The step is over; `request.tokens` already holds what it emitted."""

    def end(self, request: DraftRequest) -> None:  # noqa: B027 - optional
        """A request is over; give back what was held for it. Also called for requests that failed."""
