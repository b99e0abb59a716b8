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


def test_stream_separates_texts_and_its_hash_names_the_ids(tmp_path):
    assert write_stream(["ab", "c"], Letters(), tmp_path / "s.bin") == 6
    one = read_stream(tmp_path / "s.bin")
    assert one.tolist() == [0, 1, 2, 0, 3, 0]
    assert stream_hash(one) == stream_hash(one.copy()) != stream_hash(one[::-1])
    with pytest.raises(DataError, match="no text"):
        write_stream([], Letters(), tmp_path / "s.bin")


def test_an_epoch_visits_each_block_once():
    sampler = BlockSampler(np.arange(103, dtype=np.uint32), sequence_length=10, seed=3)
    assert sampler.blocks_per_epoch == 9
    blocks = sampler.batch(0, 9)
    assert blocks.shape == (9, 11) and blocks.dtype == torch.int64
    assert torch.equal(blocks[:, 1:], blocks[:, :-1] + 1)  # each is a contiguous piece
    starts = sorted(blocks[:, 0].tolist())
    assert np.diff(starts).tolist() == [10] * 8  # disjoint, side by side


def test_a_batch_is_a_function_of_its_index_and_the_seed_and_epochs_differ():
    stream = np.arange(1000, dtype=np.uint32)
    sampler = BlockSampler(stream, 10, seed=3)
    whole = sampler.batch(0, 196)
    assert torch.equal(torch.cat([sampler.batch(90, 10), sampler.batch(100, 3)]), whole[90:103])
    assert not torch.equal(whole[:98], whole[98:])
    assert not torch.equal(whole[:98], BlockSampler(stream, 10, seed=4).batch(0, 98))


def test_too_little_data_is_refused_in_one_sentence():
    with pytest.raises(DataError, match="has 20 tokens, fewer than the 21 that blocks of 10 need"):
        BlockSampler(np.arange(20, dtype=np.uint32), 10, seed=0)
    assert BlockSampler(np.arange(21, dtype=np.uint32), 10, seed=0).blocks_per_epoch == 1
