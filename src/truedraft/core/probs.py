"""Distributions over the vocabulary, and what verification needs of them.

A distribution is a tensor `[..., vocab]` of float32 or float64 that sums to 1 along its last axis.

The nucleus (top-p): the likeliest tokens whose mass reaches p, the crossing one included; ties: lowest id first.

Which tokens these are is said by the distribution sorted in falling order, equal ones by id: the first n of them, n the
least with mass >= p (all of them where rounding leaves less than p). The mass of a prefix is its sum in that order, in
float64, so it does not depend on how many tokens stand behind it, and a row's nucleus not on its neighbours.
`nucleus_by_sorting` does just that. On a CPU, sorting the vocabulary costs more than a small model's forward, so
`nucleus_by_candidates` finds the same bits from the few tokens above a threshold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.params import SamplingParams

_BELOW_ONE = 1.0 - 2.0**-53
_AT_ONCE = 1 << 23
"""Numbers of rows that are worked on together: of a vocabulary of 150,000 all rows of a large batch, of 64 bits each
and with what is needed on the way, would take gigabytes."""


def probs_from_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that `params` makes of logits, in the order of Hugging Face: temperature, top-k, top-p, min-p.

    A row's distribution does not depend on the other rows.

    Args:
        logits: `[rows, vocab]`, any floating dtype; a row may hold -inf, but not NaN, +inf, or -inf alone.
        params: sampling options. At temperature 0 the distribution is one-hot at the lowest id among the largest
            logits.

    Returns:
        Distributions `[rows, vocab]` in float32, or float64 when the logits are float64, without gradient. Other rows
        give one that is not finite.
    """
    logits = logits.detach() if logits.dtype == torch.float64 else logits.detach().float()
    if params.greedy:
        choice = most_likely(logits)[..., None]
        # A row without a finite largest logit has no distribution: NaN says so, as softmax does at other temperatures.
        mass = torch.where(logits.gather(-1, choice).isfinite(), 1.0, torch.nan).to(logits.dtype)
        return torch.zeros_like(logits).scatter_(-1, choice, mass)
    dist = torch.softmax(_divided(logits, params.temperature), dim=-1)
    if 0 < params.top_k < dist.shape[-1]:
        # Ties are those of the logits: dividing may round two of them together.
        dist = _keep(dist, logits, logits.topk(params.top_k, dim=-1).values[..., -1:])
    if params.top_p < 1.0:
        dist = keep_nucleus(dist, params.top_p)
    if params.min_p > 0.0:
        dist = _keep(dist, dist, params.min_p * dist.amax(dim=-1, keepdim=True))
    return dist


