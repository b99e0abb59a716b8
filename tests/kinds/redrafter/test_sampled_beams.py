"""Drawn beams: the exact distribution of what is emitted, for every order of draws, and what they propose.

A drawn tree depends on the tokens that are drawn and on the numbers behind the perturbed scores. For each of several
fixed sets of these numbers all trees are enumerated with the probability of their tokens, and the distribution of what
the rule emits must be the target's, to rounding: cutting by score may not look at the token whose presence it decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from support.drawn_trees import emitted_distance
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.params import SamplingParams
from truedraft.core.probs import probs_from_logits
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.drafters.base import DraftRequest
from truedraft.drafters.draws import Child
from truedraft.kinds.redrafter import sampled_beams as sampled_beams
from truedraft.kinds.redrafter.beams import BeamTrees
from truedraft.kinds.redrafter.sampled_beams import SampledBeams
from truedraft.verification.coupled import CoupledSampling

VOCAB, LENGTH = 3, 2
SAMPLED = SamplingParams(temperature=1.0)
SEEDED = SamplingParams(temperature=1.0, seed=1)
EXACT = 1e-12


def dist(name: str, path: Sequence[int]) -> Tensor:
    return _dist(name, tuple(path))


@cache
def _dist(name: str, path: tuple[int, ...]) -> Tensor:
    """A distribution for every path of tokens, far from uniform."""
    seed = sum((token + 2) * 7**place for place, token in enumerate(path)) + (1000 if name == "p" else 0)
    weights = torch.rand(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 2 + 0.02
    return weights / weights.sum()


class PathRunner:
    """In place of a recurrent head: the state is the path itself, behind each request's own drawn token."""

    def context(self, hidden: Tensor) -> Tensor:
        return hidden

    def advance(self, state: Tensor | None, tokens: Tensor) -> Tensor:
        column = tokens[:, None]
        return column[:, :0] if state is None else torch.cat([state, column], dim=1)

    def logits(self, context: Tensor, state: Tensor) -> Tensor:
        return torch.stack([dist("q", path) for path in state.tolist()]).log()


def propose(noise: KeyedNoise, beams: int, nodes: int, params: SamplingParams = SAMPLED) -> Proposal:
    request = DraftRequest(0, params, [0])
    made = SampledBeams(BeamTrees(PathRunner(), LENGTH, None), beams, LENGTH).propose(  # type: ignore[arg-type]
        [request], [Budget(LENGTH, beams, nodes)], [noise], torch.zeros(1, 1), torch.tensor([0])
    )
    return made[0]


def apart(noise: KeyedNoise, beams: int, nodes: int, patch: pytest.MonkeyPatch) -> float:
    """Total variation between what is emitted and the target's distribution of as many tokens."""

    def proposed() -> Proposal:
        proposal = propose(noise, beams, nodes)
        proposal.check()
        return proposal

    kind = DrawKind.WITHOUT_REPLACEMENT
    return emitted_distance(proposed, sampled_beams, kind, lambda path: dist("p", path), LENGTH + 1, patch)


@pytest.mark.parametrize(("beams", "nodes"), [(1, 9), (2, 9), (2, 3), (3, 9), (3, 4)])
def test_whatever_the_scores_the_emitted_distribution_is_the_targets(
    beams: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        assert apart(KeyedNoise(seed, 0, 0), beams, nodes, monkeypatch) < EXACT


def test_cutting_by_probability_would_bend_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test finds the fault that perturbed scores avoid."""

    def by_probability(
        tree: sampled_beams._BeamTree, parent: int, drawn: Sequence[Child], depth: int, number: int
    ) -> list[tuple[float, float]]:
        above = 1.0 if parent < 0 else tree.scores[parent]
        return [(above * q, 0.0) for _, q in drawn]

    monkeypatch.setattr(sampled_beams, "_perturbed_scores", by_probability)
    monkeypatch.setattr(sampled_beams, "_DRAWS", 2)
    assert apart(KeyedNoise(0, 0, 0), 2, 2, monkeypatch) > 0.01


def test_scores_fall_along_paths_and_among_siblings() -> None:
    for seed in range(50):
        proposal = propose(KeyedNoise(seed, 0, 0), 3, 9)
        proposal.check()
        assert proposal.kinds == {DrawKind.WITHOUT_REPLACEMENT}
        assert proposal.tree.shape.depth == LENGTH
        assert len(proposal.tree) == 6
        for draws in proposal.draws:
            tokens = [proposal.tree.host_ids[draw.child] for draw in draws]
            assert len(set(tokens)) == len(tokens)


def test_paths_are_drawn_with_the_heads_probabilities() -> None:
    """The first child of every node is a draw from its distribution: 4,000 of them, within 5 standard deviations."""
    counts = torch.zeros(VOCAB)
    for seed in range(4000):
        proposal = propose(KeyedNoise(seed, 0, 0), 2, 9)
        counts[proposal.tree.host_ids[proposal.draws[0][0].child]] += 1
    expected = dist("q", [])
    deviation = (expected * (1 - expected) / 4000).sqrt()
    assert ((counts / 4000 - expected).abs() < 5 * deviation).all()


def test_coupled_paths_hold_what_the_noise_would_choose_under_the_head() -> None:
    for seed in range(30):
        noise = KeyedNoise(seed, 0, 0)
        proposal = propose(noise, 3, 9, SEEDED)
        proposal.check()
        assert proposal.kinds == {DrawKind.COUPLED}
        path: list[int] = []
        row = 0
        for depth in range(LENGTH):
            gumbel = noise.gumbel(depth, VOCAB, torch.device("cpu"))
            assert gumbel is not None
            choice = int((dist("q", path).log() + gumbel).argmax())
            first = proposal.draws[row][0].child
            assert proposal.tree.host_ids[first] == choice
            path.append(choice)
            row = first + 1


def test_a_head_like_the_target_is_always_right_when_coupled() -> None:
    rule = CoupledSampling()
    for seed in range(20):
        noise = KeyedNoise(seed, 0, 0)
        proposal = propose(noise, 2, 9, SEEDED)
        paths = [()] + [proposal.tree.path_tokens(node) for node in range(len(proposal.tree))]
        probs = torch.stack([probs_from_logits(dist("q", path).log()[None], SEEDED)[0] for path in paths])
        verdict = rule.verify([proposal], [probs], [noise])[0]
        assert len(verdict.path) == LENGTH


def test_requests_together_draw_what_each_draws_alone() -> None:
    params = [SAMPLED, SEEDED, SAMPLED, SamplingParams(temperature=0.7)]
    requests = [DraftRequest(number, each, [0]) for number, each in enumerate(params)]
    budgets = [Budget(2, 3, 5), Budget(1, 3, 5), Budget(2, 2, 9), Budget(2, 3, 2)]
    noise = [KeyedNoise(number, number, 0) for number in range(4)]
    beams = SampledBeams(BeamTrees(PathRunner(), LENGTH, None), 3, LENGTH)  # type: ignore[arg-type]
    together = beams.propose(requests, budgets, noise, torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64))
    for number, proposal in enumerate(together):
        here = slice(number, number + 1)
        alone = beams.propose(requests[here], budgets[here], noise[here], torch.zeros(1, 1), torch.tensor([0]))[0]
        assert alone.tree.host_ids == proposal.tree.host_ids
        assert (alone.tree.shape, alone.draws) == (proposal.tree.shape, proposal.draws)
        assert len(proposal.tree) <= budgets[number].nodes
        assert proposal.tree.shape.depth <= budgets[number].depth
