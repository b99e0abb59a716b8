"""Packing texts into a stream, and blocks out of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from truedraft.errors import DataError
from truedraft.training.texts.data import BlockSampler, read_stream, stream_hash, write_stream


class Letters:
    """One token per letter; 0 ends a text."""

    eos_token_id = 0

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) - 96 for letter in text]


def test_stream_separates_texts(tmp_path):
    assert write_stream(["ab", "c"], Letters(), tmp_path / "s.bin") == 6
    assert read_stream(tmp_path / "s.bin").tolist() == [0, 1, 2, 0, 3, 0]


def test_no_text_is_refused(tmp_path):
    with pytest.raises(DataError, match="no text"):
        write_stream([], Letters(), tmp_path / "s.bin")


def test_hash_names_the_ids():
    one = np.arange(5, dtype=np.uint32)
    assert stream_hash(one) == stream_hash(one.copy())
    assert stream_hash(one) != stream_hash(one[::-1])


def test_an_epoch_visits_each_block_once():
    sampler = BlockSampler(np.arange(103, dtype=np.uint32), sequence_length=10, seed=3)
    assert sampler.blocks_per_epoch == 9
    blocks = sampler.batch(0, 9)
    assert blocks.shape == (9, 11)
    assert blocks.dtype == torch.int64
    assert torch.equal(blocks[:, 1:], blocks[:, :-1] + 1)  # each is a contiguous piece
    starts = sorted(blocks[:, 0].tolist())
    assert np.diff(starts).tolist() == [10] * 8  # disjoint, side by side


def test_epochs_differ_in_order_and_offset_and_seeds_differ():
    stream = np.arange(1000, dtype=np.uint32)
    sampler = BlockSampler(stream, 10, seed=3)
    first, second = sampler.batch(0, 98), sampler.batch(98, 98)
    assert not torch.equal(first, second)
    assert not torch.equal(first, BlockSampler(stream, 10, seed=4).batch(0, 98))


def test_a_batch_is_a_function_of_its_index_alone():
    sampler = BlockSampler(np.arange(500, dtype=np.uint32), 10, seed=1)
    joined = torch.cat([sampler.batch(40, 10), sampler.batch(50, 3)])
    assert torch.equal(sampler.batch(40, 13), joined)


def test_too_little_data_is_refused_in_one_sentence():
    with pytest.raises(DataError, match="has 20 tokens, fewer than the 21 that blocks of 10 need"):
        BlockSampler(np.arange(20, dtype=np.uint32), 10, seed=0)
    assert BlockSampler(np.arange(21, dtype=np.uint32), 10, seed=0).blocks_per_epoch == 1
