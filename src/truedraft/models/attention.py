"""Attention of a packed forward: each segment sees its own cache and its own tree."""

from __future__ import annotations

import torch
from torch import Tensor

from truedraft.models.layouts import Attending
from truedraft.models.patterns import AttentionPattern
from truedraft.models.plan import ForwardPlan


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: ForwardPlan,
    call: int,
    pattern: AttentionPattern,
    how: Attending,
) -> Tensor:
    """Attention over all segments of a pack, each against its own cache.

    Args:
        query: `[heads, total, key width]`.
        key: `[kv_heads, total, key width]`.
        value: `[kv_heads, total, value width]`.
        plan: the forward's plan.
        call: which attention call of the forward this is, from 0.
        pattern: which positions this layer may see.
        how: how the layer makes weights of products.

    Returns:
        `[total, heads, value width]`; rows of padding hold numbers without meaning.
    """
    outputs: list[Tensor] = []
    for part in plan.segments:
        rows = slice(part.start, part.start + part.count)
        keys, values = part.segment.cache.write(call, key[:, rows], value[:, rows])
        outputs.append(part.layout(pattern).attend(query[:, rows], keys, values, how))
    padding = query.shape[1] - sum(part.count for part in plan.segments)
    if padding:
        outputs.append(outputs[0][:1].expand(padding, -1, -1))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]
