"""What a drafter of chosen candidates proposes, as planned draws whose output distribution can be computed exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from support.head_models import MarkovWithHead
from truedraft import SamplingParams
from truedraft.core.noise import KeyedNoise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.verification.exact import PlannedDraw, Prefix


def proposal_after(drafter: Drafter, world: MarkovWithHead, before: Sequence[int]) -> Proposal:
    """What is proposed when the last of some tokens was just drawn, for a sampled request."""
    request = DraftRequest(0, SamplingParams(temperature=1.0), [0, *before])
    drafter.begin(request)
    vector = world.vector_after([0, *before][:-1])[None]
    drafter.observe([request], [StepOutcome(Proposal.empty(), (), (0,), vector)])
    return drafter.propose([request], [drafter.limits], [KeyedNoise(0, 0, 0)])[0]


def candidates_scheme(world: MarkovWithHead, drafter: Drafter) -> Callable[[Prefix, Prefix], Sequence[PlannedDraw]]:
    """The children that the drafter itself proposes at a node, as planned draws of one-hot distributions."""
    drafter.check(world)

    @cache
    def proposed(before: Prefix) -> Proposal:
        return proposal_after(drafter, world, before)

    def scheme(prefix: Prefix, drafted: Prefix) -> list[PlannedDraw]:
        tree = proposed(prefix[: len(prefix) - len(drafted)]).tree
        row = 0
        for token in drafted:
            row = 1 + next(node for node in tree.shape.children[row] if tree.host_ids[node] == token)
        eye = torch.eye(world.vocab_size, dtype=torch.float64)
        children = tree.shape.children[row]
        return [PlannedDraw(-1, eye[tree.host_ids[node]], DrawKind.DETERMINISTIC) for node in children]

    return scheme
