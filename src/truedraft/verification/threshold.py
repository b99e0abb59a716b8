"""Lossy rules that draw nothing: a drafted token stays where the target gives it enough."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from truedraft.core import transfers
from truedraft.core.divergence import TokenDivergence
from truedraft.core.laws import most_likely
from truedraft.core.noise import Noise
from truedraft.core.proposals import DrawKind, Proposal
from truedraft.core.verdicts import Origin, Verdict
from truedraft.verification.deferred import DeferredRule, Numbers, Prepared
from truedraft.verification.rule import JudgedSlot, Outcome


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the rule looks at of one request, on the host.

    Attributes:
        best: the argmax of each slot's law.
        largest: its probability.
        least: for each slot what a child's probability is compared with; nothing at a slot without children.
        p_x: for each node the probability that the target gives its token.
    """

    best: list[int]
    largest: Sequence[float]
    least: dict[int, float]
    p_x: Sequence[float]


def _inner_slots(proposal: Proposal) -> list[int]:
    """Slots with children."""
    return [slot for slot, children in enumerate(proposal.tree.shape.children) if children]


def _seen(
    proposal: Proposal,
    best: Sequence[float],
    largest: Sequence[float],
    least: Sequence[float],
    p_x: Sequence[float],
) -> _Seen:
    least_of = dict(zip(_inner_slots(proposal), least, strict=True))
    return _Seen([int(token) for token in best], largest, least_of, p_x)


class ThresholdAcceptance(DeferredRule):
    """A node stays if the target's probability of its token passes a threshold, and all nodes above it stay.

    The deepest node that stays wins, among equally deep ones that with the largest product of probabilities, among
    equals the one proposed first. Its path is emitted, then the argmax of p behind it. No noise is used, and how a
    token was drafted plays no part: draws of every kind are judged.

    Given the candidates nothing is left to chance, so an emitted token x has a one-hot law, at a total variation of
    1 - p(x) from p and a KL divergence of -log p(x).
    """

    lossless: ClassVar[bool] = False
    by_groups: ClassVar[bool] = False
    judges: ClassVar[frozenset[DrawKind]] = frozenset(DrawKind)

    @abstractmethod
    def thresholds(self, laws: Tensor) -> Tensor:
        """What the probability of a child is compared with, `[rows]`, for each of the laws `[rows, vocab]`."""

    @abstractmethod
    def stays(self, p_x: float, threshold: float) -> bool:
        """Whether a token of target probability `p_x` passes."""

    def verify_here(
        self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]
    ) -> list[Verdict]:
        """Judge a batch of proposals; see `Rule.verify`. A greedy request is given laws at temperature 1."""
        prepared = self.prepare(proposals, laws, noise)
        return prepared.conclude(transfers.fetch(prepared.wanted))

    def prepare(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> Prepared:
        """All that a verdict looks at; see `DeferredRule.prepare`."""
        wanted: list[Tensor] = []
        for proposal, rows in zip(proposals, laws, strict=True):
            shape = proposal.tree.shape
            tokens = proposal.tree.tokens.to(rows.device).clamp(0, rows.shape[-1] - 1)
            best = most_likely(rows)
            wanted += [
                best,
                rows.gather(-1, best[:, None]),
                self.thresholds(rows[_inner_slots(proposal)]),
                rows[[parent + 1 for parent in shape.parents], tokens],
            ]

        def conclude(numbers: Numbers) -> list[Verdict]:
            found = iter(numbers)
            return [self._verdict(proposal, _seen(proposal, *itertools.islice(found, 4))) for proposal in proposals]

        return Prepared(wanted, conclude)

    def _verdict(self, proposal: Proposal, seen: _Seen) -> Verdict:
        shape, ids = proposal.tree.shape, proposal.tree.token_list
        path = self._best_path(proposal, seen)
        slots = (0, *(node + 1 for node in path))
        end = slots[-1]
        divergence = (
            *(
                TokenDivergence.of_choice(seen.p_x[node], seen.largest[slot])
                for node, slot in zip(path, slots, strict=False)
            ),
            TokenDivergence.of_choice(seen.largest[end], seen.largest[end]),
        )
        final = Origin.RECOVERED if shape.children[end] else Origin.BONUS
        return Verdict(path, (*(ids[node] for node in path), seen.best[end]), final, divergence)

    def _best_path(self, proposal: Proposal, seen: _Seen) -> tuple[int, ...]:
        """Nodes of the path that wins, from the root's child down."""
        shape = proposal.tree.shape
        reached: dict[int, tuple[int, float]] = {-1: (0, 1.0)}  # nodes that stay: their depth, and product of p
        for node, parent in enumerate(shape.parents):  # a parent comes before its children
            if parent in reached and self.stays(seen.p_x[node], seen.least[parent + 1]):
                depth, product = reached[parent]
                reached[node] = depth + 1, product * seen.p_x[node]
        best = max(reached, key=lambda node: reached[node])  # the first of equals
        path: list[int] = []
        while best >= 0:
            path.append(best)
            best = shape.parents[best]
        return tuple(reversed(path))

    def outcomes(self, group: Sequence[JudgedSlot]) -> list[Outcome]:
        """It is certain how a slot ends; see `Rule.outcomes`.

        Of several that stay, this is the likeliest: right where nothing is drafted below them, or where at most one
        stays. In deeper trees the choice is by whole paths, which no kernel of one slot can know; there `verify`
        itself, which uses no noise, gives the law.
        """
        (slot,) = group
        least = float(self.thresholds(slot.p[None]))
        p_x = [float(slot.p[draw.token]) for draw in slot.draws]
        staying = [i for i, mass in enumerate(p_x) if self.stays(mass, least)]
        if not staying:
            return [Outcome(1.0, (int(most_likely(slot.p)),), accepted=0)]
        chosen = max(staying, key=lambda i: p_x[i])
        return [Outcome(float(i == chosen), (draw.token,), 1) for i, draw in enumerate(slot.draws[: chosen + 1])]
