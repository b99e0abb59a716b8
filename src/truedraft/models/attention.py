"""Attention of a packed forward: each segment sees its own cache and its own tree."""

from __future__ import annotations

import torch
from torch import Tensor

from truedraft.models.patterns import AttentionPattern
from truedraft.models.plan import Blocked, ForwardPlan


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: ForwardPlan,
    call: int,
    pattern: AttentionPattern,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over all segments of a pack, each against its own cache.

    Plain matrix products with a softmax in float32 or better: their result for a query does not depend on the
    other queries, which fused kernels do not promise (DESIGN section 2, row invariance).

    Args:
        query: `[heads, total, key width]`.
        key: `[kv_heads, total, key width]`.
        value: `[kv_heads, total, value width]`.
        plan: the forward's plan.
        call: which attention call of the forward this is, from 0.
        pattern: which positions this layer may see.
        scaling: factor on the products.
        softcap: bounds scores to softcap * tanh(score / softcap), before the mask.
        sinks: `[heads]`: a logit for each head that takes part in the softmax and adds nothing.

    Returns:
        `[total, heads, value width]`; rows of padding are 0.
    """
    heads, total = query.shape[:2]
    outputs: list[Tensor] = []
    for part in plan.segments:
        rows = slice(part.start, part.start + part.count)
        keys, values = part.cache.write(call, key[:, rows], value[:, rows])
        weights = _weights(query[:, rows], keys, part.blocked_for(pattern), scaling, softcap, sinks)
        mixed = torch.bmm(weights.to(values.dtype), values)  # [kv_heads, group * new, value width]
        outputs.append(mixed.view(heads, part.count, -1).transpose(0, 1))
    padding = total - sum(part.count for part in plan.segments)
    if padding:
        outputs.append(outputs[0].new_zeros(padding, *outputs[0].shape[1:]))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _weights(
    query: Tensor,
    keys: Tensor,
    blocked: Blocked | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention weights `[kv_heads, group * new, keys]`; heads that share keys are rows of one product."""
    heads, new, width = query.shape
    kv_heads = keys.shape[0]
    grouped = query.reshape(kv_heads, heads // kv_heads * new, width)
    scores = torch.bmm(grouped, keys.transpose(1, 2))
    scores = (scores if scores.dtype == torch.float64 else scores.float()) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if blocked is not None:
        tail = scores.view(kv_heads, -1, new, scores.shape[-1])[..., blocked.first :]
        tail.masked_fill_(blocked.mask, -torch.inf)
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sink = sinks.to(scores.dtype).view(kv_heads, -1, 1).expand(-1, -1, new).reshape(kv_heads, -1, 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
