"""The one door between host and device in a step: numbers go up without waiting, and come back in one transfer.

Reading a number from a device makes the host wait until all queued work is done; meanwhile it queues nothing, and
afterwards the device has nothing to do. So a step on a device reads once, at its end. On the CPU reading costs
nothing, and reading early spares work: there each number is looked at when it is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def waits(device: torch.device) -> bool:
    """Whether reading a number from the device makes the host wait: everywhere but on the CPU."""
    return device.type != "cpu"


def upload(numbers: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers of the host as a tensor `[numbers]` on a device; the copy is only queued."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=dtype)
    # Page-locked, so that the device can read it later; torch gives the block out again once it was read.
    host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def fetch(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Read tensors in one transfer: the host waits once, or not at all if none holds a number.

    Args:
        tensors: any shapes; of floats, bools, or integers below 2^53. Those on another device than the first one are
            brought there.

    Returns:
        For each the numbers in it, flat; integers and bools as floats, which hold them exactly.
    """
    if not any(tensor.numel() for tensor in tensors):
        return [[] for _ in tensors]
    device = tensors[0].device
    alike = [
        torch.cat([tensor.to(device).flatten() for tensor in group]).double()
        for _, group in itertools.groupby(tensors, key=lambda tensor: tensor.dtype)
    ]
    numbers = iter(torch.cat(alike).tolist())
    return [list(itertools.islice(numbers, tensor.numel())) for tensor in tensors]
