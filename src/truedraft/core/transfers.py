"""Transfers between host and device: uploads do not wait, and a step reads in one transfer.

While the host waits for a number from a device it queues nothing, and the device is idle afterwards. So a step on a
device reads once, at its end. On the CPU reading is free, and each number is read when it is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def waits(device: torch.device) -> bool:
    """Whether reading a number from the device makes the host wait: on all devices but the CPU."""
    return device.type != "cpu"


def upload(
    numbers: Sequence[int] | Sequence[float] | NDArray[np.generic],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Numbers of the host as a tensor `[numbers]` on a device; the copy is only queued. Arrays keep shape and dtype."""
    host = torch.from_numpy(numbers) if isinstance(numbers, np.ndarray) else torch.tensor(numbers, dtype=dtype)
    if device.type == "cpu":
        return host
    # Page-locked, so that the device can read it later; torch reuses the block once it was read.
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def fetch(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Read the numbers of each tensor, flat, in one transfer: the host waits once, or not at all if all are on the CPU.

    Tensors are of floats, bools, or integers below 2^53, which floats represent exactly. Tensors on several devices are
    first copied to one.
    """
    there = [each for each in tensors if waits(each.device) and each.numel()]
    numbers: Iterator[float] = iter(())
    if there:
        device = there[0].device
        alike = [
            torch.cat([each.to(device).flatten() for each in group]).double()
            for _, group in itertools.groupby(there, key=lambda each: each.dtype)
        ]
        numbers = iter(torch.cat(alike).tolist())
    found: list[list[float]] = []
    for each in tensors:
        if waits(each.device):
            found.append(list(itertools.islice(numbers, each.numel())))
        else:
            found.append(each.flatten().tolist())
    return found
