"""Keyed noise: every random number is a function of the decision that it makes, not of the order of draws.

A draw is keyed (seed, sample, position, purpose, level, member, step, index). No key serves two decisions, because
noise reused after a rejection biases the distribution. Only coupled sampling keys by (seed, sample, position, token).
The generator is a chain of the splitmix64 finaliser, with the same bits in Python, on the CPU and on a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_LEVEL = 1 << 62  # different from any position
_MEMBER_BITS = 8  # the purpose is in the lower bits, so that member 0 has the noise of a single drafter
_FEW = 24
"""Up to this many numbers are faster one by one than as an array."""


class Purpose(IntEnum):
    """Decisions that use random numbers."""

    DRAFT = 1
    ACCEPT = 2
    RECOVERED = 3
    BONUS = 4
    COUPLED = 5


NoiseKey: TypeAlias = tuple[int, int, int, int, int]
"""64 bits for seed, sample and cascade levels; position, step and member; 64 bits for seed and sample."""


class Noise(Protocol):
    """The noise of one request at one step; depth 0 is the first token that the step decides."""

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        """A number in (0, 1) for one decision; `index` distinguishes decisions of one purpose at one depth."""
        ...

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> Tensor: ...

    def inside(self, turn: int, depth: int) -> Noise:
        """The noise of the inner decision number `turn` of a cascade, from `depth` on; the same Gumbel noise."""
        ...


@dataclass(frozen=True, eq=False)
class UniformKeys:
    """Keys of the decisions of a batch: request, depth and index, `[keys]` each."""

    requests: NDArray[np.int64]
    depths: NDArray[np.int64]
    indices: NDArray[np.int64]

    @cached_property
    def listed(self) -> list[tuple[int, int, int]]:
        return list(zip(self.requests.tolist(), self.depths.tolist(), self.indices.tolist(), strict=True))


class KeyedNoise:
    """Noise of one request at one step; `drew` is whether a draft of this level used a number since `of_member`.

    Args:
        position: absolute position of the first token that the step decides.
        step: the request's target calls so far.
        sample: index among several answers to the same prompt.
        member: index of the drafter among several; 0 is also the noise of verdicts.
    """

    drew = False

    def __init__(self, seed: int, position: int, step: int, sample: int = 0, *, member: int = 0) -> None:
        self._root = self._shared_root = _root_of(seed, sample)
        self._position = position
        self._step = step
        self._member = member
        self._uniform_keys: dict[tuple[int, int], int] = {}  # by purpose and depth
        self._gumbel: dict[tuple[int, int, torch.device], Tensor] = {}

    @classmethod
    def of_key(cls, key: NoiseKey) -> KeyedNoise:
        root, position, step, member, shared = key
        noise = cls(0, position, step, member=member)
        noise._root, noise._shared_root = root, shared
        return noise

    @property
    def key(self) -> NoiseKey:
        return self._root, self._position & _MASK, self._step & _MASK, self._member, self._shared_root

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        """A number in (0, 1), keyed by (seed, sample, position, purpose, member, step, index)."""
        if purpose is Purpose.DRAFT:
            self.drew = True
        place = (purpose, depth)
        key = self._uniform_keys.get(place)
        if key is None:
            key = self._root
            for part in (self._position + depth, int(purpose) | self._member << _MEMBER_BITS, self._step):
                key = mix(key, part)
            self._uniform_keys[place] = key
        return open_unit(mix(key, index))

    def of_member(self, member: int) -> KeyedNoise:
        """The noise of a drafter among several: its own uniform numbers, and the Gumbel noise of all."""
        if not member:
            self.drew = False
            return self
        own = copy.copy(self)
        own._member, own.drew = member, False
        own._uniform_keys = {}
        return own

    def inside(self, turn: int, depth: int) -> KeyedNoise:
        own = copy.copy(self)
        own._root = mix(mix(self._root, _LEVEL), turn)
        own._position += depth
        own._uniform_keys, own._gumbel, own.drew = {}, {}, False
        return own

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> Tensor:
        """Gumbel noise `[vocab]` of a position, keyed by (seed, sample, position, token); cached for the step."""
        place = (depth, vocab, device)
        if place not in self._gumbel:
            self._gumbel[place] = gumbel_of(self.gumbel_key(depth), torch.arange(vocab, device=device))
        return self._gumbel[place]

    def gumbel_key(self, depth: int) -> int:
        """The argument of `gumbel_of` for the Gumbel noise of a position, to compute it for few tokens."""
        return mix(mix(self._shared_root, self._position + depth), int(Purpose.COUPLED))


def uniforms(noise: Sequence[Noise], purpose: Purpose, keys: UniformKeys) -> NDArray[np.float64]:
    """The numbers of `Noise.uniform` for some decisions: `[keys]`, float64."""
    if len(keys.listed) <= _FEW or not all(type(own) is KeyedNoise and not own.key[3] for own in noise):
        return np.array([noise[request].uniform(purpose, depth, index) for request, depth, index in keys.listed])
    roots, positions, steps, *_ = np.array([own.key for own in noise if isinstance(own, KeyedNoise)], np.uint64).T
    if purpose is Purpose.DRAFT:
        for request in np.unique(keys.requests).tolist():
            own = noise[request]
            assert isinstance(own, KeyedNoise)
            own.drew = True
    bits = roots[keys.requests]
    places = positions[keys.requests] + keys.depths.view(np.uint64)
    for part in (places, np.uint64(purpose), steps[keys.requests], keys.indices.view(np.uint64)):
        bits = mixed_each(bits, part)
    return open_units(bits)


def gumbel_key(noise: Noise, depth: int) -> int | None:
    """The key of the Gumbel noise of a position; None for noise without keys."""
    if isinstance(noise, KeyedNoise) and type(noise).gumbel is KeyedNoise.gumbel:
        return noise.gumbel_key(depth)
    return None


@lru_cache(maxsize=1024)
def _root_of(seed: int, sample: int) -> int:
    return mix(mix(GOLDEN, seed), sample)


def mix(state: int, part: int) -> int:
    """One link of the chain: fold an integer into a 64-bit state."""
    return _finalise_int((state ^ (part & _MASK)) + GOLDEN & _MASK)


def open_unit(bits: int) -> float:
    """A number in (0, 1) from 64 bits."""
    # 52 bits and a half: with 53 the largest would round up to 1.
    return ((bits >> 12) + 0.5) * 2.0**-52


def gumbel_of(key: int | Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise of tokens, float64, under one key of 64 bits, or keys as int64 that broadcast."""
    return open_unit_of(mixed(tokens, signed(key) if isinstance(key, int) else key)).log_().neg_().log_().neg_()


