"""Laws: probability vectors over the vocabulary, and what verification needs of them.

A law is a tensor `[..., vocab]` of float32 or float64 that sums to 1 along its last axis. DESIGN section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.core.sampling import SamplingParams


def law_from_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """The law that `params` makes of logits, in the order of Hugging Face: temperature, top-k, top-p, min-p.

    Args:
        logits: `[rows, vocab]`, any floating dtype; a row may hold -inf, but not NaN, +inf, or -inf alone.
        params: sampling options. At temperature 0 the law is one-hot at the lowest id among the largest logits.

    Returns:
        Laws `[rows, vocab]` in float32, or float64 when the logits are float64. Other rows give
        one that is not finite; see `finite_rows`.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if params.greedy:
        largest, choice = logits.max(dim=-1, keepdim=True)
        law = torch.zeros_like(logits).scatter_(-1, choice, 1.0)
        # A row without a finite largest logit has no law: NaN says so, as softmax does at other temperatures.
        return torch.where(largest.isfinite(), law, torch.nan)
    # The largest becomes 0 first: a tiny temperature would overflow anything else.
    temperature = max(params.temperature, torch.finfo(logits.dtype).tiny)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    if 0 < params.top_k < scaled.shape[-1]:
        kth = scaled.topk(params.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    law = torch.softmax(scaled, dim=-1)
    if params.top_p < 1.0:
        law = _nucleus(law, params.top_p)
    if params.min_p > 0.0:
        law = normalise(law.masked_fill(law < params.min_p * law.amax(dim=-1, keepdim=True), 0.0))
    return law


def _nucleus(law: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens until their mass reaches `top_p`, the crossing one included; ties: lowest id first."""
    ordered, order = law.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(before >= top_p, 0.0)
    return normalise(torch.zeros_like(law).scatter_(-1, order, ordered))


def laws_from_logits(logits: Tensor, rows: Sequence[tuple[SamplingParams, int]]) -> list[Tensor]:
    """Laws of a packed batch: consecutive groups of rows, each with its own options.

    Args:
        logits: `[total_rows, vocab]`, the groups' rows one behind another.
        rows: for each group its options and its number of rows.

    Returns:
        For each group its laws `[rows of the group, vocab]`. Neighbouring groups with equal laws share one computation.
    """
    laws: list[Tensor] = []
    start = first = 0
    for i, (params, count) in enumerate(rows):
        start += count
        if i + 1 == len(rows) or params.law_key != rows[i + 1][0].law_key:
            counts = [n for _, n in rows[len(laws) : i + 1]]
            laws.extend(law_from_logits(logits[first:start], params).split(counts))
            first = start
    return laws


def finite_rows(law: Tensor) -> Tensor:
    """Which rows of laws `[rows, vocab]` are laws at all: bool `[rows]`, False where logits were NaN or +inf."""
    return law.sum(dim=-1).isfinite()


def normalise(weights: Tensor) -> Tensor:
    """Non-negative weights `[..., vocab]` scaled to sum to 1."""
    return weights / weights.sum(dim=-1, keepdim=True)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The law after q's token was rejected: norm(max(0, p - q)), and p itself where no mass is left.

    Leviathan et al. 2211.17192, algorithm 1. No mass is left only where p = q up to rounding, and there a
    rejection has probability 0 up to rounding.

    Args:
        p: target law `[..., vocab]`.
        q: draft law `[..., vocab]`.
    """
    weights = (p - q).clamp_min(0.0)
    mass = weights.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0.0, weights / mass, p)


def without(law: Tensor, token: int) -> Tensor:
    """A law `[vocab]` with one token removed and renormalised; all zeros when nothing else had mass."""
    rest = law.clone()
    rest[token] = 0.0
    mass = rest.sum()
    return torch.where(mass > 0.0, rest / mass, rest)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """sum_x min(p(x), q(x)) along the last axis: the probability that one draw from q is accepted (alpha)."""
    return torch.minimum(p, q).sum(dim=-1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Half the L1 distance along the last axis; 1 - overlap for laws."""
    return 0.5 * (p - q).abs().sum(dim=-1)


def draw(law: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token from each law by inverting its cumulative sum, in float64.

    Worked example: the law [0.2, 0, 0.8] has the cells [0, 0.2) for token 0 and [0.2, 1) for token 2; u = 0.2
    draws token 2, and no u draws token 1.

    Args:
        law: `[rows, vocab]`.
        uniform: `[rows]` in [0, 1), float64.

    Returns:
        Token ids `[rows]`, int64; never one of mass 0.
    """
    cumulative = law.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    # u * total may round up to total, which would point past the last token that has mass.
    threshold = torch.minimum(uniform[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
