"""Faults planted on purpose: what published samplers did wrong, around the user's own rule, drafter and target.

Each changes one thing about the part that it breaks. What it does to the distribution of a token at a node with one
draft is known in closed form (`emitted_...`), so that one knows how large a fault a test was shown: p is the target's
distribution `[tokens, vocab]` at each node, q the one that the draft was drawn from, one-hot for a deterministic
candidate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from truedraft.cache import RequestCache
from truedraft.core import probs as L
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise, Purpose
from truedraft.core.proposal import Proposal
from truedraft.core.verdict import Origin, Verdict
from truedraft.drafters.base import Drafter, DraftRequest
from truedraft.models.base import LanguageModel
from truedraft.testing import ScriptedDrafter, altered
from truedraft.verification import CoupledSampling, Rule
from truedraft.verification.rule import BatchVerdicts, HostVerdicts

JUDGED_AT = 2.0
"""The temperature at which q is judged where it should be 1."""
SHOWN_FROM = 0.3
"""Draft probability below which a drawn token is hidden."""
_ONE_ACCEPTED = 2

# ------------------------------------------------------------------------------------------------ faults of rules


def accepts_always(rule: Rule) -> Rule:
    """Keeps the first drafted path whole, whatever the target says; then a bonus token."""

    def last(p: Tensor, noise: Noise, depth: int) -> int:
        return _drawn(p, noise.uniform(Purpose.BONUS, depth))

    return _accepting(rule, last)


def coupled_accepts_always() -> Rule:
    """The same for greedy and seeded requests."""
    rule = CoupledSampling()

    def last(p: Tensor, noise: Noise, depth: int) -> int:
        (verdict,) = rule.verify([Proposal.empty()], [p], [_AtOtherKeys(noise, deeper=depth)])
        return verdict.tokens[0]

    return _accepting(rule, last)


def _accepting(rule: Rule, last: Callable[[Tensor, Noise, int], int]) -> Rule:
    """A rule that keeps first paths; `last` gives the token behind one, by p `[1, vocab]` there, noise and depth."""

    def judged(proposal: Proposal, probs: Tensor, noise: Noise) -> Verdict:
        path: list[int] = []
        row = 0
        while proposal.draws[row]:
            path.append(proposal.draws[row][0].child)
            row = path[-1] + 1
        kept = (proposal.tree.host_ids[node] for node in path)
        return Verdict(tuple(path), (*kept, last(probs[row : row + 1], noise, len(path))), Origin.BONUS)

    def decide(proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
        return HostVerdicts([judged(*each) for each in zip(proposals, probs, noise, strict=True)])

    return altered(rule, decide=decide)


def residual_is_target(rule: Rule) -> Rule:
    """After a rejection draws from p, not from norm(max(0, p - q)): by the same number, so all else is right."""

    def redrawn(verdict: Verdict, probs: Tensor, noise: Noise) -> Verdict:
        if verdict.final is not Origin.RECOVERED:
            return verdict
        row = verdict.path[-1] + 1 if verdict.path else 0
        token = _drawn(probs[row : row + 1], noise.uniform(Purpose.RECOVERED, len(verdict.path)))
        return replace(verdict, tokens=(*verdict.tokens[:-1], token))

    def decide(proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
        verdicts = rule.verify(proposals, probs, noise)
        return HostVerdicts([redrawn(*each) for each in zip(verdicts, probs, noise, strict=True)])

    return altered(rule, decide=decide)


def judges_another_temperature(rule: Rule) -> Rule:
    """Judges q at a temperature at which it was not drawn."""

    def decide(proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
        wrong = [own if own.probs is None else replace(own, probs=flattened(own.probs)) for own in proposals]
        return rule.decide(wrong, probs, noise)

    return altered(rule, decide=decide)


def one_key_twice(rule: Rule) -> Rule:
    """The number that rejected a draft also draws the recovered token."""
    return _with_noise(rule, lambda noise: _AtOtherKeys(noise, recovered=Purpose.ACCEPT))


def coupled_one_key() -> Rule:
    """All tokens of a step share the Gumbel noise of its first."""
    return _with_noise(CoupledSampling(), lambda noise: _AtOtherKeys(noise, gumbel_depths=0))


def _with_noise(rule: Rule, wrong: Callable[[Noise], Noise]) -> Rule:
    def decide(proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
        return rule.decide(proposals, probs, [wrong(own) for own in noise])

    return altered(rule, decide=decide)


class _AtOtherKeys:
    """Noise that reads another's numbers at keys that are not asked for.

    Args:
        inner: has the numbers.
        recovered: whose numbers draw recovered tokens.
        gumbel_depths: times the depth that Gumbel noise is asked for at, the depth where it is read.
        deeper: is added to it.
    """

    def __init__(
        self, inner: Noise, *, recovered: Purpose = Purpose.RECOVERED, gumbel_depths: int = 1, deeper: int = 0
    ) -> None:
        self._inner = inner
        self._recovered = recovered
        self._depths = gumbel_depths
        self._deeper = deeper

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        return self._inner.uniform(self._recovered if purpose is Purpose.RECOVERED else purpose, depth, index)

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> Tensor | None:
        return self._inner.gumbel(depth * self._depths + self._deeper, vocab, device)

    def inside(self, turn: int, depth: int) -> Noise:
        return self._inner.inside(turn, depth)  # what is broken is the noise of verdicts


def _drawn(p: Tensor, number: float) -> int:
    """The token that a number in (0, 1) draws from p `[1, vocab]`."""
    return int(L.draw(p, torch.tensor([number], dtype=torch.float64, device=p.device)))


# ---------------------------------------------------------------------------------- faults of drafters and targets


def next_id(vocab: int) -> Drafter:
    """Guesses the id behind the last token's, which is hardly ever right: for targets that their drafts never miss."""
    return ScriptedDrafter(lambda tokens: [[(tokens[-1] + 1) % vocab]], depth=1, nodes=1)


