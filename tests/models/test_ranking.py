"""The largest ids of rows of logits, against a stable sort."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from truedraft.models.ranking import largest_ids


def by_sorting(logits: Tensor, count: int) -> Tensor:
    return logits.double().sort(dim=-1, descending=True, stable=True).indices[:, :count]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 1000, 8192])
def test_order_is_that_of_a_stable_sort_and_ties_go_to_the_lowest_id(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(7, vocab, generator=generator) * 2).round(decimals=1).to(dtype)
    assert vocab < 100 or (logits[0].unique().numel() < vocab / 2)  # otherwise there are few ties
    for count in {1, min(vocab, 10), min(vocab, 130)}:
        assert largest_ids(logits, count).equal(by_sorting(logits, count))


def test_rows_of_equal_and_of_infinite_logits() -> None:
    assert largest_ids(torch.zeros(2, 300), 4).tolist() == [[0, 1, 2, 3]] * 2
    row = torch.full((1, 70), -torch.inf)
    row[0, 66] = 1.0
    assert largest_ids(row, 3).tolist() == [[66, 0, 1]]
    row[0, 68] = torch.inf
    row[0, 3] = -0.0
    row[0, 5] = 0.0
    assert largest_ids(row, 4).tolist() == [[68, 66, 3, 5]]


def test_no_rows() -> None:
    assert largest_ids(torch.zeros(0, 100), 3).shape == (0, 3)
