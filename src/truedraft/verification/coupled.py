"""Coupled sampling: the token is fixed by distribution and noise; verification is comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.coupled import Place, coupled_choices
from truedraft.core.noise import Noise, is_greedy
from truedraft.core.probs import most_likely
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.verdict import Verdict
from truedraft.verification.rule import BatchVerdicts, HostVerdicts, JudgedRow, Outcome, Rule, verdict_at


def coupled_choice(probs: Tensor, gumbel: Tensor | None) -> Tensor:
    """argmax(log p(v) + G(v)) for each row; the lowest id among equals.

    Drafter and target call this with the same noise, so they agree where their distributions nearly do: at least
    (1 - TV)/(1 + TV) of the time (arXiv 2408.07978). Without noise (greedy) it is the argmax.

    Args:
        probs: `[rows, vocab]`. Without noise also logits, in any floating dtype: only their order matters.
        gumbel: `[rows, vocab]` or `[vocab]`, float64; None is G = 0.

    Returns:
        Token ids `[rows]`.
    """
    if gumbel is None:
        return most_likely(probs)
    return most_likely(torch.log(probs.double()).add_(gumbel))


class CoupledSampling(Rule):
    """Follow the child that carries argmax(log p + G(seed, sample, position, token)), if there is one.

    Daliri et al. 2408.07978. What is emitted never depends on the proposal, so proposals of every kind are judged
    exactly, and the tokens of a seed are the same with any drafter or none. Greedy is the case G = 0: then only the
    argmax of a row matters, so raw logits do for its distribution, and no distribution need be computed.
    """

    name: ClassVar[str] = "coupled"
    lossless: ClassVar[bool] = True
    coupled: ClassVar[bool] = True
    judges: ClassVar[frozenset[DrawKind]] = frozenset(DrawKind)

    def decide(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
        """Fix the token of every tree row; the accepted path follows from them where they are read.

        Where a request is greedy (its noise has no Gumbel numbers), `probs` may hold for it any rows
        `[rows, vocab]` with the argmax of the distributions, such as logits in the model's dtype. A row with NaN gives
        some token: the caller discards it.
        """
        if not proposals:
            return HostVerdicts([])
        return _RowTokens(_choices(proposals, probs, noise))

    def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
        """A tree row ends with a token of p, accepted where a child carries it.

        The noise is integrated over, so this is exact for draws that do not share it; for coupled draws it is the
        marginal, which is all that the distribution of the answer depends on: later positions have noise of their own.
        """
        (row,) = group
        drawn = {draw.token for draw in row.draws}
        return [Outcome(float(mass), (token,), int(token in drawn)) for token, mass in enumerate(row.p)]


def _choices(proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> Tensor:
    """The tokens `[rows]` of all proposals: a tree row at depth d decides the d-th token of the step, d from 0."""
    chosen: dict[int, Tensor] = {}
    greedy: list[int] = []
    sampled: list[int] = []
    places: list[Place] = []
    for number, (proposal, dist, own) in enumerate(zip(proposals, probs, noise, strict=True)):
        if is_greedy(own, dist.shape[-1], dist.device):
            greedy.append(number)
        else:
            sampled.append(number)
            places += [(own, depth) for depth in (0, *proposal.tree.shape.depths)]
    if greedy:
        likeliest = coupled_choice(torch.cat([probs[number] for number in greedy]), None)
        chosen.update(zip(greedy, likeliest.split([len(probs[number]) for number in greedy]), strict=True))
    if sampled:
        tables = [probs[number] for number in sampled]
        # A row that is no distribution has no token; whatever is taken there, the caller discards.
        last = transfers.upload([table.shape[-1] - 1 for table in tables for _ in range(len(table))], tables[0].device)
        tokens = torch.minimum(coupled_choices(tables, places)[:, 0], last)
        chosen.update(zip(sampled, tokens.split([len(table) for table in tables]), strict=True))
    return chosen[0] if len(chosen) == 1 else torch.cat([chosen[number] for number in range(len(proposals))])


@dataclass(frozen=True, slots=True)
class _RowTokens:
    """The token at every tree row `[rows]`, int64, of all requests, one behind another."""

    tokens: Tensor

    @property
    def wanted(self) -> Sequence[Tensor]:
        return (self.tokens,)

    def verdicts(self, proposals: Sequence[Proposal], numbers: Sequence[Sequence[float]]) -> list[Verdict]:
        verdicts = []
        root = 0
        for proposal in proposals:
            children, ids = proposal.tree.shape.children, proposal.tree.host_ids
            path: list[int] = []
            while True:
                row = path[-1] + 1 if path else 0
                token = int(numbers[0][root + row])
                child = next((node for node in children[row] if ids[node] == token), None)
                if child is None:
                    break
                path.append(child)
            verdicts.append(verdict_at(proposal, path, token))
            root += len(children)
        return verdicts
