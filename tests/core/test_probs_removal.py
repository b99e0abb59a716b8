"""Tokens taken out of many laws at once, against one law and one token at a time."""

from __future__ import annotations

import pytest
import torch

from truedraft.core import probs as L
from truedraft.core.probs import residual_of_candidates, without_tokens


def laws(rows: int, vocab: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.softmax(torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab), dtype=dtype) * 2, -1)


def residual_of_candidate(p: torch.Tensor, token: int) -> torch.Tensor:
    return L.residual(p, torch.nn.functional.one_hot(torch.tensor(token), len(p)).to(p.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [2, 5, 300])
def test_one_token_of_each_row_gives_the_bits_of_one_row_alone(vocab: int, dtype: torch.dtype) -> None:
    p = laws(7, vocab, dtype)
    tokens = torch.arange(7)[:, None] % vocab
    without, residual = without_tokens(p, tokens), residual_of_candidates(p, tokens)
    for row, token, ours, left in zip(p, tokens, without, residual, strict=True):
        assert torch.equal(ours, L.without(row, int(token)))
        assert torch.equal(left, residual_of_candidate(row, int(token)))
        assert torch.equal(without_tokens(row, token), ours)
        assert torch.equal(residual_of_candidates(row, token), left)


def test_several_candidates_are_those_one_after_another() -> None:
    p = laws(4, 9)
    left = residual_of_candidates(p, torch.tensor([[1, 5, 1], [0, 0, 0], [8, 7, 6], [2, 3, 2]]))
    for row, tokens, ours in zip(p, ((1, 5), (0,), (8, 7, 6), (2, 3)), left, strict=True):
        for token in tokens:
            row = residual_of_candidate(row, token)
        assert torch.allclose(ours, row, rtol=1e-14, atol=1e-16)


def test_where_nothing_is_left() -> None:
    p = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    tokens = torch.tensor([[1, 1], [0, 1]])
    assert torch.equal(residual_of_candidates(p, tokens), p)
    assert torch.equal(without_tokens(p, tokens), torch.zeros(2, 3))


def test_the_laws_given_are_left_as_they_were() -> None:
    p = laws(3, 6)
    before = p.clone()
    without_tokens(p, torch.tensor([[1], [2], [3]]))
    residual_of_candidates(p, torch.tensor([[1], [2], [3]]))
    assert torch.equal(p, before)
