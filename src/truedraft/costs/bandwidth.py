"""How fast this machine reads memory: the limit of a forward over few tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.errors import OptionError
from truedraft.machine import wait_for

_GIBIBYTE = 1 << 30
_CALLS_ON_CUDA = 20  # one call is over before the host has seen it start


@dataclass(frozen=True, slots=True)
class ReadBandwidth:
    """Measured reads.

    Attributes:
        by_kind: bytes per second of each kind of read, the best of its repetitions.
    """

    by_kind: dict[str, float]

    @property
    def bytes_per_s(self) -> float:
        """Of the fastest kind."""
        return max(self.by_kind.values())


def read_bandwidth(
    device: str | torch.device = "cpu", *, size_bytes: int = _GIBIBYTE, repetitions: int = 4
) -> ReadBandwidth:
    """Read a block of memory in three ways with all of torch's threads: float32 sum and maximum, int64 sum.

    Args:
        device: whose memory.
        size_bytes: of the block, a multiple of 8; much more than the caches hold, or they are what is measured.
        repetitions: of each kind, interleaved; the fastest counts, for a neighbour can only slow one down.

    Raises:
        OptionError: an unusable size or number of repetitions, or a block that does not fit into memory.
    """
    if size_bytes < 8 or size_bytes % 8:
        raise OptionError(f"size_bytes must be a multiple of 8 above 0, got {size_bytes}")
    if repetitions < 1:
        raise OptionError(f"repetitions must be 1 or more, got {repetitions}")
    place = torch.device(device)
    try:
        # Written, not only reserved: pages that nobody wrote are all one page of zeros.
        block = torch.ones(size_bytes // 4, device=place)
    except RuntimeError as error:
        raise OptionError(
            f"no {size_bytes / _GIBIBYTE:.2f} GiB of memory are free on {place} to measure reads; free some"
        ) from error
    whole = block.view(torch.int64)
    kinds: dict[str, Callable[[], Tensor]] = {
        "sum of float32": block.sum,
        "maximum of float32": block.amax,
        "sum of int64": whole.sum,
    }
    calls = _CALLS_ON_CUDA if place.type == "cuda" else 1
    fastest = dict.fromkeys(kinds, float("inf"))
    for _ in range(repetitions + 1):  # the first round warms up, and is never the fastest
        for kind, read in kinds.items():
            fastest[kind] = min(fastest[kind], _seconds(read, calls, place))
    return ReadBandwidth({kind: size_bytes / seconds for kind, seconds in fastest.items()})


def _seconds(read: Callable[[], Tensor], calls: int, device: torch.device) -> float:
    """Seconds of one call."""
    wait_for(device)
    started = time.perf_counter()
    for _ in range(calls):
        read()
    wait_for(device)
    return (time.perf_counter() - started) / calls