def mixed(states: Tensor, parts: Tensor | int) -> Tensor:
    """`mix` for tensors of int64, which hold the same 64 bits; shapes broadcast."""
    return _finalise((states ^ parts).add_(signed(GOLDEN)))


def open_unit_of(bits: Tensor) -> Tensor:
    """`open_unit` for a tensor of int64, float64."""
    return _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)


def gumbel_of_each(keys: NDArray[np.uint64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """`gumbel_of` on the CPU for tokens and keys `[tokens]`: numpy, with lower overhead, and torch's logarithms."""
    uniform = open_units(mixed_each(keys, tokens.view(np.uint64)))
    numbers: NDArray[np.float64] = torch.from_numpy(uniform).log_().neg_().log_().neg_().numpy()
    return numbers


def mixed_each(states: NDArray[np.uint64], parts: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """`mix` for arrays; shapes broadcast."""
    bits = (states ^ parts) + np.uint64(GOLDEN)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(MIX_1)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(MIX_2)
    return bits ^ (bits >> np.uint64(31))


def open_units(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """`open_unit` for arrays: numbers in (0, 1), from the upper 52 bits."""
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _finalise_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * MIX_2) & _MASK
    return z ^ (z >> 31)


def _finalise(z: Tensor) -> Tensor:
    """The splitmix64 finaliser for `z`, in place where possible: temporaries cost more than the arithmetic."""
    # int64 products wrap around, as products modulo 2^64 do; only the shifts must fill with zeros.
    z = (z ^ _shift_right(z, 30)).mul_(signed(MIX_1))
    z.bitwise_xor_(_shift_right(z, 27)).mul_(signed(MIX_2))
    return z.bitwise_xor_(_shift_right(z, 31))


def _shift_right(z: Tensor, count: int) -> Tensor:
    return (z >> count).bitwise_and_((1 << (64 - count)) - 1)


def signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
