"""Memory read bandwidth of this machine: the limit of a forward over few tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from truedraft.errors import OptionError
from truedraft.machine import wait_for

_GIBIBYTE = 1 << 30
_CALLS_ON_CUDA = 20  # one call is over before the host has seen it start


def read_bandwidth(device: str | torch.device = "cpu", *, size_bytes: int = _GIBIBYTE, repetitions: int = 4) -> float:
    """Bytes per second of reading a block of memory with all of torch's threads.

    It is read in three ways, a sum and a maximum of float32 and a sum of int64; the fastest counts.

    Args:
        size_bytes: of the block, a multiple of 8; must be much larger than the caches.
        repetitions: of each kind, interleaved; the fastest counts, because other load can only slow one down.

    Raises:
        OptionError: an unusable size or number of repetitions, or a block that does not fit into memory.
    """
    if size_bytes < 8 or size_bytes % 8:
        raise OptionError(f"size_bytes must be a multiple of 8 above 0, got {size_bytes}")
    if repetitions < 1:
        raise OptionError(f"repetitions must be 1 or more, got {repetitions}")
    place = torch.device(device)
    try:
        # Written, not only reserved: unwritten pages are all the same page of zeros.
        block = torch.ones(size_bytes // 4, device=place)
    except RuntimeError as error:
        raise OptionError(
            f"no {size_bytes / _GIBIBYTE:.2f} GiB of memory are free on {place} to measure reads; free some"
        ) from error
    whole = block.view(torch.int64)
    calls = _CALLS_ON_CUDA if place.type == "cuda" else 1
    # The first round warms up, and is never the fastest.
    return size_bytes / min(
        _seconds(read, calls, place) for _ in range(repetitions + 1) for read in (block.sum, block.amax, whole.sum)
    )


def _seconds(read: Callable[[], Tensor], calls: int, device: torch.device) -> float:
    wait_for(device)
    started = time.perf_counter()
    for _ in range(calls):
        read()
    wait_for(device)
    return (time.perf_counter() - started) / calls
