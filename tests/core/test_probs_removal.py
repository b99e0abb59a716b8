"""Tokens taken out of many distributions at once, against one distribution and one token at a time."""

from __future__ import annotations

import pytest
import torch

from truedraft.core.probs import without_tokens


def probs(rows: int, vocab: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.softmax(torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab), dtype=dtype) * 2, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [2, 5, 300])
def test_one_token_of_each_row_gives_the_bits_of_one_row_alone(vocab: int, dtype: torch.dtype) -> None:
    p = probs(7, vocab, dtype)
    tokens = torch.arange(7)[:, None] % vocab
    for row, token, ours in zip(p, tokens, without_tokens(p, tokens), strict=True):
        rest = row.clone()
        rest[token] = 0.0
        assert torch.equal(ours, rest / rest.sum())
        assert torch.equal(without_tokens(row, token), ours)


def test_a_token_that_is_named_twice_is_taken_out_once() -> None:
    p = probs(2, 9)
    assert torch.equal(
        without_tokens(p, torch.tensor([[1, 5, 1], [0, 0, 0]])), without_tokens(p, torch.tensor([[1, 5], [0, 0]]))
    )


def test_where_nothing_is_left() -> None:
    p = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    assert torch.equal(without_tokens(p, torch.tensor([[1, 1], [0, 1]])), torch.zeros(2, 3))


def test_the_distributions_given_are_left_as_they_were() -> None:
    p = probs(3, 6)
    before = p.clone()
    without_tokens(p, torch.tensor([[1], [2], [3]]))
    assert torch.equal(p, before)
