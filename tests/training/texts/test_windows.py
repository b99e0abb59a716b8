"""Windows cover every place that teaches something, once an epoch, and packs line up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from truedraft.errors import DataError
from truedraft.training.texts.self_distillation import SelfDistillationData, WindowSampler, WrittenAnswer, collate

HEADS = 2


@pytest.fixture
def text():
    lengths = [7, 3, 0, 2, 12]
    rows = sum(lengths)
    tokens = iter(range(100, 100 + rows))
    records = [WrittenAnswer([1], [next(tokens) for _ in range(length)], 0.0, False) for length in lengths]
    bits = torch.arange(rows, dtype=torch.bfloat16)[:, None].repeat(1, 3).view(torch.int16).numpy().view(np.uint16)
    return SelfDistillationData(records, bits)


def test_every_place_whose_guesses_lie_in_its_answer_comes_once_an_epoch(text):
    """A batch is a function of its index alone, also over ends of epochs."""
    sampler = WindowSampler(text, HEADS, 4, seed=3)
    expected = [row for first, end in ((0, 7), (7, 10), (12, 24)) for row in range(first, end - HEADS)]
    assert sampler.positions == len(expected)
    count = len(sampler.windows)
    whole = sampler.batch(0, 6 * count)
    for windows in whole.split(count):
        assert sorted(row for first, length in windows.tolist() for row in range(first, first + length)) == expected
    assert len({tuple(map(tuple, windows.tolist())) for windows in whole.split(count)}) > 1
    for first, some in ((0, 3), (count - 1, 5), (17, 3)):
        assert torch.equal(sampler.batch(first, some), whole[first : first + some])
    with pytest.raises(DataError, match=r"longest answer .* has 12 tokens, and heads that reach 12 .* 13: let"):
        WindowSampler(text, 12, 4, seed=0)


def test_a_pack_has_the_tokens_and_vectors_that_heads_reach(text):
    packed = collate(text, torch.tensor([[14, 3], [0, 2]]), HEADS)
    assert packed.tokens.tolist() == [114, 115, 116, 117, 118, 100, 101, 102, 103]
    assert packed.hidden[:, 0].tolist() == [14, 15, 16, 17, 18, 0, 1, 2, 3]
    assert packed.places.tolist() == [0, 1, 2, 5, 6]
    assert packed.rows.tolist() == [14, 15, 16, 17, 18, 0, 1, 2, 3]


def test_beginnings_are_of_as_many_answers_as_fit() -> None:
    """Four pairs of 100 tokens, one of which is short and was ended."""
    records = [WrittenAnswer([1], list(range(100)), float(n % 2), True) for n in range(8)]
    records[2] = WrittenAnswer([1], [7, 8, 9], 0.0, True)
    text = SelfDistillationData(records, np.arange(703 * 2, dtype=np.uint16).reshape(703, 2))
    found = text.beginnings(300)
    assert [len(each.answer) for each in found.records] == [50, 50, 3, 50, 50, 50]
    assert [each.stopped for each in found.records] == [False, False, True, False, False, False]
    kept = [text.starts[n] + place for n, each in enumerate(found.records) for place in range(len(each.answer))]
    assert found.bits[:, 0].tolist() == [2 * row for row in kept]
    assert text.beginnings(10**6) is text and len(text.beginnings(1).records) == 2
