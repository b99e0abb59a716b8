"""Distributions over the vocabulary, and the operations of verification on them.

A distribution is a tensor `[..., vocab]` of float32 or float64 that sums to 1 along its last axis.

The nucleus (top-p) is defined by the distribution sorted in descending order, equal entries by id: the first n tokens,
n the least with mass >= p (all of them where rounding leaves less than p). The mass of a prefix is its sum in that
order, in float64, so a row's nucleus does not depend on other rows. `nucleus_by_sorting` does exactly that. On a CPU,
sorting the vocabulary costs more than a small model's forward, so `nucleus_by_candidates` computes the same bits from
the few tokens above a threshold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.core import fused, transfers
from truedraft.core.params import SamplingParams

_BELOW_ONE = 1.0 - 2.0**-53
_AT_ONCE = 1 << 23
"""Entries processed together: a large batch with a vocabulary of 150,000 would take gigabytes of temporaries at
once."""


def probs_from_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution of logits under `params`, in the order of Hugging Face: temperature, top-k, top-p, min-p.

    A row's distribution does not depend on the other rows. At temperature 0 it is one-hot at the lowest id among the
    largest logits.

    Args:
        logits: `[rows, vocab]`, any floating dtype; a row may contain -inf, but not NaN, +inf, or only -inf.

    Returns:
        Distributions `[rows, vocab]` in float32, or float64 when the logits are float64, without gradient. Invalid rows
        give one that is not finite.
    """
    logits = logits.detach()
    if not params.greedy and fused.fit(logits, dtypes=fused.LOGITS):
        dist = fused.softmax(logits, torch.full(logits.shape[:-1], params.temperature))
    else:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if params.greedy:
            return _one_hot(logits)
        dist = torch.softmax(_divided(logits, params.temperature), dim=-1)
    if 0 < params.top_k < dist.shape[-1]:
        # Ties are those of the logits: dividing may round two of them together.
        dist = _keep(dist, logits, logits.topk(params.top_k, dim=-1).values[..., -1:])
    if params.top_p < 1.0:
        dist = keep_nucleus(dist, params.top_p)
    if params.min_p > 0.0:
        dist = _keep(dist, dist, params.min_p * dist.amax(dim=-1, keepdim=True))
    return dist


def _one_hot(logits: Tensor) -> Tensor:
    choice = most_likely(logits)[..., None]
    # A row without a finite largest logit has no distribution: NaN, as with softmax at other temperatures.
    mass = torch.where(logits.gather(-1, choice).isfinite(), 1.0, torch.nan).to(logits.dtype)
    return torch.zeros_like(logits).scatter_(-1, choice, mass)


def _divided(logits: Tensor, temperature: float) -> Tensor:
    if temperature == 1.0:
        return logits
    # The largest becomes 0 first: a tiny temperature would overflow anything else.
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(max(temperature, torch.finfo(logits.dtype).tiny))


def _keep(dist: Tensor, scores: Tensor, least: Tensor) -> Tensor:
    """Remove entries of `[..., vocab]` with a score below `least` `[..., 1]` in place, and renormalise."""
    # A product with ones and zeros, because torch's masked operations are an order slower on the CPU.
    dist.mul_(torch.ge(scores, least, out=torch.empty_like(dist)))
    return dist.div_(dist.sum(dim=-1, keepdim=True))


def most_likely(scores: Tensor) -> Tensor:
    """The ids `[...]` of the largest of scores `[..., vocab]`: the lowest of equal ones, the first NaN if any."""
    return likeliest(scores)[1] if scores.device.type == "cpu" else scores.argmax(dim=-1)


