"""Rejection samplers of the tests' own: sound ones, token by token and by blocks, and one for each planted fault."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from truedraft.certify.samplers import Sampler


def inverse(weights: Tensor, numbers: Tensor) -> Tensor:
    """The tokens `[...]` that numbers `[...]` draw from weights `[..., vocab]`."""
    reached = weights.double().cumsum(-1)
    return (reached <= numbers[..., None] * reached[..., -1:]).sum(-1).clamp_max(weights.shape[-1] - 1)


def cut(tokens: Tensor, kept: Tensor, behind: Tensor) -> Tensor:
    """The first `kept` `[batch]` tokens, then that of `behind` `[batch, k + 1]` at this place."""
    places = torch.arange(behind.shape[1])
    out = torch.where(places < kept[:, None], torch.nn.functional.pad(tokens, (0, 1)), behind)
    return out.masked_fill(places > kept[:, None], -1)


def at(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(-1, tokens[..., None])[..., 0].double()


def left_of(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    return (p - q).clamp_min(0.0)


def ratio(p_x: Tensor, q_x: Tensor) -> Tensor:
    return p_x / q_x


def token_by_token(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    uniforms: Tensor,
    *,
    accept: Callable[[Tensor, Tensor], Tensor] = ratio,
    judged_q: Callable[[Tensor], Tensor] = lambda q: q,
    residual: Callable[[Tensor, Tensor, Tensor], Tensor] = left_of,
    bonus: Callable[[Tensor], Tensor] = lambda target: target[:, -1],
    recovers_by: Callable[[Tensor, int], Tensor] = lambda u, k: u[:, k : 2 * k],
    judges_by: Callable[[Tensor, int], Tensor] = lambda u, k: u[:, :k],
) -> Tensor:
    """Leviathan et al. 2211.17192, algorithm 1; each argument behind the star changes one part of it."""
    k = draft_tokens.shape[1]
    p, q = target_probs[:, :-1], judged_q(draft_probs)
    stays = judges_by(uniforms, k) < accept(at(p, draft_tokens), at(q, draft_tokens))
    left = residual(p, q, draft_tokens)
    left = torch.where(left.sum(-1, keepdim=True) > 0.0, left, p)
    behind = torch.cat(
        [inverse(left, recovers_by(uniforms, k)), inverse(bonus(target_probs), uniforms[:, -1])[:, None]], 1
    )
    return cut(draft_tokens, stays.long().cumprod(-1).sum(-1), behind)


def by_blocks(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Sun et al. 2403.10444, algorithm 2."""
    k = draft_tokens.shape[1]
    p, q = target_probs[:, :-1].double(), draft_probs.double()
    weights = [torch.ones(len(p), dtype=torch.float64)]
    for place in range(k):
        own = draft_tokens[:, place]
        weights.append((weights[-1] * at(p[:, place], own) / at(q[:, place], own)).clamp_max(1.0))
    kept = torch.zeros(len(p), dtype=torch.int64)
    for length in range(1, k + 1):
        passes = weights[length]
        if length < k:
            mass = (weights[length][:, None] * p[:, length] - q[:, length]).clamp_min(0.0).sum(-1)
            passes = torch.where(passes >= 1.0, 1.0, mass / (mass + 1.0 - passes).clamp_min(1e-300))
        kept = torch.where(uniforms[:, length - 1] < passes, length, kept)
    scaled = torch.stack(weights[:-1], 1)[..., None] * p
    left = (scaled - q).clamp_min(0.0)
    left = torch.where(left.sum(-1, keepdim=True) > 0.0, left, p)
    behind = torch.cat(
        [inverse(left, uniforms[:, k : 2 * k]), inverse(target_probs[:, -1], uniforms[:, -1])[:, None]], 1
    )
    return cut(draft_tokens, kept, behind)


def sampler(function: Callable[..., Any] = token_by_token, **wrong: Any) -> Sampler:
    arguments = ("draft_tokens", "draft_probs", "target_probs", "uniforms")
    return Sampler("own", functools.partial(function, **wrong), arguments)


def drops_unlikely(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Drafts are cut before the first token of q below 0.3, and p is drawn from there."""
    k = draft_tokens.shape[1]
    sound = token_by_token(draft_tokens, draft_probs, target_probs, uniforms)
    hidden = at(draft_probs, draft_tokens) < 0.3
    shown = (~hidden).long().cumprod(-1).sum(-1)  # how many tokens were shown
    drawn = inverse(target_probs, torch.cat([uniforms[:, k : 2 * k], uniforms[:, -1:]], 1))
    reached = (sound >= 0).sum(-1) - 1  # how many of the whole draft would have been kept
    cut_short = shown <= reached.clamp_max(k - 1)
    return torch.where((cut_short & (shown < k))[:, None], cut(draft_tokens, shown, drawn), sound)


FAULTS: dict[tuple[str, str], Sampler] = {
    ("the residual is p", "after a rejection the token is drawn from p"): sampler(residual=lambda p, q, x: p),
    ("the residual is p", "without the drafted token"): sampler(
        residual=lambda p, q, x: p.scatter(-1, x[..., None], 0.0)
    ),
    ("shared noise", "the number that rejects also draws the recovered token"): sampler(
        recovers_by=lambda u, k: u[:, :k]
    ),
    ("shared noise", "one number judges all drafted tokens of a row"): sampler(
        judges_by=lambda u, k: u[:, :1].expand(-1, k)
    ),
    ("keeps every drafted token", "whatever the target says"): sampler(accept=lambda p, q: torch.ones_like(p)),
    ("accepts too much", "with min(1, p / 0.8 q)"): sampler(accept=lambda p, q: p / (0.8 * q)),
    ("accepts too little", "with 0.8 min(1, p / q)"): sampler(accept=lambda p, q: 0.8 * (p / q).clamp_max(1.0)),
    ("judged at another temperature", "the draft's distribution at 2"): sampler(
        judged_q=lambda q: q.sqrt() / q.sqrt().sum(-1, keepdim=True)
    ),
    ("drafted tokens of low q are dropped", "below 0.3, and p is drawn from"): sampler(drops_unlikely),
    ("the bonus token is wrong", "drawn one position too early"): sampler(bonus=lambda target: target[:, -2]),
    ("emits what p forbids", "drafted tokens without target probability are kept"): sampler(
        accept=lambda p, q: torch.where(p == 0.0, 1.0, p / q)
    ),
}
"""A sampler for each fault, by the name and the detail that a report gives."""
