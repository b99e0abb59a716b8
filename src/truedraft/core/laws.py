"""Laws: probability vectors over the vocabulary, and what verification needs of them.

A law is a tensor `[..., vocab]` of float32 or float64 that sums to 1 along its last axis. DESIGN section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.core.nucleus import keep_nucleus
from truedraft.core.sampling import SamplingParams

_BELOW_ONE = 1.0 - 2.0**-53


def law_from_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """The law that `params` makes of logits, in the order of Hugging Face: temperature, top-k, top-p, min-p.

    A row's law does not depend on the other rows.

    Args:
        logits: `[rows, vocab]`, any floating dtype; a row may hold -inf, but not NaN, +inf, or -inf alone.
        params: sampling options. At temperature 0 the law is one-hot at the lowest id among the largest logits.

    Returns:
        Laws `[rows, vocab]` in float32, or float64 when the logits are float64, without gradient. Other rows give
        one that is not finite; see `finite_rows`.
    """
    logits = logits.detach() if logits.dtype == torch.float64 else logits.detach().float()
    if params.greedy:
        choice = most_likely(logits)[..., None]
        # A row without a finite largest logit has no law: NaN says so, as softmax does at other temperatures.
        mass = torch.where(logits.gather(-1, choice).isfinite(), 1.0, torch.nan).to(logits.dtype)
        return torch.zeros_like(logits).scatter_(-1, choice, mass)
    law = torch.softmax(_divided(logits, params.temperature), dim=-1)
    if 0 < params.top_k < law.shape[-1]:
        # Ties are those of the logits: dividing may round two of them together.
        law = _keep(law, logits, logits.topk(params.top_k, dim=-1).values[..., -1:])
    if params.top_p < 1.0:
        law = keep_nucleus(law, params.top_p)
    if params.min_p > 0.0:
        law = _keep(law, law, params.min_p * law.amax(dim=-1, keepdim=True))
    return law


def _divided(logits: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature, up to a constant in each row."""
    if temperature == 1.0:
        return logits
    # The largest becomes 0 first: a tiny temperature would overflow anything else.
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(max(temperature, torch.finfo(logits.dtype).tiny))


def _keep(law: Tensor, scores: Tensor, least: Tensor) -> Tensor:
    """A law `[..., vocab]`, changed in place: no mass where the score is below `least` `[..., 1]`, scaled to 1."""
    # A product with ones and zeros, because torch's masked operations are an order slower on the CPU.
    law.mul_(torch.ge(scores, least, out=torch.empty_like(law)))
    return law.div_(law.sum(dim=-1, keepdim=True))


def most_likely(scores: Tensor) -> Tensor:
    """The token with the largest score in each row, the lowest id among equals.

    Args:
        scores: `[..., vocab]`, any floating dtype: laws, logits, or anything that orders tokens as they do.

    Returns:
        Token ids `[...]`, int64, on the device of the scores. In a row with NaN the first NaN's.
    """
    if scores.device.type != "cpu":
        return scores.argmax(dim=-1)
    # The same answer as torch's argmax, which is not vectorised: 8 times slower in float32, more in bfloat16.
    wide = scores.detach() if scores.dtype == torch.float64 else scores.detach().float()
    return torch.as_tensor(wide.numpy().argmax(axis=-1))


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


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The law after q's token was rejected: norm(max(0, p - q)), and p itself where no mass is left.

    Leviathan et al. 2211.17192, algorithm 1. No mass is left only where p = q up to rounding, and there a
    rejection has probability 0 up to rounding.

    Args:
        p: target law `[..., vocab]`.
        q: draft law `[..., vocab]`.
    """
    return _scaled((p - q).clamp_min_(0.0), p)


def without(law: Tensor, token: int) -> Tensor:
    """A law `[vocab]` with one token removed and renormalised; all zeros when nothing else had mass."""
    rest = law.clone()
    rest[token] = 0.0
    return _scaled(rest)


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
        Token ids `[rows]`, int64; never one of mass 0. A row without mass, or not finite, gives `vocab`.
    """
    cumulative = law.cumsum(dim=-1, dtype=torch.float64)
    # Below 1 the product stays below the total, which would point past the last token that has mass.
    threshold = cumulative[..., -1:] * uniform[..., None].clamp_max(_BELOW_ONE)
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
