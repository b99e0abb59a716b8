"""Every tree that can be drawn, with its probability, and what a rule emits of it: distributions as exact sums."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from truedraft.core.params import SamplingParams
from truedraft.core.probs import probs_from_logits
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.drafters.draws import Drawing, OpenNode
from truedraft.verification.exact import distance, target_dist
from truedraft.verification.rule import DrawnToken, JudgedRow
from truedraft.verification.speculative import SpeculativeSampling

Law: TypeAlias = Callable[[tuple[int, ...]], Tensor]
"""The target's distribution `[vocab]`, float64, after tokens."""


class Script(Drawing):
    """Draws what a script says, without replacement, and notes how probable that was and how many choices there were.

    `stored` changes the distributions that are stored, not those that are drawn from.
    """

    def __init__(self, choices: Sequence[int], kind: DrawKind, stored: Callable[[Tensor], Tensor]) -> None:
        self.kind, self.choices, self.stored = kind, choices, stored
        self.counts: list[int] = []
        self.probability = 1.0

    def draw(self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]) -> tuple[Tensor, Tensor | None]:
        probs, vocab = probs_from_logits(logits, params), logits.shape[-1]
        tokens = torch.full((len(nodes), min(max(node.width for node in nodes), vocab)), vocab)
        for row, q, node in zip(tokens, probs.double(), nodes, strict=True):
            q = q / q.sum()
            ids = q.nonzero().flatten().tolist()
            orders = list(itertools.permutations(ids, min(node.width, len(ids))))
            place = self.choices[len(self.counts)] if len(self.counts) < len(self.choices) else 0
            self.counts.append(len(orders))
            left = 1.0
            for token in orders[place]:
                self.probability *= float(q[token]) / left
                left -= float(q[token])
            row[: len(orders[place])] = torch.tensor(orders[place])
        return tokens, self.stored(probs)


def emitted(proposal: Proposal, law: Law, length: int) -> dict[tuple[int, ...], float]:
    """The distribution of the first tokens when the rule judges a proposal against the target."""
    found: dict[tuple[int, ...], float] = {}
    rule, ids = SpeculativeSampling(), proposal.tree.host_ids

    def walk(row: int, path: tuple[int, ...], reach: float) -> None:
        if len(path) == length:
            found[path] = found.get(path, 0.0) + reach
            return
        draws = proposal.draws[row] if row >= 0 else ()
        assert proposal.probs is not None
        drawn = [DrawnToken(ids[own.child], own.dist, proposal.probs[own.dist].double(), own.kind) for own in draws]
        for outcome in rule.outcomes([JudgedRow(law(path), tuple(drawn))]):
            below = [own.child for own in draws if outcome.accepted and ids[own.child] == outcome.tokens[0]]
            walk(below[0] + 1 if below else -1, (*path, *outcome.tokens), reach * outcome.probability)

    walk(0, (), 1.0)
    return found


def emitted_distance(
    propose: Callable[[], Proposal],
    module: Any,
    kind: DrawKind,
    law: Law,
    length: int,
    patch: pytest.MonkeyPatch,
    stored: Callable[[Tensor], Tensor] = lambda probs: probs,
) -> float:
    """Total variation between what is emitted, over all trees that can be drawn, and the target's distribution.

    `propose` draws by `drawing_for` of the module.
    """
    total, weight = dict[tuple[int, ...], float](), 0.0
    choices: list[int] | None = []
    while choices is not None:
        script = Script(choices, kind, stored)
        patch.setattr(module, "drawing_for", lambda params, width, script=script: script)
        proposal = propose()
        weight += script.probability
        for path, reach in emitted(proposal, law, length).items():
            total[path] = total.get(path, 0.0) + script.probability * reach
        choices = [*choices, *[0] * (len(script.counts) - len(choices))]
        while choices and choices[-1] + 1 == script.counts[len(choices) - 1]:
            choices.pop()
        choices = [*choices[:-1], choices[-1] + 1] if choices else None
    assert weight == pytest.approx(1.0, abs=1e-9)
    return distance(total, target_dist(law, length))
