"""How drafts are drawn, against slow references: which token, from which distribution, with which probability."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from truedraft.core import probs as L
from truedraft.core.noise import KeyedNoise, Purpose
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import DrawKind
from truedraft.drafters.draws import DrawnChildren, OpenNode, drawing_for
from truedraft.verification.coupled import coupled_choice

VOCAB = 40
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9)
COUPLED = SamplingParams(temperature=0.8, top_p=0.9, coupled=True)
GREEDY = SamplingParams()


def logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def nodes(*widths: int, wants: bool = False) -> list[OpenNode]:
    return [OpenNode(KeyedNoise(70 + i, 5, 1), 2, 3 * i, width, wants) for i, width in enumerate(widths)]


def slow_draws(dist: Tensor, node: OpenNode) -> tuple[list[int], list[float]]:
    """One after the other, each from the distribution without the tokens before it."""
    left, tokens = dist.clone(), []
    for number in range(node.width):
        if not left.sum() > 0:
            break
        u = node.noise.uniform(Purpose.DRAFT, node.depth, node.index + number)
        token = int(L.draw(left[None], torch.tensor([u], dtype=torch.float64)))
        tokens.append(token)
        left[token] = 0.0
    return tokens, [float(dist[token]) for token in tokens]


def test_kinds_of_drawing() -> None:
    assert drawing_for(GREEDY, 3).kind is DrawKind.DETERMINISTIC
    assert drawing_for(COUPLED, 3).kind is DrawKind.COUPLED
    assert drawing_for(SAMPLED, 1).kind is DrawKind.INDEPENDENT
    assert drawing_for(SAMPLED, 2).kind is DrawKind.WITHOUT_REPLACEMENT


@pytest.mark.parametrize("widths", [(1,), (1, 1, 1), (3, 1, 2), (0, 2), (0,), (0, 0)], ids=str)
@pytest.mark.parametrize("wants", [False, True])
def test_sampled_tokens_are_those_of_the_slow_draws(widths: tuple[int, ...], wants: bool) -> None:
    for seed in range(20):
        scores = logits(len(widths), seed)
        open_nodes = nodes(*widths, wants=wants)
        children, probs = drawing_for(SAMPLED, max(widths)).draw(scores, SAMPLED, open_nodes)
        assert probs is not None
        assert torch.equal(probs, L.probs_from_logits(scores, SAMPLED))
        for child, dist, node in zip(children, probs, open_nodes, strict=True):
            tokens, masses = slow_draws(dist, node)
            assert child == DrawnChildren(tokens, masses if wants else [1.0] * len(tokens))


def test_never_more_draws_than_the_distribution_has_tokens() -> None:
    scores = torch.full((2, VOCAB), -math.inf)
    scores[0, [4, 9]] = 1.0
    scores[1, 7] = 0.0
    for params in (SAMPLED, COUPLED):
        children, _ = drawing_for(params, 4).draw(scores, params, nodes(4, 4))
        assert [sorted(child.tokens) for child in children] == [[4, 9], [7]]
        assert [len(child.probabilities) for child in children] == [2, 1]


@pytest.mark.parametrize("params", [SAMPLED, COUPLED], ids=["sampled", "coupled"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_is_drawn_from_broken_logits_and_other_rows_are_as_ever(
    params: SamplingParams, width: int, bad: float
) -> None:
    scores = logits(3)
    open_nodes = nodes(width, width, width, wants=True)
    clean, clean_probs = drawing_for(params, width).draw(scores, params, open_nodes)
    scores[1, 11] = bad
    children, probs = drawing_for(params, width).draw(scores, params, open_nodes)
    assert probs is not None and clean_probs is not None
    assert children[1] == DrawnChildren([], [])
    assert probs[1].tolist() == [0.0] * VOCAB
    assert [children[0], children[2]] == [clean[0], clean[2]]
    assert torch.equal(probs[[0, 2]], clean_probs[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_drafts_are_the_lowest_of_the_likeliest(dtype: torch.dtype) -> None:
    scores = logits(3).to(dtype)
    scores[1, [30, 12, 39]] = 20.0
    children, probs = drawing_for(GREEDY, 1).draw(scores, GREEDY, nodes(1, 1, 0))
    assert probs is None
    assert [child.tokens for child in children] == [[int(scores[0].argmax())], [12], []]
    assert [child.probabilities for child in children] == [[1.0], [1.0], []]


def test_greedy_drafts_with_probabilities_and_several_children() -> None:
    scores = logits(2)
    children, probs = drawing_for(GREEDY, 3).draw(scores, GREEDY, nodes(3, 2, wants=True))
    assert probs is None
    order = scores.argsort(dim=-1, descending=True)
    masses = torch.softmax(scores, dim=-1)
    for child, row, mass, width in zip(children, order.tolist(), masses, (3, 2), strict=True):
        assert child.tokens == row[:width]
        assert child.probabilities == pytest.approx([float(mass[token]) for token in row[:width]])
    more, _ = drawing_for(GREEDY, VOCAB + 5).draw(scores, GREEDY, nodes(VOCAB + 5, 1))
    assert sorted(more[0].tokens) == list(range(VOCAB))


def test_coupled_drafts_are_the_choices_of_the_shared_noise() -> None:
    for seed in range(20):
        scores = logits(2, seed)
        open_nodes = nodes(1, 3, wants=True)
        children, probs = drawing_for(COUPLED, 3).draw(scores, COUPLED, open_nodes)
        assert probs is not None
        for child, dist, node in zip(children, probs, open_nodes, strict=True):
            noise = node.noise.gumbel(node.depth, VOCAB, dist.device)
            assert child.tokens[0] == int(coupled_choice(dist[None], noise))
            best = (dist.double().log() + noise).argsort(descending=True)[: node.width].tolist()
            assert child.tokens == [token for token in best if dist[token] > 0]
            assert child.probabilities == [float(dist[token]) for token in child.tokens]


@pytest.mark.parametrize("params", [COUPLED, SamplingParams(temperature=1.0, coupled=True)], ids=["top-p", "dense"])
def test_coupled_drafts_over_a_large_vocabulary(params: SamplingParams) -> None:
    """Where not every token is looked at: the same children, in the same order, for every width of a neighbour."""
    scores = torch.randn(4, 9_000, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [[1.0], [3.0], [8.0], [40.0]]
    )
    open_nodes = nodes(1, 8, 3, 8)
    children, probs = drawing_for(params, 8).draw(scores, params, open_nodes)
    assert probs is not None
    for child, dist, node in zip(children, probs, open_nodes, strict=True):
        noise = node.noise.gumbel(node.depth, 9_000, dist.device)
        best = (dist.double().log() + noise).argsort(descending=True)[: node.width].tolist()
        assert child.tokens == [token for token in best if dist[token] > 0]
    tokens, _ = drawing_for(params, 1).draw_unseen(scores, params, open_nodes)
    assert tokens.tolist() == [child.tokens[0] for child in children]


def test_logits_are_left_as_they_were() -> None:
    scores = logits(2)
    before = scores.clone()
    for params in (GREEDY, SAMPLED, COUPLED, SamplingParams(temperature=1.0)):
        drawing_for(params, 2).draw(scores, params, nodes(2, 1, wants=True))
    assert torch.equal(scores, before)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, COUPLED], ids=["greedy", "sampled", "coupled"])
def test_unseen_draws_are_the_first_of_those_that_are_looked_at(params: SamplingParams) -> None:
    for seed in range(20):
        scores, open_nodes = logits(3, seed), nodes(1, 1, 1)
        seen, seen_probs = drawing_for(params, 1).draw(scores, params, open_nodes)
        tokens, probs = drawing_for(params, 1).draw_unseen(scores, params, open_nodes)
        assert [[token] for token in tokens.tolist()] == [child.tokens for child in seen]
        assert tokens.dtype == torch.int64
        assert (probs is None) == (seen_probs is None)
        assert probs is None or (seen_probs is not None and torch.equal(probs, seen_probs))


@pytest.mark.parametrize("params", [SAMPLED, COUPLED], ids=["sampled", "coupled"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_unseen_draw_without_a_distribution_is_drawn_from_one_that_is_one_hot(
    params: SamplingParams, bad: float
) -> None:
    scores, open_nodes = logits(3), nodes(1, 1, 1)
    clean, clean_probs = drawing_for(params, 1).draw_unseen(scores, params, open_nodes)
    scores[1] = bad
    tokens, probs = drawing_for(params, 1).draw_unseen(scores, params, open_nodes)
    assert probs is not None and clean_probs is not None
    assert tokens.tolist() == [int(clean[0]), 0, int(clean[2])]
    assert probs[1].tolist() == [1.0] + [0.0] * (VOCAB - 1)
    assert torch.equal(probs[[0, 2]], clean_probs[[0, 2]])


def test_an_unseen_greedy_draw_from_broken_logits_is_a_token() -> None:
    scores = logits(2)
    scores[0] = math.nan
    tokens, probs = drawing_for(GREEDY, 1).draw_unseen(scores, GREEDY, nodes(1, 1))
    assert probs is None
    assert 0 <= int(tokens[0]) < VOCAB
    assert int(tokens[1]) == int(scores[1].argmax())
