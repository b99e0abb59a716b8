"""Keyed noise of chains: normal and uniform numbers by their purpose, for all rows of a round at once.

As in `truedraft.core.noise` no key serves two decisions: numbers are keyed by (seed, chain, step, call, purpose, index,
coordinate), where call counts the target's calls so far, so that the noise of a discarded draft is never used again.
Only shared numbers are keyed without the call: they belong to the step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from truedraft.core.noise import GOLDEN, Purpose, mix, mixed, mixed_each, open_unit_of, open_units, signed

_FEW = 1 << 15  # numbers; torch also makes them in one thread


def chain_roots(seed: int, chains: int, device: torch.device) -> Tensor:
    """The keys `[chains]` of chains 0, 1, ... of a seed, int64."""
    return mixed(torch.arange(chains, device=device), signed(mix(GOLDEN, seed)))


class RoundNoise:
    """The noise of one round.

    Args:
        calls: number of target calls so far `[chains]`, or by step `[depth, chains]`.
        depth: maximum number of steps in the round.
        at_once: purposes that most steps use, for which numbers of all steps are made at once.
    """

    def __init__(
        self,
        roots: Tensor,
        steps: Tensor,
        calls: Tensor,
        depth: int,
        dtype: torch.dtype,
        at_once: frozenset[Purpose] = frozenset({Purpose.DRAFT, Purpose.ACCEPT}),
    ) -> None:
        self.shared_keys = mixed(roots, steps + torch.arange(depth, device=roots.device)[:, None])  # [depth, chains]
        self.keys = mixed(self.shared_keys, calls)
        self.dtype = dtype
        self.at_once = at_once
        self._blocks: dict[tuple[int, bool, Purpose], Tensor] = {}

    def at(self, depth: int) -> StepNoise:
        return StepNoise(self, lambda of_round: of_round[depth])

    def of(self, depths: Tensor, chains: Tensor) -> StepNoise:
        return StepNoise(self, lambda of_round: of_round[depths, chains])

    def first(self, depth: int) -> StepNoise:
        """The noise of all chains at the first `depth` depths, concatenated `[depth * chains]`."""
        return StepNoise(self, lambda of_round: of_round[:depth].flatten(0, 1))

    def block(self, size: int, shared: bool, purpose: Purpose) -> Tensor:
        """Numbers `[depth, chains, size]` for all steps of the round, made at once."""
        place = size, shared, purpose
        if place not in self._blocks:
            self._blocks[place] = numbers(self.shared_keys if shared else self.keys, size, purpose, 0, self.dtype)
        return self._blocks[place]


class StepNoise:
    """The noise of some steps of a round; each method returns one row for each of them."""

    def __init__(self, noise: RoundNoise, some: Callable[[Tensor], Tensor]) -> None:
        self._noise = noise
        self._some = some

    def shared_normal(self, size: int) -> Tensor:
        """Standard normal numbers `[chains, size]` of the step itself, the same in every call."""
        return self._some(self._noise.block(size, True, Purpose.COUPLED))

    def shared_uniform(self) -> Tensor:
        """Numbers in (0, 1) `[chains]` of the step itself, the same in every call."""
        return self._some(self._noise.block(0, True, Purpose.COUPLED))[:, 0]

    def normal(self, purpose: Purpose, size: int) -> Tensor:
        """Standard normal numbers `[chains, size]` for one decision."""
        return self._own(purpose, size)

    def uniform(self, purpose: Purpose) -> Tensor:
        """Numbers in (0, 1) `[chains]` for one decision."""
        return self._own(purpose, 0)[:, 0]

    def attempt(self, number: int, rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The noise of a repeated draw for some of the chains: `truedraft.process.rules.Draws`."""
        keys = self._some(self._noise.keys)[rows]
        normal = numbers(keys, size, Purpose.RECOVERED, number, self._noise.dtype)
        return normal, numbers(keys, 0, Purpose.RECOVERED, number, self._noise.dtype)[:, 0]

    def _own(self, purpose: Purpose, size: int) -> Tensor:
        if purpose in self._noise.at_once:
            return self._some(self._noise.block(size, False, purpose))
        return numbers(self._some(self._noise.keys), size, purpose, 0, self._noise.dtype)


def numbers(keys: Tensor, size: int, purpose: Purpose, index: int, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers `[..., size]` under keys `[...]`; with size 0 uniform ones `[..., 1]`.

    Coordinate 0 is the uniform number, so that an attempt's two kinds share none.
    """
    if keys.device.type == "cpu" and keys.numel() * max(size, 1) <= _FEW:
        few = mixed_each(mixed_each(keys.numpy().view(np.uint64), np.uint64(purpose)), np.uint64(index))[..., None]
        each = np.arange(1, size + 1, dtype=np.uint64) if size else np.uint64(0)
        uniform = torch.from_numpy(open_units(mixed_each(few, each)))
    else:
        places = mixed(mixed(keys, int(purpose)), index)[..., None]
        coordinates = torch.arange(1, size + 1, device=keys.device) if size else 0
        uniform = open_unit_of(mixed(places, coordinates))
    return (torch.special.ndtri(uniform) if size else uniform).to(dtype)
