"""How drafts are drawn, against slow references: which token, from which distribution, with which probability."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from support.coupled_choice import coupled_choice
from truedraft.core import probs as L
from truedraft.core.noise import KeyedNoise, Purpose
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import DrawKind
from truedraft.drafters.draws import Child, OpenNode, drawing_for, fetch_children

VOCAB = 40
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=1)
GREEDY = SamplingParams()


def logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def nodes(*widths: int) -> list[OpenNode]:
    return [OpenNode(KeyedNoise(70 + i, 5, 1), 2, 3 * i, width) for i, width in enumerate(widths)]


def drawn(
    scores: Tensor, params: SamplingParams, open_nodes: Sequence[OpenNode], wants: bool = False
) -> tuple[list[list[Child]], Tensor | None]:
    """The children of nodes, with their probabilities where they are wanted, and what they were drawn from."""
    drawing = drawing_for(params, max(node.width for node in open_nodes))
    tokens, probs = drawing.draw(scores, params, open_nodes)
    own = (L.token_probs(scores, tokens) if probs is None else L.probs_at(probs, tokens)) if wants else None
    return fetch_children(tokens, own, open_nodes, scores.shape[-1]), probs


def ids(children: Sequence[Sequence[Child]]) -> list[list[int]]:
    return [[token for token, _ in own] for own in children]


def slow_draws(dist: Tensor, node: OpenNode) -> list[Child]:
    """One after the other, each from the distribution without the tokens before it."""
    left, tokens = dist.clone(), []
    for number in range(node.width):
        if not left.sum() > 0:
            break
        u = node.noise.uniform(Purpose.DRAFT, node.depth, node.first_child + number)
        token = int(L.draw(left[None], torch.tensor([u], dtype=torch.float64)))
        tokens.append(token)
        left[token] = 0.0
    return [(token, float(dist[token])) for token in tokens]


def test_kinds_of_drawing() -> None:
    assert drawing_for(GREEDY, 3).kind is DrawKind.DETERMINISTIC
    assert drawing_for(SEEDED, 3).kind is DrawKind.COUPLED
    assert drawing_for(SAMPLED, 1).kind is DrawKind.INDEPENDENT
    assert drawing_for(SAMPLED, 2).kind is DrawKind.WITHOUT_REPLACEMENT


@pytest.mark.parametrize("widths", [(1,), (1, 1, 1), (3, 1, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("wants", [False, True])
def test_sampled_tokens_are_those_of_the_slow_draws(widths: tuple[int, ...], wants: bool) -> None:
    for seed in range(20):
        scores = logits(len(widths), seed)
        open_nodes = nodes(*widths)
        children, probs = drawn(scores, SAMPLED, open_nodes, wants)
        assert probs is not None
        assert torch.equal(probs, L.probs_from_logits(scores, SAMPLED))
        for own, dist, node in zip(children, probs, open_nodes, strict=True):
            assert own == [(token, mass if wants else 1.0) for token, mass in slow_draws(dist, node)]


def test_never_more_draws_than_the_distribution_has_tokens() -> None:
    scores = torch.full((2, VOCAB), -math.inf)
    scores[0, [4, 9]] = 1.0
    scores[1, 7] = 0.0
    for params in (SAMPLED, SEEDED):
        children, _ = drawn(scores, params, nodes(4, 4))
        assert [sorted(own) for own in ids(children)] == [[4, 9], [7]]


@pytest.mark.parametrize("params", [SAMPLED, SEEDED], ids=["sampled", "seeded"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_is_drawn_from_broken_logits_and_other_rows_are_as_ever(
    params: SamplingParams, width: int, bad: float
) -> None:
    scores = logits(3)
    open_nodes = nodes(width, width, width)
    clean, clean_probs = drawn(scores, params, open_nodes, wants=True)
    scores[1, 11] = bad
    children, probs = drawn(scores, params, open_nodes, wants=True)
    assert probs is not None and clean_probs is not None
    assert children[1] == []
    assert probs.sum(dim=-1).isfinite().tolist() == [True, False, True]
    assert [children[0], children[2]] == [clean[0], clean[2]]
    assert torch.equal(probs[[0, 2]], clean_probs[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_drafts_are_the_lowest_of_the_likeliest(dtype: torch.dtype) -> None:
    scores = logits(3).to(dtype)
    scores[1, [30, 12, 39]] = 20.0
    children, probs = drawn(scores, GREEDY, nodes(1, 1, 0))
    assert probs is None
    assert children == [[(int(scores[0].argmax()), 1.0)], [(12, 1.0)], []]


def test_greedy_drafts_with_probabilities_and_several_children() -> None:
    scores = logits(2)
    children, probs = drawn(scores, GREEDY, nodes(3, 2), wants=True)
    assert probs is None
    order = scores.argsort(dim=-1, descending=True)
    masses = torch.softmax(scores, dim=-1)
    for own, row, mass, width in zip(children, order.tolist(), masses, (3, 2), strict=True):
        assert own == [(token, float(mass[token])) for token in row[:width]]
    more, _ = drawn(scores, GREEDY, nodes(VOCAB + 5, 1))
    assert sorted(ids(more)[0]) == list(range(VOCAB))


def test_coupled_drafts_are_the_choices_of_the_shared_noise() -> None:
    for seed in range(20):
        scores = logits(2, seed)
        open_nodes = nodes(1, 3)
        children, probs = drawn(scores, SEEDED, open_nodes, wants=True)
        assert probs is not None
        for own, dist, node in zip(children, probs, open_nodes, strict=True):
            noise = node.noise.gumbel(node.depth, VOCAB, dist.device)
            assert own[0][0] == int(coupled_choice(dist[None], noise))
            best = (dist.double().log() + noise).argsort(descending=True)[: node.width].tolist()
            assert own == [(token, float(dist[token])) for token in best if dist[token] > 0]


@pytest.mark.parametrize("params", [SEEDED, SamplingParams(temperature=1.0, seed=1)], ids=["top-p", "dense"])
def test_coupled_drafts_over_a_large_vocabulary(params: SamplingParams) -> None:
    """Where not every token is looked at: the same children, in the same order, for every width of a neighbour."""
    scores = torch.randn(4, 9_000, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [[1.0], [3.0], [8.0], [40.0]]
    )
    open_nodes = nodes(1, 8, 3, 8)
    children, probs = drawn(scores, params, open_nodes)
    assert probs is not None
    for own, dist, node in zip(ids(children), probs, open_nodes, strict=True):
        noise = node.noise.gumbel(node.depth, 9_000, dist.device)
        best = (dist.double().log() + noise).argsort(descending=True)[: node.width].tolist()
        assert own == [token for token in best if dist[token] > 0]
    alone, _ = drawn(scores, params, [node._replace(width=1) for node in open_nodes])
    assert ids(alone) == [own[:1] for own in ids(children)]


def test_logits_are_left_as_they_were() -> None:
    scores = logits(2)
    before = scores.clone()
    for params in (GREEDY, SAMPLED, SEEDED, SamplingParams(temperature=1.0)):
        drawn(scores, params, nodes(2, 1), wants=True)
    assert torch.equal(scores, before)
