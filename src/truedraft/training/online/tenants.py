"""A drafter with separate heads for each tenant, once there are any."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from truedraft.core.budget import Budget, Hint
from truedraft.core.noise import Noise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.drafters.heads.base import HeadDrafter
from truedraft.drafters.heads.head import Head
from truedraft.drafters.held import Held
from truedraft.models.base import LanguageModel


class Tenants(Drafter):
    """Drafts for each request with the heads of its scope, or else with the original ones of `base`."""

    def __init__(self, base: HeadDrafter[Any, Any]) -> None:
        self.base = base
        self.name = base.name  # type: ignore[misc]
        self.limits, self.features, self.trees, self.branching = base.limits, base.features, base, base.branching
        self.ranks, self.levels = base.ranks, base.levels
        self.observes_lazily = base.observes_lazily
        self._own: dict[Hashable, HeadDrafter[Any, Any]] = {}
        self._drafts: dict[int, HeadDrafter[Any, Any]] = {}  # by request
        self.held = Held(
            noted=[self._drafts],
            request_bytes=base.held.request_bytes,
            token_bytes=base.held.token_bytes,
            heads=base.held.heads,  # tenants' heads are in the same place
            tokens=lambda: sum(each.held.tokens() for each in {*self._drafts.values()}),
        )

    def take(self, scope: Hashable, head: Head | None) -> None:
        """Use a scope's own heads from the next `begin` on; None: the common heads."""
        if head is None:
            self._own.pop(scope, None)
        else:
            self._own[scope] = self.base.with_head(head)

    def _groups(self, batch: Sequence[DraftRequest]) -> list[tuple[HeadDrafter[Any, Any], list[int]]]:
        found: dict[int, tuple[HeadDrafter[Any, Any], list[int]]] = {}
        for place, request in enumerate(batch):
            drafter = self._drafts[request.id]
            found.setdefault(id(drafter), (drafter, []))[1].append(place)
        return list(found.values())

    @property
    def warmups(self) -> int:
        return sum(each.warmups for each in {self.base, *self._own.values(), *self._drafts.values()})

    @property
    def kinds(self) -> frozenset[DrawKind]:
        return self.base.kinds

    def kinds_for(self, judged: frozenset[DrawKind]) -> frozenset[DrawKind]:
        return self.base.kinds_for(judged)

    def hint(self, request: DraftRequest) -> Hint:
        return self._drafts[request.id].hint(request) if request.id in self._drafts else self.base.hint(request)

    @property
    def report(self) -> Mapping[str, float]:
        return self.base.report

    def check(self, target: LanguageModel) -> None:
        self.base.check(target)

    def begin(self, request: DraftRequest) -> None:
        drafter = self._drafts[request.id] = self._own.get(request.scope, self.base)
        drafter.begin(request)

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        proposals = [Proposal.empty()] * len(batch)
        for drafter, places in self._groups(batch):
            own = [batch[i] for i in places], [budgets[i] for i in places], [noise[i] for i in places]
            made = drafter.propose(*own)
            for place, proposal in zip(places, made, strict=True):
                proposals[place] = proposal
        return proposals

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        for drafter, places in self._groups(batch):
            drafter.observe([batch[place] for place in places], [outcomes[place] for place in places])

    def end(self, request: DraftRequest) -> None:
        drafter = self._drafts.pop(request.id, None)
        if drafter is not None:
            drafter.end(request)