def hides_unlikely_draws(drafter: Drafter) -> Drafter:
    """Looks at the first token drawn and shows the proposal only if the draft was sure: a choice after the draw."""

    def propose(batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]) -> list[Proposal]:
        return [
            own if not len(own.tree) or _first_probability(own) >= SHOWN_FROM else Proposal.empty()
            for own in drafter.propose(batch, budgets, noise)
        ]

    return altered(drafter, propose=propose)


def _first_probability(proposal: Proposal) -> float:
    draw = proposal.draws[0][0]
    return 1.0 if proposal.probs is None else float(proposal.probs[draw.dist, proposal.tree.host_ids[draw.child]])


def loses_last_accepted(model: LanguageModel) -> LanguageModel:
    """Off by one in the target's cache: the keys and values of the last accepted token are those of the one before."""

    def new_cache() -> RequestCache:
        cache = model.new_cache()
        cache.commit = functools.partial(_commit_wrongly, cache.commit)  # type: ignore[method-assign]
        return cache

    def release_cache(cache: RequestCache) -> None:
        del cache.commit  # given back as it was
        model.release_cache(cache)

    return altered(model, new_cache=new_cache, release_cache=release_cache)


def _commit_wrongly(commit: Callable[[Sequence[int]], None], path: Sequence[int]) -> None:
    """Of the last token and one accepted behind it, keep the first twice."""
    commit((path[0], path[0]) if len(path) == _ONE_ACCEPTED else path)


# --------------------------------------------------------------------------------------------------- what they emit


def flattened(q: Tensor) -> Tensor:
    """Distributions `[..., vocab]` at the temperature `JUDGED_AT`."""
    flat = q.pow(1.0 / JUDGED_AT)
    return flat / flat.sum(dim=-1, keepdim=True)


def emitted_always(p: Tensor, q: Tensor) -> Tensor:
    """Of `accepts_always`: q itself."""
    return q


def emitted_by_target_residual(p: Tensor, q: Tensor) -> Tensor:
    """Of `residual_is_target`: min(p, q) + (1 - sum min(p, q)) p."""
    kept = torch.minimum(p, q)
    return kept + (1.0 - kept.sum(dim=-1, keepdim=True)) * p


def emitted_at_another_temperature(p: Tensor, q: Tensor) -> Tensor:
    """Of `judges_another_temperature`: x ~ q stays with min(1, p/q'), else norm(max(0, p - q')), q' the flatter q."""
    other = flattened(q)
    kept = q * (p / other.clamp_min(torch.finfo(p.dtype).tiny)).clamp_max(1.0)
    return kept + (1.0 - kept.sum(dim=-1, keepdim=True)) * L.residual(p, other)