def _divided(logits: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature, up to a constant in each row."""
    if temperature == 1.0:
        return logits
    # The largest becomes 0 first: a tiny temperature would overflow anything else.
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(max(temperature, torch.finfo(logits.dtype).tiny))


def _keep(dist: Tensor, scores: Tensor, least: Tensor) -> Tensor:
    """A distribution `[..., vocab]`, changed in place: no mass where the score is below `least` `[..., 1]`, scaled to
    1."""
    # A product with ones and zeros, because torch's masked operations are an order slower on the CPU.
    dist.mul_(torch.ge(scores, least, out=torch.empty_like(dist)))
    return dist.div_(dist.sum(dim=-1, keepdim=True))


def most_likely(scores: Tensor) -> Tensor:
    """The token with the largest score in each row, the lowest id among equals.

    Args:
        scores: `[..., vocab]`, any floating dtype: distributions, logits, or anything that orders tokens as they do.

    Returns:
        Token ids `[...]`, int64, on the device of the scores. In a row with NaN the first NaN's.
    """
    if scores.device.type != "cpu":
        return scores.argmax(dim=-1)
    # The same answer as torch's argmax, which is not vectorised: 8 times slower in float32, more in bfloat16.
    wide = scores.detach() if scores.dtype == torch.float64 else scores.detach().float()
    return torch.as_tensor(wide.numpy().argmax(axis=-1))


def batch_probs(logits: Tensor, rows: Sequence[tuple[SamplingParams | None, int]]) -> list[Tensor]:
    """Distributions of a packed batch: consecutive groups of rows, each with its own options.

    Args:
        logits: `[total_rows, vocab]`, the groups' rows one behind another.
        rows: for each group its options and its number of rows; without options its logits stay what they are.

    Returns:
        For each group its distributions `[rows of the group, vocab]`. Neighbouring groups with equal distributions
        share one computation.
    """
    probs: list[Tensor] = []
    start = 0
    for _, alike in itertools.groupby(rows, key=lambda group: None if group[0] is None else group[0].probs_key):
        params, counts = zip(*alike, strict=True)
        own = logits[start : start + sum(counts)]
        start += len(own)
        if params[0] is not None:
            (own,) = by_rows(lambda some, params=params[0]: (probs_from_logits(some, params),), own)
        probs += own.split_with_sizes(counts)
    return probs


def by_rows(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """What a function gives whose rows depend on the same rows of its arguments alone, of few rows at a time.

    Args:
        function: of tensors `[some, ...]`, gives tensors `[some, ...]`.
        tensors: `[rows, ...]` each, the first one `[rows, vocab]`.
    """
    rows, vocab = tensors[0].shape
    # Never one row alone: several threads sum it in another order than among others.
    blocks = min(-(-rows * vocab // _AT_ONCE), rows // 2)
    if blocks <= 1:
        return function(*tensors)
    found: tuple[Tensor, ...] = ()
    start = 0
    for own in zip(*(each.tensor_split(blocks) for each in tensors), strict=True):
        some = function(*own)
        found = found or tuple(each.new_empty(rows, *each.shape[1:]) for each in some)
        for whole, part in zip(found, some, strict=True):
            whole[start : start + len(part)] = part
        start += len(own[0])
    return found


def sound_rows(logits: Tensor) -> Tensor | None:
    """Which rows of logits `[rows, vocab]` give a distribution, bool `[rows]`; None if all surely do.

    Those do not where one is NaN or +inf, or all are -inf.
    """
    # -inf is a legal logit, so where the sum is no number rows must be looked at.
    if not transfers.waits(logits.device) and math.isfinite(logits.sum().item()):
        return None
    sound = logits.amax(dim=-1).isfinite()  # of a row with NaN the largest entry is NaN
    return sound if transfers.waits(logits.device) or not sound.all() else None


def usable_rows(logits: Tensor, sound: Tensor) -> Tensor:
    """Logits `[rows, vocab]` with rows that give no distribution, not `sound` `[rows]`, made one-hot at token 0."""
    usable = logits.masked_fill(~sound[:, None], -torch.inf)
    usable[:, 0].masked_fill_(~sound, 0.0)
    return usable


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The distribution after q's token was rejected: norm(max(0, p - q)), and p itself where no mass is left.

    Leviathan et al. 2211.17192, algorithm 1. No mass is left only where p = q up to rounding, and there a
    rejection has probability 0 up to rounding.

    Args:
        p: target distribution `[..., vocab]`.
        q: draft distribution `[..., vocab]`.
    """
    return _scaled((p - q).clamp_min_(0.0), p)


def _scaled(weights: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """Weights `[..., vocab]`, changed in place to sum to 1; where they have no mass `otherwise` (None: they stay)."""
    mass = weights.sum(dim=-1, keepdim=True)
    # Arithmetic in place of a choice: no answer has to come from the device, and torch.where is slow on the CPU.
    empty = (mass <= 0.0).to(weights.dtype)
    weights.div_(mass + empty)
    return weights if otherwise is None else weights.addcmul_(otherwise, empty)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """sum_x min(p(x), q(x)) along the last axis: the probability that one draw from q is accepted (alpha)."""
    return torch.minimum(p, q).sum(dim=-1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Half the L1 distance along the last axis; 1 - overlap for distributions."""
    return 0.5 * (p - q).abs().sum(dim=-1)


def draw(dist: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token from each distribution by inverting its cumulative sum, in float64.

    Worked example: the distribution [0.2, 0, 0.8] has the cells [0, 0.2) for token 0 and [0.2, 1) for token 2; u = 0.2
    draws token 2, and no u draws token 1.

    Args:
        dist: `[rows, vocab]`.
        uniform: `[rows]` in [0, 1), float64.

    Returns:
        Token ids `[rows]`, int64; never one of mass 0. A row without mass, or not finite, gives `vocab`.
    """
    cumulative = dist.cumsum(dim=-1, dtype=torch.float64)
    # Below 1 the product stays below the total, which would point past the last token that has mass.
    threshold = cumulative[..., -1:] * uniform[..., None].clamp_max(_BELOW_ONE)
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def without_tokens(probs: Tensor, tokens: Tensor) -> Tensor:
    """Distributions `[..., vocab]` that lost tokens `[..., tokens]`, scaled to sum to 1, without a look at the tokens.

    A token that is named twice is taken out once. All zeros where nothing else had mass.
    """
    return _scaled(probs.scatter(-1, tokens, 0.0))


_USUAL_COUNT = 2048
"""Tokens at (1 - p) / 2048 or more hold the nucleus of most distributions that a language model gives, and are few."""


def keep_nucleus(dist: Tensor, top_p: float) -> Tensor:
    """Distributions `[..., vocab]` cut to their nucleus of mass `top_p` and scaled to sum to 1. May change `dist` in
    place.

    A row that is not finite gives one that is not finite.

    Args:
        dist: distributions that the caller gives away, contiguous.
        top_p: in (0, 1).
    """
    # Elsewhere a sort is cheap, and looking at what it found would wait for the device.
    return nucleus_by_candidates(dist, top_p) if dist.device.type == "cpu" else nucleus_by_sorting(dist, top_p)


def nucleus_by_sorting(dist: Tensor, top_p: float) -> Tensor:
    """The definition, on any device, without a host decision; see `keep_nucleus`."""
    ordered, order = dist.sort(dim=-1, descending=True, stable=True)
    reached = ordered.cumsum(dim=-1, dtype=torch.float64)
    last = (reached < top_p).sum(dim=-1, keepdim=True).clamp_max(dist.shape[-1] - 1)  # place of the crossing token
    behind = torch.arange(dist.shape[-1], device=dist.device) > last
    scaled = (ordered / reached.gather(-1, last)).to(dist.dtype).masked_fill(behind, 0.0)
    return torch.zeros_like(dist).scatter_(-1, order, scaled)


def nucleus_by_candidates(dist: Tensor, top_p: float) -> Tensor:
    """The same bits as `nucleus_by_sorting`, in place, on the CPU; see `keep_nucleus`."""
    for row in dist.view(-1, dist.shape[-1]).numpy():
        _cut(row, top_p)
    return dist


def _cut(row: NDArray[Any], top_p: float) -> None:
    """Cut one distribution `[vocab]` to its nucleus.

    All tokens above a threshold, ties included, are a prefix of the sorted distribution: where their mass reaches
    `top_p` they decide. Tokens below (1 - p) / vocab hold less than 1 - p together, so the second threshold can fail by
    rounding only; then every token is looked at."""
    for least in ((1.0 - top_p) / _USUAL_COUNT, (1.0 - top_p) / len(row), 0.0):
        ids = (row >= least).nonzero()[0]  # rising
        values = row[ids]
        falling = np.sort(values)[::-1]
        reached = falling.astype(np.float64).cumsum()
        count = int(reached.searchsorted(top_p)) + 1
        if count <= len(ids):
            break
    if not len(ids):
        return  # not a distribution: NaN is not >= 0
    count = min(count, len(ids))
    crossing = falling[count - 1]
    kept = values >= crossing
    surplus = int(np.count_nonzero(kept)) - count
    if surplus:
        kept[(values == crossing).nonzero()[0][-surplus:]] = False  # ties with the highest ids
    row.fill(0.0)
    row[ids[kept]] = values[kept] / reached[count - 1]