def likeliest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of scores `[..., vocab]`, and their ids as `most_likely` has them, `[...]` each."""
    scores = scores.detach()
    if scores.device.type != "cpu":
        ids = scores.argmax(dim=-1)
    elif fused.fit(scores, dtypes=fused.LOGITS):
        return fused.largest(scores)
    else:
        # The same answer as torch's argmax, which is not vectorised: 8 times slower in float32, more in bfloat16.
        wide = scores if scores.dtype == torch.float64 else scores.float()
        ids = torch.as_tensor(wide.numpy().argmax(axis=-1))
    return scores.gather(-1, ids[..., None])[..., 0], ids


def token_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Probabilities `[rows, draws]`, at temperature 1, of tokens `[rows, draws]` by logits `[rows, vocab]`; that of
    `vocab`, which is no token, means nothing.
    """
    if tokens.shape[-1] == 1 and fused.fit(logits, dtypes=fused.LOGITS):
        return fused.token_probs(logits, tokens[:, 0])[:, None]
    return probs_at(torch.softmax(logits.float(), dim=-1), tokens)


def probs_at(probs: Tensor, tokens: Tensor) -> Tensor:
    """The entries `[rows, draws]` of distributions `[rows, vocab]` at tokens; see `token_probs`."""
    return probs.gather(-1, tokens.clamp_max(probs.shape[-1] - 1))


def batch_probs(logits: Tensor, rows: Sequence[tuple[SamplingParams | None, int]]) -> list[Tensor]:
    """Distributions of logits `[total_rows, vocab]`: consecutive groups of rows, each with its own options.

    `rows` has for each group its options and its number of rows; with None its logits are returned unchanged.
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


class RowProbs:
    """The distributions `[rows, vocab]` of one request on the CPU, each computed where it is first read.

    A walk down a proposal reads the rows of accepted nodes and the one after them.

    Args:
        table: logits `[rows, vocab]`; without `params` they are the distributions.

    Attributes:
        broken: rows read so far whose logits have no distribution; they are one-hot at token 0.
    """

    def __init__(self, table: Tensor, params: SamplingParams | None = None) -> None:
        self.shape, self.device = table.shape, table.device
        self.broken: set[int] = set()
        self._table, self._params = table, params
        self._rows: dict[int, Tensor] = {}
        self._entries: dict[int, NDArray[Any]] = {}

    def __getitem__(self, row: int) -> Tensor:
        found = self._rows.get(row)
        if found is None:
            found = self._rows[row] = self._table[row] if self._params is None else self._computed(row, self._params)
        return found

    def _computed(self, row: int, params: SamplingParams) -> Tensor:
        logits = self._table[row : row + 1]
        probs = probs_from_logits(logits, params)
        if not math.isfinite(probs[0, 0]):  # no entry of an invalid row's distribution is finite
            self.broken.add(row)
            probs = probs_from_logits(usable_rows(logits, torch.tensor([False])), params)
        return probs[0]

    def entry(self, row: int, token: int) -> float:
        # Entries of arrays are read several times as fast as those of tensors.
        if row not in self._entries:
            self._entries[row] = as_array(self[row])
        return float(self._entries[row][token])


def as_array(table: Tensor) -> NDArray[Any]:
    """A tensor on any device as an array, in single precision where the dtype is a smaller one."""
    table = table.cpu()
    return (table.float() if table.dtype.itemsize < 4 else table).numpy()


def by_rows(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Call a function of tensors `[rows, ...]`, the first `[rows, vocab]`, on a few of their rows at a time."""
    rows, vocab = tensors[0].shape
    # Never a single row: several threads sum it in another order than among other rows.
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
    """Which rows `[rows, vocab]` have no NaN or +inf, and not only -inf: bool `[rows]`; None if all surely do."""
    if not transfers.waits(logits.device) and fused.fit(logits, dtypes=fused.LOGITS):
        entries = fused.largest(logits)[0]
        return None if all(map(math.isfinite, entries.tolist())) else entries.isfinite()
    sound = logits.amax(dim=-1).isfinite()  # amax of a row with NaN is NaN
    return sound if transfers.waits(logits.device) or not sound.all() else None


