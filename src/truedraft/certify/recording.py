"""What a drafter knew where each token was decided, written down while an engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from truedraft.certify.delegating_drafter import DelegatingDrafter
from truedraft.core.noise import Noise
from truedraft.core.proposals import Proposal
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.verification import Rule
from truedraft.verification.rule import DeviceVerdicts, HasKind, JudgedSlot, Outcome


@dataclass(frozen=True, slots=True)
class Decision:
    """One emitted token's place in its step.

    Attributes:
        depth: tokens that the step emitted before it.
        q: `[vocab]`: the law that the first draw there was made from; None where nothing was drawn from a law.
        candidates: deterministic candidates there, in order; empty where there were none.
        used: `[vocab]`: the target's law there as the rule was given it, where laws are recorded.
    """

    depth: int
    q: Tensor | None
    candidates: tuple[int, ...]
    used: Tensor | None = None


class RecordingRule(Rule):
    """A rule that keeps the laws it was given, for the `RecordingDrafter` of the same engine.

    Args:
        inner: judges.
    """

    def __init__(self, inner: Rule) -> None:
        self._inner = inner
        self.name = inner.name  # type: ignore[misc]
        self.lossless = inner.lossless  # type: ignore[misc]
        self.judges = inner.judges  # type: ignore[misc]
        self.given: list[Tensor] = []  # of each request of the step, in order

    @property
    def greedy_form(self) -> Rule:
        """That of the inner rule."""
        return self if self._inner.greedy_form is self._inner else self._inner.greedy_form

    def decide(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> DeviceVerdicts:
        """Keep the laws, and judge."""
        self.given.extend(law.clone() for law in laws)
        return self._inner.decide(proposals, laws, noise)

    def joins(self, draws: Sequence[HasKind]) -> bool:
        """As the inner rule."""
        return self._inner.joins(draws)

    def outcomes(self, group: Sequence[JudgedSlot]) -> list[Outcome]:
        """Those of the inner rule."""
        return self._inner.outcomes(group)


class RecordingDrafter(DelegatingDrafter):
    """Drafts as another drafter does, and writes down what it knew of each emitted token.

    Args:
        inner: drafts.
        rule: keeps the laws of the same requests; None records none.
    """

    def __init__(self, inner: Drafter, rule: RecordingRule | None = None) -> None:
        super().__init__(inner)
        self._rule = rule
        self._decisions: dict[int, list[Decision]] = {}

    def taken(self, request: int) -> list[Decision]:
        """What was written down of a request, for each of its emitted tokens; forgotten here from now on."""
        return self._decisions.pop(request, [])

    def begin(self, request: DraftRequest) -> None:
        """As the inner drafter."""
        self._decisions[request.id] = []
        super().begin(request)

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        """Write down what the tokens of a step hung on, and go on as the inner drafter."""
        given = iter(self._rule.given if self._rule is not None else [])
        for request, outcome in zip(batch, outcomes, strict=True):
            if outcome.tokens:
                self._decisions[request.id].extend(_decisions(outcome, next(given, None)))
        if self._rule is not None:
            self._rule.given.clear()
        super().observe(batch, outcomes)


def _decisions(outcome: StepOutcome, laws: Tensor | None) -> list[Decision]:
    """What the tokens of one step hung on; `laws` `[slots, vocab]` are the target's."""
    proposal = outcome.proposal
    slots = (0, *(node + 1 for node in outcome.path))
    found = []
    for depth, slot in enumerate(slots[: len(outcome.tokens)]):
        draws = proposal.draws[slot]
        drawn = bool(draws) and draws[0].law >= 0 and proposal.laws is not None
        q = proposal.laws[draws[0].law].clone() if drawn and proposal.laws is not None else None
        chosen = () if drawn else [draw for draw in draws if draw.law < 0]
        fixed = tuple(proposal.tree.token_list[draw.child] for draw in chosen)
        found.append(Decision(depth, q, fixed, None if laws is None else laws[slot]))
    return found
