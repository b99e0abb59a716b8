"""Spans: the few lengths that products over keys have."""

from __future__ import annotations

import pytest
import torch

from truedraft.machine import has_bfloat16
from truedraft.models.cache import WIDEST_GAP, key_span

HEADS, WIDTH = 4, 64


def test_there_are_few_spans_and_each_holds_its_positions() -> None:
    assert [key_span(length) for length in (1, 64, 65, 512, 513, 1088, 1089)] == [64, 64, 128, 512, 1088, 1088, 1152]
    assert len({key_span(length) for length in range(1, 2049)}) == 8 + 16
    for length in range(1, 3000):
        span = key_span(length)
        assert 0 <= span - length <= WIDEST_GAP
        assert key_span(span) == span
        assert key_span(length + 1) >= span


@pytest.mark.skipif(not has_bfloat16(torch.device("cpu")), reason="this CPU has no instructions for bfloat16 products")
@pytest.mark.parametrize("length", [1, 60, 130, 400, 511, 512, 600, 1000, 1030, 1088, 1500, 2500])
def test_weights_of_zero_behind_do_not_change_a_bit(length: int) -> None:
    """A product over any longer span gives the same bits, and so does each pair of rows by itself."""
    generator = torch.Generator().manual_seed(length)
    longest = 4096
    values = torch.randn(HEADS, longest, WIDTH, generator=generator).bfloat16()
    span = key_span(length)
    for rows in (2, 3, 8, 15, 16, 48):
        weights = torch.zeros(HEADS, rows, longest, dtype=torch.bfloat16)
        weights[:, :, :length] = torch.softmax(2 * torch.randn(HEADS, rows, length, generator=generator), -1).bfloat16()
        mixed = torch.bmm(weights[:, :, :span].contiguous(), values[:, :span])
        for longer in {key_span(length + more) for more in (16, 70, 300, 1000, 2000)}:
            assert torch.bmm(weights[:, :, :longer].contiguous(), values[:, :longer]).equal(mixed), (rows, longer)
        pair = torch.bmm(weights[:, :2, :span].contiguous(), values[:, :span])
        assert pair.equal(mixed[:, :2]), rows
