"""Rules that compare: the distribution, or distribution and noise, determine the token independently of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.coupled import coupled_choices
from truedraft.core.noise import Noise
from truedraft.core.probs import most_likely
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.verdict import Verdict
from truedraft.verification.rule import BatchVerdicts, JudgedRow, Outcome, Rule, Sees, verdict_at


class ArgmaxRule(Rule):
    """Follow the child with the token of a tree row's largest entry (the lowest id among equals), if there is one.

    This is the decision of any lossless rule on a greedy request, which has one-hot distributions. Logits in any dtype
    suffice. A row with NaN gives some token, which the caller discards.
    """

    name: ClassVar[str] = "argmax"
    lossless: ClassVar[bool] = True
    sees: ClassVar[Sees] = "argmax"
    judges: ClassVar[frozenset[DrawKind]] = frozenset(DrawKind)

    def accept(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
        if not proposals:
            return BatchVerdicts.made([])
        return BatchVerdicts((most_likely(probs[0] if len(probs) == 1 else torch.cat(list(probs))),), _followed)

    def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
        (row,) = group
        token = int(most_likely(row.p))
        return [Outcome(1.0, (token,), int(token in {draw.token for draw in row.draws}))]


class CoupledSampling(Rule):
    """Follow the child with the token argmax(log p + G(seed, sample, position, token)), if there is one.

    Daliri et al. 2408.07978. The emitted tokens never depend on the proposal, so proposals of every kind are verified
    exactly, and the tokens of a seed are the same with any drafter or none. A drafter that takes the argmax of log q +
    G under the same noise agrees where the distributions nearly do: at least (1 - TV)/(1 + TV) of the time.
    """

    name: ClassVar[str] = "coupled"
    lossless: ClassVar[bool] = True
    coupled: ClassVar[bool] = True
    greedy_form: Rule = ArgmaxRule()
    judges: ClassVar[frozenset[DrawKind]] = frozenset(DrawKind)

    def accept(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
        if not proposals:
            return BatchVerdicts.made([])
        places = [
            (own, depth)  # a tree row at depth d decides the d-th token of the step, d from 0
            for proposal, _, own in zip(proposals, probs, noise, strict=True)
            for depth in (0, *proposal.tree.shape.depths)
        ]
        # A row without a valid distribution has no token; the caller discards the result there.
        last = transfers.upload([table.shape[-1] - 1 for table in probs for _ in range(len(table))], probs[0].device)
        return BatchVerdicts((torch.minimum(coupled_choices(probs, places)[:, 0], last),), _followed)

    def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
        """A tree row ends with a token of p, accepted where a child has it.

        Exact for draws that do not share the noise. For coupled draws it is the marginal, which determines the
        distribution of the answer, because later positions have independent noise.
        """
        (row,) = group
        drawn = {draw.token for draw in row.draws}
        return [Outcome(float(mass), (token,), int(token in drawn)) for token, mass in enumerate(row.p)]


def _followed(proposals: Sequence[Proposal], numbers: Sequence[Sequence[float]]) -> list[Verdict]:
    (tokens,) = numbers
    verdicts = []
    root = 0
    for proposal in proposals:
        children, ids = proposal.tree.shape.children, proposal.tree.host_ids
        path: list[int] = []
        while True:
            row = path[-1] + 1 if path else 0
            token = int(tokens[root + row])
            child = next((node for node in children[row] if ids[node] == token), None)
            if child is None:
                break
            path.append(child)
        verdicts.append(verdict_at(proposal, path, token))
        root += len(children)
    return verdicts
