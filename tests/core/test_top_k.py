"""The largest ids of rows of logits, against a stable sort; of many columns, found by blocks, and of few."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from truedraft.core.top_k import TopK, stable_topk


def by_sorting(logits: Tensor, count: int) -> Tensor:
    return logits.double().sort(dim=-1, descending=True, stable=True).indices[:, :count]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [1, 5, 63, 65, 1024, 1025, 8192])
def test_order_is_that_of_a_stable_sort_and_ties_go_to_the_lowest_id(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(7, vocab, generator=generator) * 2).round(decimals=1).to(dtype)
    assert vocab < 100 or (logits[0].unique().numel() < vocab / 2)  # otherwise there are few ties
    assert stable_topk(logits[:0], 1).shape == (0, 1)
    for count in {1, min(vocab, 10), min(vocab, 130)}:
        assert stable_topk(logits, count).equal(by_sorting(logits, count))


@pytest.mark.parametrize("vocab", [70, 1070])
def test_rows_of_equal_and_of_infinite_logits(vocab: int) -> None:
    assert stable_topk(torch.zeros(2, 230 + vocab), 4).tolist() == [[0, 1, 2, 3]] * 2
    row = torch.full((1, vocab), -torch.inf)
    row[0, 66] = 1.0
    assert stable_topk(row, 3).tolist() == [[66, 0, 1]]
    row[0, 68] = torch.inf
    row[0, 3] = -0.0
    row[0, 5] = 0.0
    assert stable_topk(row, 4).tolist() == [[68, 66, 3, 5]]


@pytest.mark.parametrize("vocab", [70, 1070])
def test_rows_with_nan_give_ids_that_exist(vocab: int) -> None:
    """inf - inf is a negative NaN on some processors, and vocabularies are padded to whole blocks."""
    logits = torch.randn(3, vocab)
    logits[0] = torch.inf - torch.tensor(torch.inf)
    logits[1] = torch.nan
    assert int(stable_topk(logits, 10).max()) < vocab
    assert stable_topk(logits, 10)[2].equal(stable_topk(logits[2:], 10)[0])


def test_a_long_row_has_the_same_log_probabilities_alone_and_among_others() -> None:
    logits = torch.randn(20, 40_000, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = TopK.of(logits, 5).log_probs
        alone = torch.cat([TopK.of(logits[row : row + 1], 5).log_probs for row in range(20)])
    finally:
        torch.set_num_threads(before)
    assert alone.equal(together)
    torch.testing.assert_close(together, logits.log_softmax(dim=-1).topk(5).values)


@pytest.mark.parametrize("vocab", [70, 1070])
def test_nan_counts_as_the_largest_and_infinity_as_the_largest_number(vocab: int) -> None:
    logits = torch.randn(1, vocab)
    logits[0, [9, 67]] = torch.tensor([torch.nan, -torch.nan])
    logits[0, [5, 66]] = torch.inf
    assert stable_topk(logits, 2)[0].tolist() == [9, 67]
    assert set(stable_topk(logits, 4)[0].tolist()) == {9, 67, 5, 66}


def test_probabilities_are_those_of_the_whole_distribution_to_the_bit() -> None:
    logits = torch.randn(7, 2000) * 3
    found = TopK.of(logits, 5)
    expected = logits - logits.logsumexp(dim=-1, keepdim=True)
    assert found.log_probs.equal(expected.gather(1, found.ids))
    alone = [TopK.of(row[None], 5).log_probs for row in logits]
    assert torch.cat(alone).equal(found.log_probs)
