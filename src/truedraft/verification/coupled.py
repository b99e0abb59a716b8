"""Coupled sampling: the token is fixed by law and noise; verification is comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.core.noise import Noise
from truedraft.core.proposals import DrawKind, Proposal
from truedraft.core.verdicts import Origin, Verdict
from truedraft.verification.rule import DrawnToken, NodeOutcome, Rule


def coupled_choice(laws: Tensor, gumbel: Tensor | None) -> Tensor:
    """argmax(log p(v) + G(v)) for each row; the lowest id among equals.

    Drafter and target call this with the same noise, so they agree where their laws nearly do: at least
    (1 - TV)/(1 + TV) of the time (arXiv 2408.07978). Without noise (greedy) it is the argmax.

    Args:
        laws: `[rows, vocab]`.
        gumbel: `[rows, vocab]` or `[vocab]`, float64; None is G = 0.

    Returns:
        Token ids `[rows]`.
    """
    if gumbel is None:
        return laws.argmax(dim=-1)
    return (laws.double().log() + gumbel).argmax(dim=-1)


class CoupledSampling(Rule):
    """Follow the child that carries argmax(log p + G(seed, sample, position, token)), if there is one.

    Daliri et al. 2408.07978. What is emitted never depends on the proposal, so proposals of every kind are judged
    exactly, and the tokens of a seed are the same with any drafter or none. Greedy is the case G = 0.
    """

    name: ClassVar[str] = "coupled"
    lossless: ClassVar[bool] = True
    judges: ClassVar[frozenset[DrawKind]] = frozenset(DrawKind)

    def verify(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> list[Verdict]:
        """Judge a batch of proposals; see `Rule.verify`."""
        return [self._follow(*each) for each in zip(proposals, laws, noise, strict=True)]

    def _follow(self, proposal: Proposal, laws: Tensor, noise: Noise) -> Verdict:
        choices: list[int] = coupled_choice(laws, _noise_of_slots(proposal, laws, noise)).tolist()
        ids = proposal.tree.token_list
        path: list[int] = []
        slot = 0
        while True:
            token = choices[slot]
            children = proposal.tree.shape.children[slot]
            child = next((node for node in children if ids[node] == token), None)
            if child is None:
                final = Origin.RECOVERED if children else Origin.BONUS
                return Verdict(tuple(path), (*(ids[node] for node in path), token), final)
            path.append(child)
            slot = child + 1

    def outcomes(self, p: Tensor, draws: Sequence[DrawnToken]) -> list[NodeOutcome]:
        """How a node ends: with a token of law `p`, accepted where a child carries it; see `Rule.outcomes`.

        The noise is integrated over, so this is exact for draws that do not share it; for coupled draws it is the
        marginal, which is all that the law of the answer depends on: later positions have noise of their own.
        """
        drawn = {draw.token for draw in draws}
        return [NodeOutcome(float(mass), token, token in drawn) for token, mass in enumerate(p)]


def _noise_of_slots(proposal: Proposal, laws: Tensor, noise: Noise) -> Tensor | None:
    """Noise `[slots, vocab]`: a slot at depth d decides the d-th token of the step, d from 0."""
    depths = (0, *proposal.tree.shape.depths)
    rows = [noise.gumbel(depth, laws.shape[-1], laws.device) for depth in depths]
    known = [row for row in rows if row is not None]
    return torch.stack(known) if known else None
