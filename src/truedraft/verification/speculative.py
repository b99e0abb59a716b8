"""Speculative sampling along chains and trees, by recursive rejection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.core import laws as L
from truedraft.core.noise import Noise, Purpose
from truedraft.core.proposals import DrawKind, Proposal
from truedraft.core.removal import residual_of_candidates, without_tokens
from truedraft.core.verdicts import Origin, Verdict
from truedraft.verification.deferred import DeferredRule, Numbers, Prepared
from truedraft.verification.eager import EagerBatch
from truedraft.verification.looks import Looks, host_looks, is_reduced
from truedraft.verification.rule import JudgedSlot, Outcome

_ENTRIES_TOGETHER = 1 << 16
"""Sums over so many entries stay in the processor's cache; memory for larger ones is asked of the system each time."""


@dataclass(frozen=True, slots=True)
class Walk:
    """A walk down one proposal: the accepted path, and the slot where no draw stayed."""

    path: tuple[int, ...]
    slot: int
    final: Origin

    def verdict(self, proposal: Proposal, token: int) -> Verdict:
        """The verdict, once the token that ends the walk was drawn."""
        ids = proposal.tree.token_list
        return Verdict(self.path, (*(ids[node] for node in self.path), token), self.final)


class SpeculativeSampling(DeferredRule):
    """Accept a drafted x with probability min(1, p(x)/q(x)); on rejection go on with norm(max(0, p - q)).

    Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318. With several draws at a node they are judged
    in order, each against what the rejections before it left of p (SpecInfer 2305.09781; RSD 2402.14160); drawn
    without replacement, q loses each rejected token and is renormalised. A deterministic candidate was drawn from
    a one-hot law. When no draw stays, the token is drawn from what is left of p: *recovered*; where there was
    nothing to judge it is a *bonus*. At temperature 0 the same rule accepts exactly the argmax.
    """

    name: ClassVar[str] = "speculative"
    lossless: ClassVar[bool] = True
    judges: ClassVar[frozenset[DrawKind]] = frozenset(
        {DrawKind.INDEPENDENT, DrawKind.WITHOUT_REPLACEMENT, DrawKind.DETERMINISTIC}
    )

    # The five parts of the rule. Tests break them one at a time, and must notice. Those that change laws take one law
    # `[vocab]` or many `[..., vocab]`, and look at no number in them, so that they also run on a device.

    def accept_probability(self, p_x: float, q_x: float) -> float:
        """Probability that a token drawn with probability `q_x` stays where the target gives it `p_x`."""
        if p_x <= 0.0:
            return 0.0  # also where q_x is 0: a token that the target forbids never stays
        return 1.0 if p_x >= q_x else p_x / q_x

    def rejected(self, p: Tensor, q: Tensor) -> Tensor:
        """What is left of the target's laws `[..., vocab]` after draws from `q` were rejected."""
        return L.residual(p, q)

    def rejected_candidate(self, p: Tensor, tokens: Tensor) -> Tensor:
        """The same for deterministic candidates `[..., candidates]`: `rejected` with q one-hot at one after another."""
        return residual_of_candidates(p, tokens)

    def left_of_candidate(self, p_x: float, taken: float) -> float:
        """The entry of `rejected_candidate` at another token, of target probability `p_x`.

        Args:
            p_x: before anything was rejected.
            taken: the same of all rejected candidates together.
        """
        left = 1.0 - taken
        return p_x / left if left > 0.0 else float(p_x > 0.0)

    def removed(self, q: Tensor, tokens: Tensor) -> Tensor:
        """The draft's laws `[..., vocab]` after `tokens` `[..., 1]` were taken out, without replacement."""
        return without_tokens(q, tokens)

    def verify_here(
        self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]
    ) -> list[Verdict]:
        """Judge a batch, looking at laws as they are needed; see `Rule.verify`."""
        looks = host_looks(self, proposals, laws)
        walks = [self._walk(*each) for each in zip(proposals, looks, noise, strict=True)]
        finals = _draw_finals(walks, [own.left for own in looks], noise)
        return [walk.verdict(proposal, token) for walk, proposal, token in zip(walks, proposals, finals, strict=True)]

    def prepare(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> Prepared:
        """All that any walk could look at, and the token that would end it at each slot; see `DeferredRule.prepare`."""
        batch = EagerBatch(self, proposals, laws, noise)

        def conclude(numbers: Numbers) -> list[Verdict]:
            verdicts = []
            for proposal, looks, own in zip(proposals, batch.looks(numbers), noise, strict=True):
                walk = self._walk(proposal, looks, own)
                verdicts.append(walk.verdict(proposal, looks.finals[walk.slot]))
            return verdicts

        return Prepared(batch.wanted, conclude)

    def _walk(self, proposal: Proposal, looks: Looks, noise: Noise) -> Walk:
        """Walk from the root down, accepting one child at each node, until no draw of a node stays."""
        path: list[int] = []
        slot = 0
        while True:
            child = self.accepted_child(proposal, slot, looks, noise, len(path))
            if child is None:
                return Walk(tuple(path), slot, Origin.RECOVERED if proposal.draws[slot] else Origin.BONUS)
            path.append(child)
            slot = child + 1

    def accepted_child(self, proposal: Proposal, slot: int, looks: Looks, noise: Noise, depth: int) -> int | None:
        """The child of a slot whose draw stays, its draws judged one after another; None where none does."""
        # Looks first: they go on past the last rejection, to the law of the token that ends the walk.
        for index, ((p_x, q_x), draw) in enumerate(zip(looks.node(slot), proposal.draws[slot], strict=True)):
            if noise.uniform(Purpose.ACCEPT, depth, index) < self.accept_probability(p_x, q_x):
                return draw.child
        return None

    def outcomes(self, group: Sequence[JudgedSlot]) -> list[Outcome]:
        (slot,) = group
        p = slot.p
        outcomes = []
        reach = 1.0
        reduced: dict[int, Tensor] = {}
        for draw in slot.draws:
            q = reduced[draw.law] if is_reduced(draw, reduced) else draw.q
            accept = self.accept_probability(float(p[draw.token]), float(q[draw.token]))
            outcomes.append(Outcome(reach * accept, (draw.token,), accepted=1))
            reach *= 1.0 - accept
            if reach == 0.0:
                return outcomes
            p = self.rejected(p, q)
            if draw.kind is DrawKind.WITHOUT_REPLACEMENT:
                reduced[draw.law] = self.removed(q, torch.tensor([draw.token]))
        outcomes.extend(Outcome(reach * float(mass), (token,), accepted=0) for token, mass in enumerate(p))
        return outcomes


def _draw_finals(walks: Sequence[Walk], left: Sequence[Tensor], noise: Sequence[Noise]) -> list[int]:
    """Draw the token that ends each walk, some walks at once, from the laws `[vocab]` that are left there."""
    if not walks:
        return []
    purposes = {Origin.RECOVERED: Purpose.RECOVERED, Origin.BONUS: Purpose.BONUS}
    uniforms = [each.uniform(purposes[walk.final], len(walk.path)) for walk, each in zip(walks, noise, strict=True)]
    together = max(1, _ENTRIES_TOGETHER // left[0].shape[-1])
    drawn = [
        L.draw(
            torch.stack(list(left[first : first + together])),
            torch.tensor(uniforms[first : first + together], dtype=torch.float64),
        )
        for first in range(0, len(left), together)
    ]
    tokens: list[int] = (torch.cat(drawn) if len(drawn) > 1 else drawn[0]).tolist()
    return tokens
