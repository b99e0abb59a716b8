"""The one door between host and device in a step: numbers go up without waiting, and come back in one transfer.

Reading a number from a device makes the host wait until all queued work is done; meanwhile it queues nothing, and
afterwards the device has nothing to do. So a step on a device reads once, at its end. On the CPU reading costs
nothing, and reading early spares work: there each number is looked at when it is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def waits(device: torch.device) -> bool:
    """Whether reading a number from the device makes the host wait: everywhere but on the CPU."""
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
    # Page-locked, so that the device can read it later; torch gives the block out again once it was read.
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def fetch(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Read numbers in one transfer: the host waits once, or not at all if none is on a device.

    Args:
        tensors: any shapes; of floats, bools, or integers below 2^53. Those on another device than the first one that
            is waited for are brought there.

    Returns:
        For each the numbers in it, flat; integers and bools from a device as floats, which hold them exactly.
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
