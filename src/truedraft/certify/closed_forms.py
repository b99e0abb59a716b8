"""Closed forms of faulty verification at a node with one draft.

p is the target's distribution `[..., vocab]`, q the one that the draft was drawn from, one-hot for a candidate without
a draw. Each form changes one thing about speculative sampling, and returns two masses `[..., vocab]`, together 1: of
kept drafted tokens, and of tokens after a rejection.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from truedraft.core import probs as L

Masses = tuple[Tensor, Tensor]
Form = Callable[[Tensor, Tensor], Masses]
EPSILON, DELTA = 0.09, 0.3  # of typical acceptance, as published


def rest(kept: Tensor) -> Tensor:
    """The mass that is not kept, `[..., 1]`."""
    return (1.0 - kept.sum(dim=-1, keepdim=True)).clamp_min(0.0)


def ratio(p: Tensor, q: Tensor) -> Tensor:
    """p / q, of any size where q is 0."""
    return p / q.clamp_min(torch.finfo(p.dtype).tiny)


def argmax(p: Tensor) -> Tensor:
    """All mass on the most likely token."""
    return functional.one_hot(p.argmax(-1), p.shape[-1]).to(p)


def at_temperature(temperature: float, p: Tensor) -> Tensor:
    """Distributions at another temperature."""
    powers = p ** (1.0 / temperature)
    return powers / powers.sum(dim=-1, keepdim=True)


def after(kept: Tensor, probs: Tensor) -> Masses:
    """`kept`, and a draw from `probs` after a rejection."""
    return kept, rest(kept) * probs


def judged(p: Tensor, q: Tensor, drawn: Tensor) -> Masses:
    """As if the target had p and the draft q, with drafts drawn from another distribution."""
    return after(drawn * ratio(p, q).clamp_max(1.0), L.residual(p, q))


def sound(p: Tensor, q: Tensor) -> Masses:
    """Speculative sampling without a fault."""
    return after(torch.minimum(p, q), L.residual(p, q))


def residual_without_drafted(p: Tensor, q: Tensor) -> Masses:
    """After x was rejected, y != x has probability p(y) / (1 - p(x)); a certain x is never rejected."""
    kept = torch.minimum(p, q)
    weight = ratio(q - kept, 1.0 - p)
    return kept, p * (weight.sum(dim=-1, keepdim=True) - weight)


def dropping(least: float, p: Tensor, q: Tensor) -> Masses:
    """Drafts with q below `least` are hidden, and p is drawn from; the others are verified correctly."""
    return _shown_where(q >= least, p, q)


def failing_at_odd_ids(p: Tensor, q: Tensor) -> Masses:
    """A drafter fails at half of all tokens; its draw is then dropped, and p is drawn from."""
    return _shown_where(torch.arange(p.shape[-1], device=p.device) % 2 == 0, p, q)


def _shown_where(shows: Tensor, p: Tensor, q: Tensor) -> Masses:
    shown = q * shows
    kept = torch.minimum(p, shown)
    rejected = shown.sum(dim=-1, keepdim=True) - kept.sum(dim=-1, keepdim=True)
    return kept, rejected * L.residual(p, q) + rest(shown) * p


def typical(p: Tensor, q: Tensor) -> Tensor:
    """The mass that typical acceptance keeps."""
    entropy = torch.special.entr(p).sum(dim=-1, keepdim=True)
    return q * (p > (DELTA * (-entropy).exp()).clamp_max(EPSILON))


def as_bfloat16_draws(q: Tensor) -> Tensor:
    """The distribution `[..., vocab]`, float64, of draws by a cumulative sum of q in bfloat16."""
    sums = q.bfloat16().cumsum(dim=-1, dtype=torch.bfloat16).double()
    cells = sums.cummax(dim=-1).values.diff(dim=-1, prepend=torch.zeros_like(sums[..., :1]))
    return cells / cells.sum(dim=-1, keepdim=True)


def drawn_in_bfloat16(p: Tensor, q: Tensor) -> Masses:
    """A draft drawn by such a sum, verified as if from q."""
    return judged(p, q, as_bfloat16_draws(q).to(p))


def one_number(p: Tensor, q: Tensor) -> Masses:
    """The number that rejects also draws: given a rejection of x it is uniform over [a(x), 1), a = min(1, p/q).

    The recovered token y has the cell [C(y-1), C(y)) of the residual's cumulative sum C, of which the part above a(x)
    counts: F(C(y)) - F(C(y-1)) with F(t) = sum over x of q(x) max(0, t - a(x)), found by sorting the a(x).
    """
    a = ratio(p, q).clamp_max(1.0).double()
    drawn = q.double()
    cumulative = L.residual(p, q).double().cumsum(dim=-1)
    order = a.argsort(dim=-1)
    edges = a.gather(-1, order)
    weight = drawn.gather(-1, order)
    mass = weight.cumsum(dim=-1)  # of the drafts with an acceptance up to here
    moment = (weight * edges).cumsum(dim=-1)
    place = torch.searchsorted(edges.contiguous(), cumulative.contiguous(), right=True)
    below, weighed = (functional.pad(each, (1, 0)).gather(-1, place) for each in (mass, moment))
    total = below * cumulative - weighed
    recovered = total.diff(dim=-1, prepend=torch.zeros_like(total[..., :1]))
    return torch.minimum(p, q), recovered.clamp_min(0.0).to(p.dtype)


def one_gumbel(p: Tensor, q: Tensor) -> Masses:
    """A replacement is the largest of log residual + g, g the Gumbel noise that drew the draft from q; `[rows, vocab]`.

    A rejected x has q(x) > p(x), so its residual is 0 and it cannot come again. Given that x came first in the race
    under q, the times of the others do not depend on x. So `probs_under_shared_noise` is the same after every
    rejection.

    Worked example: p = (0.1, 0.6, 0.3), q = (1/2, 1/4, 1/4). Token 0 is rejected with 0.4, which leaves (0, 7/8, 1/8).
    Token 1 starts at 2/7 and token 2 at 2, when S is 3/2: token 1 came by then with 3/5, and gets 7/8 of the rest,
    19/20 in all. So (0.1, 0.63, 0.27) is emitted.
    """
    left, kept = L.residual(p, q), torch.minimum(p, q).double()
    recovered = torch.zeros_like(kept)
    lost = (q - p).clamp_min(0.0)
    rejected, drafts = lost.sum(dim=-1, dtype=torch.float64).tolist(), lost.argmax(dim=-1).tolist()
    for row, (weight, draft) in enumerate(zip(rejected, drafts, strict=True)):
        if weight > 0.0:
            recovered[row] = weight * probs_under_shared_noise(q[row], draft, left[row])
    whole = (kept + recovered).sum(dim=-1, keepdim=True)
    return (kept / whole).to(p.dtype), (recovered / whole).to(p.dtype)


def probs_under_shared_noise(p: Tensor, token: int, after: Tensor) -> Tensor:
    """The distribution of a token chosen under `after` by the Gumbel noise that chose `token` under `p`.

    Gumbel noise is an exponential race: v arrives at E_v / p(v), E_v standard exponential. If x arrived first, at time
    T, the others still need a fresh E_v beyond T p(v), and T is standard exponential. In the second race, in units of
    T, x arrives at a = p(x) / after(x), and v starts at s(v) = p(v) / after(v) with rate after(v). With S(t) the sum
    over v != x of after(v) max(0, t - s(v)), averaging over T gives x with 1 / (1 + S(a)), and v that starts before a
    with after(v) times the integral from s(v) to a of dt / (1 + S(t))^2. S is linear between starts, where that
    integral is (t2 - t1) / ((1 + S(t1)) (1 + S(t2))).

    Worked example: p = (1/2, 1/2), after = (1/4, 3/4), token 0: a = 2, s(1) = 2/3, S(2) = 3/4 * 4/3 = 1: it comes again
    with 1/2, and 1 with 3/4 * (4/3) / (1 * 2) = 1/2.

    Args:
        p: `[vocab]`, with mass at `token`.
        token: that was chosen.
        after: `[vocab]`.

    Returns:
        `[vocab]`, float64.
    """
    p, after = p.double(), after.double()
    possible = after > 0.0
    possible[token] = False
    starts = (p[possible] / after[possible]).cpu()
    rates = after[possible].cpu()
    last = float(p[token] / after[token]) if float(after[token]) > 0.0 else math.inf
    order = starts.argsort()
    times = starts[order].clamp_max(last)
    speed = torch.cat([torch.zeros(1, dtype=torch.float64), rates[order].cumsum(0)])  # of S before each start
    ends = torch.cat([times, torch.tensor([last], dtype=torch.float64)])
    lengths = ends.diff(prepend=torch.zeros(1, dtype=torch.float64))
    reached = (speed * lengths.nan_to_num(posinf=0.0)).cumsum(0)  # S at each of the ends
    if math.isinf(last):
        reached[-1] = math.inf
    above = 1.0 + torch.cat([torch.zeros(1, dtype=torch.float64), reached[:-1]])
    parts = torch.where(
        (1.0 + reached).isinf(), 1.0 / (above * speed.clamp_min(1e-300)), lengths / (above * (1.0 + reached))
    )
    left = parts.flip(0).cumsum(0).flip(0)[1:]  # of the integral, from each start to the end
    probs = torch.zeros_like(after)
    found = torch.empty_like(rates)
    found[order] = rates[order] * left
    probs[possible] = found.to(probs.device)
    probs[token] = 0.0 if math.isinf(last) else 1.0 / (1.0 + float(reached[-1]))
    return probs
