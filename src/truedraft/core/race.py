"""Which tokens may have the largest log p + G of a law, found without a logarithm for most of the vocabulary.

With G = -log E and E = -log U, the largest log p(v) + G(v) is the smallest E(v) / p(v): a race of exponential clocks.
E >= 1 - U, so once some token has E / p = t, only tokens with p / (1 - U) >= 1 / t can be before it, and these are a
handful: about t of them, whatever the size of the vocabulary. So the filter needs U to a few digits, which costs the
integer arithmetic of the hash and one division, in float32.

Everything is rounded so that no token is left out that would win in float64; the tokens that are kept are then judged
by the definition. It works on the CPU, in blocks that stay in the processor's cache, with numpy, whose integer
arithmetic is twice as fast as torch's there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truedraft.core.noise import GOLDEN, MIX_1, MIX_2, mix, open_unit

_FULL = (1 << 64) - 1
_BLOCK = 1 << 15
_GROUPS = 1024
"""Tokens with the same id modulo this are a group, and the best of each group is known."""
_SLACK = 1.0 - 2.0**-10
"""More than all roundings of the filter together, which are a few of float32."""
_LEAST_LOG_2 = 0.69
"""A little below log 2: E is larger where U < 1/2."""
_LEAST_SCALE = 1e-30
"""Below this float32 loses digits; a law never comes near it, as its largest entry is at least 1 / vocab."""


class Race:
    """Finds the tokens that may win, for laws over one vocabulary; it holds the memory that this takes.

    Args:
        vocab: size of the vocabulary.
    """

    def __init__(self, vocab: int) -> None:
        self._block = min(_BLOCK, 1 << (vocab - 1).bit_length())
        self._ids = np.arange(min(vocab, self._block), dtype=np.uint64)
        self._bits, self._spare = np.empty_like(self._ids), np.empty_like(self._ids)
        self._lead = np.empty(vocab, np.float32)
        # Whole rows of groups; what lies behind the vocabulary stays 0, which is never a candidate.
        self._ratios = np.zeros(-(-vocab // _GROUPS) * _GROUPS, np.float32)
        self._key: int | None = None

    def candidates(self, law: NDArray[Any], key: int, count: int) -> NDArray[np.int64] | None:
        """Tokens among which the `count` largest log p + G are, in rising order.

        Args:
            law: `[vocab]`, float32 or float64.
            key: of the noise, 64 bits.
            count: how many tokens are looked for, at least 1.

        Returns:
            The ids, or None where the filter cannot say: too few tokens with mass and U >= 1/2, or no law at all.
        """
        if key != self._key:
            self._fill_lead(key)
            self._key = key
        ratios = np.divide(law, self._lead, out=self._ratios[: len(law)])
        found = self._distinct(count)
        if found is None:
            return None
        # The bound: so many tokens as are looked for have at most this E / p.
        bound = max(_exponential(key, token) / float(law[token]) for token in found.tolist())
        scale = _SLACK / (bound * 2.0**64)
        if not scale > _LEAST_SCALE:
            return None
        fast = ratios <= -scale
        least = _LEAST_LOG_2 / bound
        if least <= 1.0:
            fast |= law >= least  # U < 1/2 takes a probability that at most bound / log 2 tokens have
        return fast.nonzero()[0]

    def _distinct(self, count: int) -> NDArray[np.int64] | None:
        """The best tokens of the `count` best groups: near the best of all, and never one twice."""
        table = self._ratios.reshape(-1, _GROUPS)
        best = table.min(axis=0)
        if count > _GROUPS or not best.min() < 0.0:  # which says no where there is NaN
            return None
        groups = best.argpartition(count - 1)[:count] if count > 1 else best.argmin(keepdims=True)
        if not best[groups[-1]] < 0.0:
            return None
        return table[:, groups].argmin(axis=0) * _GROUPS + groups

    def _fill_lead(self, key: int) -> None:
        """-2^64 (1 - U) of all tokens where U >= 1/2, not larger in size than it is; positive elsewhere.

        The bits are those of `noise.gumbel_of`, but for the last 33: there they are ones, for the last step of the
        finaliser, which only changes those, is left out.
        """
        # The ids of a block differ in their low bits alone, so `ids ^ key` is the same in all blocks but a constant.
        low = self._block - 1
        within = self._ids ^ np.uint64(key & low)
        for start in range(0, len(self._lead), self._block):
            own = self._lead[start : start + self._block]
            bits, spare = self._bits[: len(own)], self._spare[: len(own)]
            constant = (((start ^ key) & ~low & _FULL) + GOLDEN) & _FULL
            np.add(within[: len(own)], np.uint64(constant), out=bits)
            high = constant >> 30
            if (constant + low) >> 30 == high:  # nearly always: then no carry reaches the bits that the shift leaves
                np.bitwise_xor(bits, np.uint64(high), out=bits)
            else:
                np.bitwise_xor(bits, np.right_shift(bits, np.uint64(30), out=spare), out=bits)
            np.multiply(bits, np.uint64(MIX_1), out=bits)
            np.bitwise_xor(bits, np.right_shift(bits, np.uint64(27), out=spare), out=bits)
            np.multiply(bits, np.uint64(MIX_2), out=bits)
            np.bitwise_or(bits, np.uint64((1 << 33) - 1), out=bits)
            np.copyto(own, bits.view(np.int64), casting="unsafe")


def _exponential(key: int, token: int) -> float:
    """E of a token: a standard exponential number."""
    return -math.log(open_unit(mix(key, token)))
