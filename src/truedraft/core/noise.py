"""Keyed noise: every random number is a function of what it decides, never of when it was drawn.

A draw is keyed (seed, sample, position, purpose, step, index). No key serves two decisions: noise reused after a
rejection biases the law. Only coupled sampling keys by (seed, sample, position, token). The generator is 64-bit
integer arithmetic (a chain of the splitmix64 finaliser), with the same bits in Python, on the CPU and on a GPU.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a random number decides."""

    DRAFT = 1
    ACCEPT = 2
    RECOVERED = 3
    BONUS = 4
    COUPLED = 5


class Noise(Protocol):
    """The noise of one request at one step; depth 0 is the first token that the step decides."""

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        """A number in (0, 1) for one decision; `index` tells decisions of one purpose at one depth apart."""
        ...

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> Tensor | None:
        """Standard Gumbel noise `[vocab]` of a position, float64, or None when the request is greedy (G = 0)."""
        ...


class KeyedNoise:
    """Noise of one request at one step.

    Args:
        seed: the request's seed.
        position: absolute position of the first token that the step decides.
        step: the request's target calls so far.
        sample: which of several answers to the same prompt.
        greedy: whether Gumbel noise is 0, as at temperature 0.
    """

    def __init__(self, seed: int, position: int, step: int, sample: int = 0, *, greedy: bool = False) -> None:
        self._root = mix(mix(_GOLDEN, seed), sample)
        self._position = position
        self._step = step
        self._greedy = greedy
        self._gumbel: dict[tuple[int, int, torch.device], Tensor] = {}

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        """A number in (0, 1), keyed by (seed, sample, position, purpose, step, index)."""
        key = self._root
        for part in (self._position + depth, int(purpose), self._step, index):
            key = mix(key, part)
        # 52 bits and a half: with 53 the largest would round up to 1.
        return ((key >> 12) + 0.5) * 2.0**-52

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> Tensor | None:
        """Gumbel noise `[vocab]` of a position, keyed by (seed, sample, position, token); kept for the step."""
        if self._greedy:
            return None
        place = (depth, vocab, device)
        if place not in self._gumbel:
            key = mix(mix(self._root, self._position + depth), int(Purpose.COUPLED))
            self._gumbel[place] = gumbel_of(key, torch.arange(vocab, device=device))
        return self._gumbel[place]


def mix(state: int, part: int) -> int:
    """One link of the chain: fold an integer into a 64-bit state."""
    return _finalise_int((state ^ (part & _MASK)) + _GOLDEN & _MASK)


def gumbel_of(key: int, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise of tokens under a 64-bit key, float64, the shape of `tokens` (int64)."""
    bits = _finalise((tokens ^ _signed(key)).add_(_signed(_GOLDEN)))
    uniform = _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def _finalise_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def _finalise(z: Tensor) -> Tensor:
    """Scramble `z`; a vocabulary's worth of temporaries would cost more than the arithmetic, so there is one."""
    # int64 products wrap around, as products modulo 2^64 do; only the shifts must be told to bring in zeros.
    z = (z ^ _shift_right(z, 30)).mul_(_signed(_MIX_1))
    z.bitwise_xor_(_shift_right(z, 27)).mul_(_signed(_MIX_2))
    return z.bitwise_xor_(_shift_right(z, 31))


def _shift_right(z: Tensor, count: int) -> Tensor:
    """Logical right shift of int64; torch's own is arithmetic and would copy the sign bit."""
    return (z >> count).bitwise_and_((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
