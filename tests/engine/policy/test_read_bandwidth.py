"""The bandwidth probe measures something, and refuses what it cannot measure. No speed is asserted."""

from __future__ import annotations

import os

import pytest
import torch

from truedraft.engine.policy import measuring, read_bandwidth
from truedraft.errors import OptionError
from truedraft.machine import this_machine


def test_something_is_read() -> None:
    assert read_bandwidth(size_bytes=1 << 20, repetitions=1) > 0.0


def test_the_fastest_read_counts_and_bytes_are_those_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0, 9.0, 9.0, 0.5, 1.0, 2.0, 1.0, 0.25, 4.0])
    monkeypatch.setattr(measuring, "_seconds", lambda *_: next(seconds))
    assert read_bandwidth(size_bytes=1 << 10, repetitions=2) == 4096.0


@pytest.mark.parametrize("size", [0, -8, 12])
def test_unusable_sizes_are_refused(size: int) -> None:
    with pytest.raises(OptionError, match=f"multiple of 8 above 0, got {size}"):
        read_bandwidth(size_bytes=size)


def test_no_repetitions_are_refused() -> None:
    with pytest.raises(OptionError, match="repetitions must be 1 or more, got 0"):
        read_bandwidth(size_bytes=8, repetitions=0)


def test_too_little_memory_is_told_in_one_sentence() -> None:
    with pytest.raises(OptionError, match="GiB of memory are free on cpu"):
        read_bandwidth(size_bytes=1 << 60)


def test_the_machine() -> None:
    found = this_machine()
    assert found["cpu"]
    assert found["cores"] == os.cpu_count()
    assert found["threads"] == torch.get_num_threads()
    assert found["device"] == "cpu"
