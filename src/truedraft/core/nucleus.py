"""The nucleus (top-p): the likeliest tokens whose mass reaches p, the crossing one included; ties: lowest id first.

Which tokens these are is said by the law sorted in falling order, equal ones by id: the first n of them, n the least
with mass >= p (all of them where rounding leaves less than p). The mass of a prefix is its sum in that order, in
float64, so it does not depend on how many tokens stand behind it, and a row's nucleus not on its neighbours.
`nucleus_by_sorting` does just that. On a CPU, sorting the vocabulary costs more than a small model's forward, so
`nucleus_by_candidates` finds the same bits from the few tokens above a threshold.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_USUAL_COUNT = 2048
"""Tokens at (1 - p) / 2048 or more hold the nucleus of most laws that a language model gives, and are few."""


def keep_nucleus(law: Tensor, top_p: float) -> Tensor:
    """Laws `[..., vocab]` cut to their nucleus of mass `top_p` and scaled to sum to 1. May change `law` in place.

    A row that is not finite gives one that is not finite.

    Args:
        law: laws that the caller gives away, contiguous.
        top_p: in (0, 1).
    """
    # Elsewhere a sort is cheap, and looking at what it found would wait for the device.
    return nucleus_by_candidates(law, top_p) if law.device.type == "cpu" else nucleus_by_sorting(law, top_p)


def nucleus_by_sorting(law: Tensor, top_p: float) -> Tensor:
    """The definition, on any device, without a host decision; see `keep_nucleus`."""
    ordered, order = law.sort(dim=-1, descending=True, stable=True)
    reached = ordered.cumsum(dim=-1, dtype=torch.float64)
    last = (reached < top_p).sum(dim=-1, keepdim=True).clamp_max(law.shape[-1] - 1)  # place of the crossing token
    behind = torch.arange(law.shape[-1], device=law.device) > last
    scaled = (ordered / reached.gather(-1, last)).to(law.dtype).masked_fill(behind, 0.0)
    return torch.zeros_like(law).scatter_(-1, order, scaled)


def nucleus_by_candidates(law: Tensor, top_p: float) -> Tensor:
    """The same bits as `nucleus_by_sorting`, in place, on the CPU; see `keep_nucleus`."""
    for row in law.view(-1, law.shape[-1]).numpy():
        _cut(row, top_p)
    return law


def _cut(row: NDArray[Any], top_p: float) -> None:
    """Cut one law `[vocab]` to its nucleus.

    All tokens above a threshold, ties included, are a prefix of the sorted law: where their mass reaches `top_p`
    they decide. Tokens below (1 - p) / vocab hold less than 1 - p together, so the second threshold can fail by
    rounding only; then every token is looked at.
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
        return  # not a law: NaN is not >= 0
    count = min(count, len(ids))
    crossing = falling[count - 1]
    kept = values >= crossing
    surplus = int(np.count_nonzero(kept)) - count
    if surplus:
        kept[(values == crossing).nonzero()[0][-surplus:]] = False  # ties with the highest ids
    row.fill(0.0)
    row[ids[kept]] = values[kept] / reached[count - 1]
