"""The tokens with the largest log p + G of a distribution under keyed noise (docs/concepts.md, coupled sampling).

`choices_by_definition` needs noise for the whole vocabulary. On the CPU that would cost more than a small model's
forward, so there `coupled_choices` computes it only for tokens that may win, with the same result.

With G = -log E and E = -log U, the largest log p(v) + G(v) is the smallest E(v) / p(v): a race of exponential clocks. E
>= 1 - U, so once some token has E / p = t, only tokens with p / (1 - U) >= 1 / t can be before it: about t of them, for
any size of the vocabulary. The filter needs U to a few digits, in float32; its roundings never exclude a token that
would win in float64. Integer arithmetic of numpy is twice as fast as torch's on the CPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.noise import (
    GOLDEN,
    MIX_1,
    MIX_2,
    Noise,
    gumbel_key,
    gumbel_of,
    gumbel_of_each,
    mix,
    open_unit,
    signed,
)
from truedraft.core.probs import by_rows

Place = tuple[Noise, int]
"""The noise of a request, and the depth of its decision."""

_FEW = 1024
"""Up to this many tokens the definition is cheaper than the filter."""
_FEW_OF = 8
"""The same for one token in eight of the vocabulary: the definition costs that much more per token than the filter."""
_WORD = 8
"""Tokens with flags checked together: bytes of a 64-bit word."""


def coupled_choices(probs: Sequence[Tensor], places: Sequence[Place], count: int = 1) -> Tensor:
    """The `count` tokens with the largest log p(v) + G(v) of each row, in descending order; the lowest id among equals.

    A row's result depends on no other row. Never waits for a device.

    Args:
        probs: at least one `[rows, vocab]`, float32 or float64, all on one device.
        places: the noise of each row, over all of `probs`.

    Returns:
        Token ids `[total rows, count]`, int64, on the device of the distributions. Entries are the vocabulary size
        where fewer tokens have mass, and throughout a row with NaN.
    """
    if not transfers.waits(probs[0].device):
        return _choose_on_cpu(probs, places, count)
    chosen, start = [], 0
    for _, group in itertools.groupby(probs, key=lambda dist: (dist.shape[-1], dist.dtype)):
        own = list(group)
        rows = sum(map(len, own))
        together = own[0] if len(own) == 1 else torch.cat(own)
        chosen.append(choices_by_definition(together, places[start : start + rows], count))
        start += rows
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)


def choices_by_definition(dist: Tensor, places: Sequence[Place], count: int = 1) -> Tensor:
    """`coupled_choices` of `[rows, vocab]` on any device, from the noise of the whole vocabulary."""
    keys = [gumbel_key(*place) for place in places]
    known = [signed(key) for key in keys if key is not None]
    if len(known) == len(keys):  # uploaded in one copy
        return choices_by_keys(dist, transfers.upload(known, dist.device), count)
    noise = [noise.gumbel(depth, dist.shape[-1], dist.device) for noise, depth in places]
    return choices_by_noise(dist, torch.stack(noise), count)


def choices_by_keys(dist: Tensor, keys: Tensor, count: int = 1) -> Tensor:
    """`choices_by_definition` with the noise of keys `[rows]`, as the int64 with the same bits."""
    tokens = torch.arange(dist.shape[-1], device=dist.device)
    (chosen,) = by_rows(lambda own, key: (choices_by_noise(own, gumbel_of(key[:, None], tokens), count),), dist, keys)
    return chosen


def choices_by_noise(dist: Tensor, noise: Tensor, count: int = 1) -> Tensor:
    """`choices_by_definition` with Gumbel noise `[rows, vocab]`, float64."""
    vocab = dist.shape[-1]
    scores = torch.log(dist.double()).add_(noise)
    best = scores.argmax(dim=-1, keepdim=True) if count == 1 else scores.topk(min(count, vocab), dim=-1).indices
    # A row with NaN has it among its best, and nothing is above it.
    some = scores.gather(-1, best) > -torch.inf
    chosen = best.masked_fill(~some, vocab).masked_fill(scores.amax(dim=-1, keepdim=True).isnan(), vocab)
    return torch.nn.functional.pad(chosen, (0, count - chosen.shape[-1]), value=vocab)


@dataclass(slots=True)
class _Row:
    dist: NDArray[Any]
    place: Place
    key: int | None
    out: NDArray[np.int64]
    found: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


def _choose_on_cpu(probs: Sequence[Tensor], places: Sequence[Place], count: int) -> Tensor:
    given = [row for dist in probs for row in dist.detach().numpy()]
    chosen = np.empty((len(given), count), np.int64)
    rows = [_Row(dist, place, gumbel_key(*place), out) for dist, place, out in zip(given, places, chosen, strict=True)]
    finder = _Finder(count)
    # Rows with one key in sequence: they share the noise.
    for row in sorted(rows, key=lambda row: row.key or 0):
        finder.look(row)
    finder.finish()
    unsettled = []
    for row in rows:
        row.out.fill(len(row.dist))
        if len(row.found) == 1 and row.dist[row.found[0]] > 0.0:
            row.out[0] = row.found[0]
        elif len(row.found):
            unsettled.append(row)
    if unsettled:
        _settle(unsettled)
    return torch.from_numpy(chosen)


class _Finder:
    """Finds tokens that may be among the best; reuses memory for distributions over one vocabulary."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._vocab = -1
        self._flags = np.zeros(0, np.bool_)
        self._words = self._flags.view(np.uint64)
        self._race: LazyGumbelMax | None = None
        self._sparse: list[tuple[_Row, NDArray[np.int64], NDArray[np.uint64]]] = []

    def look(self, row: _Row) -> None:
        """Find the candidates of a row; `finish` does the rest. With NaN in a distribution one is among them."""
        dist = row.dist
        if row.key is None:
            row.found = np.arange(len(dist))
            return
        if len(dist) != self._vocab:
            self._vocab, self._race = len(dist), None
            self._flags = np.zeros(-(-len(dist) // _WORD) * _WORD, np.bool_)
            self._words = self._flags.view(np.uint64)
        np.not_equal(dist, 0.0, out=self._flags[: len(dist)])  # NaN is not 0 either
        some = self._words != 0
        few = max(_FEW, len(dist) // _FEW_OF)
        if _WORD * np.count_nonzero(some) > few and np.count_nonzero(self._flags) > few:
            self._race = self._race or LazyGumbelMax(len(dist))
            fast = self._race.candidates(dist, row.key, self._count)
            if fast is not None:
                row.found = fast
                return
        words = some.nonzero()[0]
        self._sparse.append((row, words, self._words[words]))

    def finish(self) -> None:
        if not self._sparse:
            return
        words = np.concatenate([each for _, each, _ in self._sparse])
        places = np.concatenate([each for _, _, each in self._sparse]).view(np.bool_).nonzero()[0]
        ids = words[places >> 3] * _WORD + (places & 7)
        ends = places.searchsorted(np.cumsum([len(each) for _, each, _ in self._sparse]) * _WORD).tolist()
        for (row, _, _), start, end in zip(self._sparse, [0, *ends[:-1]], ends, strict=True):
            row.found = ids[start:end]


def _settle(rows: Sequence[_Row]) -> None:
    counts = [len(row.found) for row in rows]
    ends = list(itertools.accumulate(counts))
    ids = np.concatenate([row.found for row in rows])
    masses = np.concatenate([row.dist[row.found] for row in rows]).astype(np.float64, copy=False)
    noise = gumbel_of_each(np.repeat(np.array([row.key or 0 for row in rows], np.uint64), counts), ids)
    for row, start, end in zip(rows, [0, *ends[:-1]], ends, strict=True):
        if row.key is None:
            own, depth = row.place
            noise[start:end] = own.gumbel(depth, end - start, torch.device("cpu")).numpy()
    scores = torch.from_numpy(masses).log_().numpy() + noise
    for row, start, end in zip(rows, [0, *ends[:-1]], ends, strict=True):
        _best(scores[start:end], row.found, row.out)


def _best(scores: NDArray[np.float64], ids: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    first = int(scores.argmax())  # the first NaN, if there is one
    if not scores[first] > -np.inf:
        return
    if len(out) == 1:
        out[0] = ids[first]
        return
    order = (-scores).argsort(kind="stable")[: len(out)]
    kept = ids[order[scores[order] > -np.inf]]
    out[: len(kept)] = kept


_FULL = (1 << 64) - 1
_BLOCK = 1 << 15
_GROUPS = 1024
"""Tokens with the same id modulo this are a group, of which the best is computed."""
_SLACK = 1.0 - 2.0**-10
"""Covers all roundings of the filter together, which are a few of float32."""
_LEAST_LOG_2 = 0.69
"""A little below log 2: E is larger where U < 1/2."""
_LEAST_SCALE = 1e-30
"""Below this float32 loses digits; distributions do not reach it, as their largest entry is at least 1 / vocab."""


class LazyGumbelMax:
    """Finds the tokens that may win, for distributions over one vocabulary, with reused memory."""

    def __init__(self, vocab: int) -> None:
        self._block = min(_BLOCK, 1 << (vocab - 1).bit_length())
        self._ids = np.arange(min(vocab, self._block), dtype=np.uint64)
        self._bits, self._spare = np.empty_like(self._ids), np.empty_like(self._ids)
        self._lead = np.empty(vocab, np.float32)
        # Whole rows of groups; the padding after the vocabulary stays 0, which is never a candidate.
        self._ratios = np.zeros(-(-vocab // _GROUPS) * _GROUPS, np.float32)
        self._key: int | None = None

    def candidates(self, dist: NDArray[Any], key: int, count: int) -> NDArray[np.int64] | None:
        """A superset of the tokens with the `count` largest log p + G, in ascending order.

        None where the filter fails: too few tokens with mass and U >= 1/2, or no valid distribution. `key` has 64 bits.
        """
        if key != self._key:
            self._fill_lead(key)
            self._key = key
        ratios = np.divide(dist, self._lead, out=self._ratios[: len(dist)])
        found = self._distinct(count)
        if found is None:
            return None
        # The bound: `count` tokens have at most this E / p.
        bound = max(-math.log(open_unit(mix(key, token))) / float(dist[token]) for token in found.tolist())
        scale = _SLACK / (bound * 2.0**64)
        if not scale > _LEAST_SCALE:
            return None
        fast = ratios <= -scale
        least = _LEAST_LOG_2 / bound
        if least <= 1.0:
            fast |= dist >= least  # a winner with U < 1/2 has a probability that at most bound / log 2 tokens have
        return fast.nonzero()[0]

    def _distinct(self, count: int) -> NDArray[np.int64] | None:
        """The best tokens of the `count` best groups: near the best of all, and distinct."""
        table = self._ratios.reshape(-1, _GROUPS)
        best = table.min(axis=0)
        if count > _GROUPS or not best.min() < 0.0:  # False where there is NaN
            return None
        groups = best.argpartition(count - 1)[:count] if count > 1 else best.argmin(keepdims=True)
        if not best[groups[-1]] < 0.0:
            return None
        return table[:, groups].argmin(axis=0) * _GROUPS + groups

    def _fill_lead(self, key: int) -> None:
        """Compute -2^64 (1 - U) of all tokens where U >= 1/2, rounded towards 0; positive elsewhere.

        The last 33 bits are ones instead of those of `noise.gumbel_of`: the finaliser's last step is left out.
        """
        # The ids of a block differ only in their low bits, so `ids ^ key` differs between blocks by a constant.
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
