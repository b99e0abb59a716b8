"""The one door between host and device in a step: numbers go up without waiting, and come back in one transfer.

Reading a number from a device makes the host wait until all queued work is done; meanwhile it queues nothing, and
afterwards the device has nothing to do. So a step on a device reads once, at its end. On the CPU reading costs
nothing, and reading early spares work: there each number is looked at when it is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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


def fetch(arrays: Sequence[Array]) -> list[list[float]]:
    """Read numbers in one transfer: the host waits once, or not at all if none is on a device.

    Args:
        arrays: any shapes; of floats, bools, or integers below 2^53. Those on another device than the first one that
            is waited for are brought there.

    Returns:
        For each the numbers in it, flat; integers and bools from a device as floats, which hold them exactly.
    """
    there = [each for each in arrays if isinstance(each, Tensor) and waits(each.device) and each.numel()]
    numbers: Iterator[float] = iter(())
    if there:
        device = there[0].device
        alike = [
            torch.cat([each.to(device).flatten() for each in group]).double()
            for _, group in itertools.groupby(there, key=lambda each: each.dtype)
        ]
        numbers = iter(torch.cat(alike).tolist())
    found: list[list[float]] = []
    for each in arrays:
        if isinstance(each, Tensor) and waits(each.device):
            found.append(list(itertools.islice(numbers, each.numel())))
        else:
            found.append(each.reshape(-1).tolist())
    return found


# ----------------------------------------------------------------------- small numbers, where they are looked at

Array = Any
"""Small numbers of a step: an array of numpy where reading costs nothing, for its calls cost a third of torch's, and a
tensor on a device. Both know operators, comparisons and indexing; what they do not share is below."""


def array(numbers: NDArray[np.generic] | Sequence[float], device: torch.device) -> Array:
    """Numbers of the host as an `Array`; on a device the copy is only queued."""
    host = np.asarray(numbers)
    if not waits(device):
        return host
    tensor = torch.from_numpy(host)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def as_array(tensor: Tensor) -> Array:
    """Small numbers that were worked out beside large ones."""
    return tensor if waits(tensor.device) else tensor.numpy()


def entries(table: Tensor, rows: Array, columns: Array) -> Array:
    """Numbers of a table `[rows, columns]`, float64, at some places: a row and a column `[n]` each."""
    if isinstance(rows, Tensor):
        return table.take(torch.add(columns, rows, alpha=table.shape[-1])).double()
    if table.dtype == torch.bfloat16:  # which numpy does not know
        table, rows = table[torch.from_numpy(rows)].float(), np.arange(len(rows))
    return table.numpy()[rows, columns].astype(np.float64)


def first_true(flags: Array) -> Array:
    """The first column in which each row `[rows, columns]` of flags is True; there is one."""
    return flags.byte().argmax(dim=-1) if isinstance(flags, Tensor) else flags.argmax(axis=-1)


def first_of_each(otherwise: Array, places: Array, values: Array, flags: Array) -> Array:
    """At each place the first of the values `[n]` that are flagged there, and what is `otherwise` where none is.

    Args:
        otherwise: `[places]`.
        places: `[n]`, where each value belongs.
        values: `[n]`.
        flags: `[n]` bool.
    """
    if isinstance(flags, Tensor):
        number = torch.arange(len(flags), device=flags.device)
        none = len(flags) + torch.arange(len(otherwise), device=flags.device)
        first = none.scatter_reduce(0, places, torch.where(flags, number, none[places]), "amin")
        return torch.cat([values, otherwise])[first]
    found = flags.nonzero()[0][::-1]  # of several values for one place the last one stays
    chosen = otherwise.copy()
    chosen[places[found]] = values[found]
    return chosen


def whole(numbers: Array) -> Array:
    """As whole numbers."""
    return numbers.long() if isinstance(numbers, Tensor) else numbers.astype(np.int64)


def joined(numbers: Array, others: Array) -> Array:
    """One behind the other, along the last axis."""
    return (
        torch.cat([numbers, others], dim=-1) if isinstance(numbers, Tensor) else np.concatenate([numbers, others], -1)
    )


def full(shape: tuple[int, ...], value: float, device: torch.device) -> Array:
    """One number many times, float64."""
    return torch.full(shape, value, dtype=torch.float64, device=device) if waits(device) else np.full(shape, value)


def where(flags: Array, yes: Array, no: Array) -> Array:
    """Choose between numbers; `flags` may be a single one."""
    if isinstance(flags, bool):
        return yes if flags else no
    return torch.where(flags, yes, no) if isinstance(flags, Tensor) else np.where(flags, yes, no)


def maximum(numbers: Array, others: Array | float) -> Array:
    """The larger of each two numbers; `numbers` may be a single one."""
    if isinstance(numbers, float):
        return max(numbers, others)
    if not isinstance(numbers, Tensor):
        return np.maximum(numbers, others)
    return torch.maximum(numbers, others) if isinstance(others, Tensor) else numbers.clamp_min(others)


def count_to_last(flags: Array) -> Array:
    """How many columns each row `[rows, columns]` of flags has up to its last True; 0 where none is."""
    if isinstance(flags, Tensor):
        return (flags * torch.arange(1, flags.shape[-1] + 1, device=flags.device)).amax(dim=-1)
    return (flags * np.arange(1, flags.shape[-1] + 1)).max(axis=-1)


def largest(numbers: Array) -> Array:
    """The largest number of each row `[..., columns]`."""
    return numbers.amax(dim=-1) if isinstance(numbers, Tensor) else numbers.max(axis=-1)


def log(numbers: Array) -> Array:
    """Natural logarithms."""
    return numbers.log() if isinstance(numbers, Tensor) else np.log(numbers)


def stack(columns: Sequence[Array]) -> Array:
    """Arrays of one shape `[...]` side by side, `[..., columns]`."""
    return torch.stack(list(columns), dim=-1) if isinstance(columns[0], Tensor) else np.stack(columns, axis=-1)
