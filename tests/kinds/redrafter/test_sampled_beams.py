"""Drawn beams: the exact distribution of what is emitted, for every order of draws, and what they propose.

A drawn tree depends on the tokens that are drawn and on the numbers behind the perturbed scores. For each of several
fixed sets of these numbers all trees are enumerated with the probability of their tokens, and the distribution of what
the rule emits must be the target's, to rounding: cutting by score may not look at the token whose presence it decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.params import SamplingParams
from truedraft.core.probs import probs_from_logits
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.drafters.base import DraftRequest
from truedraft.drafters.draws import Child, Drawing, OpenNode
from truedraft.kinds.redrafter import sampled_beams as sampled_beams
from truedraft.kinds.redrafter.beams import BeamTrees
from truedraft.kinds.redrafter.sampled_beams import SampledBeams
from truedraft.verification.coupled import CoupledSampling
from truedraft.verification.rule import DrawnToken, JudgedRow
from truedraft.verification.speculative import SpeculativeSampling

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


class Script(Drawing):
    """Draws what a script says, without replacement, and notes how probable it was and what else there was."""

    kind = DrawKind.WITHOUT_REPLACEMENT

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices = list(choices)
        self.taken: list[int] = []
        self.probability = 1.0

    def draw(self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]) -> tuple[Tensor, Tensor | None]:
        probs = torch.softmax(logits, dim=-1)
        width = min(max(node.width for node in nodes), VOCAB)
        tokens = torch.full((len(nodes), width), VOCAB)
        for row, q, node in zip(tokens, probs, nodes, strict=True):
            orders = list(itertools.permutations(range(VOCAB), min(node.width, VOCAB)))
            place = self.choices[len(self.taken)] if len(self.taken) < len(self.choices) else 0
            self.taken.append(place)
            left = 1.0
            for token in orders[place]:
                self.probability *= float(q[token]) / left
                left -= float(q[token])
            row[: len(orders[place])] = torch.tensor(orders[place])
        return tokens, probs


def all_trees(
    noise: KeyedNoise, beams: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[float, Proposal]]:
    """Every tree that can be drawn, with the probability of its tokens."""
    orders = {width: len(list(itertools.permutations(range(VOCAB), min(width, VOCAB)))) for width in range(1, 5)}
    most = max(orders.values())
    choices: list[int] | None = []
    while choices is not None:
        script = Script(choices)
        monkeypatch.setattr(sampled_beams, "drawing_for", lambda params, width, script=script: script)
        try:
            proposal = propose(noise, beams, nodes)
        except IndexError:
            proposal = None  # a place beyond the orders of a node: the next choice before it
        if proposal is not None:
            yield script.probability, proposal
        choices = script.taken
        while choices and choices[-1] + 1 >= most:
            choices.pop()
        if proposal is None and choices == script.taken:
            choices.pop()
        choices = [*choices[:-1], choices[-1] + 1] if choices else None


def propose(noise: KeyedNoise, beams: int, nodes: int, params: SamplingParams = SAMPLED) -> Proposal:
    request = DraftRequest(0, params, [0])
    made = SampledBeams(BeamTrees(PathRunner(), LENGTH, None), beams, LENGTH).propose(  # type: ignore[arg-type]
        [request], [Budget(LENGTH, beams, nodes)], [noise], torch.zeros(1, 1), torch.tensor([0])
    )
    return made[0]


def emitted(proposal: Proposal) -> dict[tuple[int, ...], float]:
    """The distribution of the first LENGTH + 1 tokens when the rule judges a proposal against the target."""
    found: dict[tuple[int, ...], float] = {}
    rule = SpeculativeSampling()

    def walk(row: int, path: tuple[int, ...], reach: float) -> None:
        if len(path) == LENGTH + 1:
            found[path] = found.get(path, 0.0) + reach
            return
        p = dist("p", path)
        draws = []
        if row >= 0:
            assert proposal.probs is not None or not proposal.draws[row]
            for draw in proposal.draws[row]:
                token = proposal.tree.host_ids[draw.child]
                draws.append(DrawnToken(token, draw.dist, proposal.probs[draw.dist], draw.kind))  # type: ignore[index]
        for outcome in rule.outcomes([JudgedRow(p, tuple(draws))]):
            child = -1
            if outcome.accepted:
                ids = proposal.tree.host_ids
                child = next(draw.child for draw in proposal.draws[row] if ids[draw.child] == outcome.tokens[0]) + 1
            walk(child, (*path, *outcome.tokens), reach * outcome.probability)

    walk(0, (), 1.0)
    return found


def distance(noise: KeyedNoise, beams: int, nodes: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Total variation between what is emitted and the target's distribution of as many tokens."""
    total: dict[tuple[int, ...], float] = {}
    weight = 0.0
    for probability, proposal in all_trees(noise, beams, nodes, monkeypatch):
        proposal.check()
        weight += probability
        for path, reach in emitted(proposal).items():
            total[path] = total.get(path, 0.0) + probability * reach
    assert weight == pytest.approx(1.0, abs=1e-9)
    apart = 0.0
    for path in itertools.product(range(VOCAB), repeat=LENGTH + 1):
        p = 1.0
        for place, token in enumerate(path):
            p *= float(dist("p", path[:place])[token])
        apart += abs(p - total.get(path, 0.0)) / 2
    return apart


@pytest.mark.parametrize(("beams", "nodes"), [(1, 9), (2, 9), (2, 3), (3, 9), (3, 4)])
def test_whatever_the_scores_the_emitted_distribution_is_the_targets(
    beams: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        assert distance(KeyedNoise(seed, 0, 0), beams, nodes, monkeypatch) < EXACT


def test_cutting_by_probability_would_bend_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test finds the fault that perturbed scores avoid."""

    def by_probability(
        tree: sampled_beams._BeamTree, parent: int, drawn: Sequence[Child], depth: int, number: int
    ) -> list[tuple[float, float]]:
        above = 1.0 if parent < 0 else tree.scores[parent]
        return [(above * q, 0.0) for _, q in drawn]

    monkeypatch.setattr(sampled_beams, "_perturbed_scores", by_probability)
    monkeypatch.setattr(sampled_beams, "_DRAWS", 2)
    assert distance(KeyedNoise(0, 0, 0), 2, 2, monkeypatch) > 0.01


def test_scores_fall_along_paths_and_among_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
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