def as_bfloat16_draws(q: Tensor) -> Tensor:
    """What a cumulative sum in bfloat16 draws in place of q, `[..., vocab]`, float64."""
    sums = q.bfloat16().cumsum(dim=-1, dtype=torch.bfloat16).double()
    cells = sums.cummax(dim=-1).values.diff(dim=-1, prepend=torch.zeros_like(sums[..., :1]))
    return cells / cells.sum(dim=-1, keepdim=True)


def emitted_by_bfloat16(p: Tensor, q: Tensor) -> Tensor:
    """Of a draft drawn by such a sum, judged as if from q: x ~ q' stays with min(1, p/q), else norm(max(0, p - q))."""
    drawn = as_bfloat16_draws(q).to(p)
    kept = drawn * (p / q.clamp_min(torch.finfo(p.dtype).tiny)).clamp_max(1.0)
    return kept + (1.0 - kept.sum(dim=-1, keepdim=True)) * L.residual(p, q)


def emitted_by_one_key(p: Tensor, q: Tensor) -> Tensor:
    """Of `one_key_twice`: given a rejection of x, the number is uniform over [a(x), 1), a = min(1, p/q).

    The recovered token y has the cell [C(y-1), C(y)) of the residual's cumulative sum C, of which the part above a(x)
    counts: F(C(y)) - F(C(y-1)) with F(t) = sum over x of q(x) max(0, t - a(x)), found by sorting the a(x).
    """
    a = (p / q.clamp_min(torch.finfo(p.dtype).tiny)).clamp_max(1.0).double()
    drawn = q.double()
    cumulative = L.residual(p, q).double().cumsum(dim=-1)
    order = a.argsort(dim=-1)
    edges = a.gather(-1, order)
    weight = drawn.gather(-1, order)
    mass = weight.cumsum(dim=-1)  # of the drafts with an acceptance up to here
    moment = (weight * edges).cumsum(dim=-1)
    place = torch.searchsorted(edges.contiguous(), cumulative.contiguous(), right=True)
    padded = torch.nn.functional.pad
    total = padded(mass, (1, 0)).gather(-1, place) * cumulative - padded(moment, (1, 0)).gather(-1, place)
    recovered = total.diff(dim=-1, prepend=torch.zeros_like(total[..., :1]))
    return (torch.minimum(p, q).double() + recovered.clamp_min(0.0)).to(p.dtype)


def emitted_by_hiding(p: Tensor, q: Tensor) -> Tensor:
    """Of `hides_unlikely_draws`: shown drafts are judged rightly; where one was hidden the token is drawn from p."""
    shown = q * (q >= SHOWN_FROM)
    kept = torch.minimum(p, q) * (q >= SHOWN_FROM)
    rejected = shown.sum(dim=-1, keepdim=True) - kept.sum(dim=-1, keepdim=True)
    hidden = 1.0 - shown.sum(dim=-1, keepdim=True)
    return kept + rejected * L.residual(p, q) + hidden * p


def emitted_by_shared_noise(p: Tensor, q: Tensor) -> Tensor:
    """Of an engine whose replacement is the largest of log residual + g, g the Gumbel noise that drew the draft from q.

    A rejected x has q(x) > p(x), so nothing of it is left and it cannot come again; and given that x came first in the
    race under q, the times of the others do not depend on which x it was. So `probs_under_shared_noise` is the same
    after every rejection.

    Worked example: p = (0.1, 0.6, 0.3), q = (1/2, 1/4, 1/4). Token 0 is rejected with 0.4, which leaves (0, 7/8, 1/8).
    Token 1 starts at 2/7 and token 2 at 2, when S is 3/2: token 1 came by then with 3/5, and gets 7/8 of the rest,
    19/20 in all. So (0.1, 0.63, 0.27) is emitted.
    """
    left, found = L.residual(p, q), torch.minimum(p, q).double()
    lost = (q - p).clamp_min(0.0)
    rejected, drafts = lost.sum(dim=-1, dtype=torch.float64).tolist(), lost.argmax(dim=-1).tolist()
    for row, (weight, draft) in enumerate(zip(rejected, drafts, strict=True)):
        if weight > 0.0:
            found[row] += weight * probs_under_shared_noise(q[row], draft, left[row])
    return (found / found.sum(dim=-1, keepdim=True)).to(p.dtype)


def probs_under_shared_noise(p: Tensor, token: int, after: Tensor) -> Tensor:
    """Of `coupled_one_key`: the distribution of a token chosen under `after` by the noise that chose `token` under `p`.

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
