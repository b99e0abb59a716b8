"""Drafters and controllers that follow a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.proposal import Proposal
from truedraft.core.tree import TokenTree
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.engine.policy import Controller, Decision, RequestView

Script = Callable[[Sequence[int]], Sequence[Sequence[int]]]


class ScriptedDrafter(Drafter):
    """Proposes paths from a function of the text so far, as deterministic candidates.

    Args:
        script: from the tokens so far to paths of guessed tokens; paths that share prefixes are merged. `propose`
            raises its exceptions.

    Attributes:
        outcomes: all observed outcomes, in order, with the request's id.
    """

    name: ClassVar[str] = "scripted"

    def __init__(self, script: Script, depth: int = 8, nodes: int = 64) -> None:
        self._script = script
        self.limits = Budget(depth=depth, width=nodes, nodes=nodes)
        self.outcomes: list[tuple[int, StepOutcome]] = []
        self.ended: list[int] = []

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        proposals = []
        for request, budget in zip(batch, budgets, strict=True):
            nodes: dict[tuple[int, ...], None] = {}  # by path, in order
            for path in self._script(request.tokens):
                for length in range(1, min(len(path), budget.depth) + 1):
                    if len(nodes) < budget.nodes:
                        nodes[tuple(path[:length])] = None
            proposals.append(Proposal.deterministic(TokenTree.from_paths(list(nodes))))
        return proposals

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        self.outcomes.extend((request.id, outcome) for request, outcome in zip(batch, outcomes, strict=True))

    def end(self, request: DraftRequest) -> None:
        self.ended.append(request.id)


class ScriptedController(Controller):
    """Returns given budgets in turn, one per request and step, and then the last one forever."""

    def __init__(self, budgets: Sequence[Budget]) -> None:
        self._budgets = list(budgets)

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        drafters = (next(iter(view.limits)) for view in views)
        return [
            Decision(name, self._budgets.pop(0) if len(self._budgets) > 1 else self._budgets[0]) for name in drafters
        ]