def usable_rows(logits: Tensor, sound: Tensor) -> Tensor:
    """Logits `[rows, vocab]` with the rows that are not `sound` `[rows]` made one-hot at token 0."""
    usable = logits.masked_fill(~sound[:, None], -torch.inf)
    usable[:, 0].masked_fill_(~sound, 0.0)
    return usable


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The distribution after q's token was rejected: norm(max(0, p - q)), and p itself where no mass is left.

    Leviathan et al. 2211.17192, algorithm 1; p is the target's distribution and q the draft's, `[..., vocab]` each. No
    mass is left only where p = q up to rounding, and there a rejection has probability 0 up to rounding.
    """
    if fused.fit(p, q):
        return fused.residual(p, q)
    return _scaled((p - q).clamp_min_(0.0), p)


def _scaled(weights: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """Normalise weights `[..., vocab]` in place; rows without mass become `otherwise`, or stay if that is None."""
    mass = weights.sum(dim=-1, keepdim=True)
    # Arithmetic instead of a branch: it does not wait for the device, and torch.where is slow on the CPU.
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
    """Draw a token from each of `[rows, vocab]` by inverting its cumulative sum, in float64, with `uniform` in [0, 1).

    Worked example: the distribution [0.2, 0, 0.8] has the cells [0, 0.2) for token 0 and [0.2, 1) for token 2; u = 0.2
    draws token 2, and no u draws token 1.

    Returns:
        Token ids `[rows]`, int64, never of mass 0; `vocab` for a row without mass, or not finite.
    """
    if fused.fit(dist):
        return fused.draw(dist, uniform)
    cumulative = dist.cumsum(dim=-1, dtype=torch.float64)
    # Below 1 the product stays below the total, which would point past the last token with mass.
    threshold = cumulative[..., -1:] * uniform[..., None].clamp_max(_BELOW_ONE)
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def without_tokens(probs: Tensor, tokens: Tensor) -> Tensor:
    """Distributions `[..., vocab]` renormalised without tokens `[..., tokens]`, unread by the host; or all zeros."""
    return _scaled(probs.scatter(-1, tokens, 0.0))


_USUAL_COUNT = 2048
"""Tokens at (1 - p) / 2048 or more contain the nucleus of most distributions of a language model, and are few."""


def keep_nucleus(dist: Tensor, top_p: float) -> Tensor:
    """Distributions `[..., vocab]`, contiguous, cut to their nucleus and renormalised, maybe in place; top_p < 1."""
    # Elsewhere a sort is fast, and reading numbers would wait for the device.
    return nucleus_by_candidates(dist, top_p) if dist.device.type == "cpu" else nucleus_by_sorting(dist, top_p)


def nucleus_by_sorting(dist: Tensor, top_p: float) -> Tensor:
    """The definition, on any device, without host decisions; see `keep_nucleus`."""
    ordered, order = dist.sort(dim=-1, descending=True, stable=True)
    reached = ordered.cumsum(dim=-1, dtype=torch.float64)
    last = (reached < top_p).sum(dim=-1, keepdim=True).clamp_max(dist.shape[-1] - 1)  # place of the crossing token
    excluded = torch.arange(dist.shape[-1], device=dist.device) > last
    scaled = (ordered / reached.gather(-1, last)).to(dist.dtype).masked_fill(excluded, 0.0)
    return torch.zeros_like(dist).scatter_(-1, order, scaled)


def nucleus_by_candidates(dist: Tensor, top_p: float) -> Tensor:
    """The same bits as `nucleus_by_sorting`, in place, on the CPU; see `keep_nucleus`."""
    for row in dist.view(-1, dist.shape[-1]).numpy():
        _cut(row, top_p)
    return dist


def _cut(row: NDArray[Any], top_p: float) -> None:
    """Cut one distribution `[vocab]` to its nucleus.

    Tokens above a threshold are a prefix of the sorted distribution. Tokens below (1 - p) / vocab have less than 1 - p
    together, so the second threshold can fail only by rounding; then every token is sorted.
    """
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
