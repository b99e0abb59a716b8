"""Known faults of published samplers: the effect of each on the distribution of a token, and how to plant it.

A fault of verification has a closed form, so that the size of a planted fault is known, and a test can bet on it and
name it if tokens are most likely under it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from truedraft.certify.checks import Stack
from truedraft.core import probs as L
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise, Purpose
from truedraft.core.proposal import Proposal
from truedraft.core.verdict import Origin, Verdict
from truedraft.drafters.base import Drafter, DraftRequest
from truedraft.models.base import LanguageModel
from truedraft.models.cache import RequestCache
from truedraft.testing import ScriptedDrafter, altered
from truedraft.verification import ArgmaxRule, CoupledSampling, Rule
from truedraft.verification.rule import BatchVerdicts

if TYPE_CHECKING:
    from truedraft.certify.samplers.worlds import SamplerWorld

Given = tuple[Proposal, Tensor, Noise]
Masses = tuple[Tensor, Tensor]
"""The mass `[..., vocab]` of kept drafted tokens, and of tokens after a rejection; together 1."""
Form = Callable[[Tensor, Tensor], Masses]
"""A closed form of verification at a node with one draft, from the target's distribution p `[..., vocab]` and q that
the draft was drawn from, one-hot for a candidate without a draw."""
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


def shown_where(shows: Tensor, p: Tensor, q: Tensor) -> Masses:
    """Drafts of other tokens are hidden, and p is drawn from; the shown ones are verified correctly."""
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
    """The distribution `[vocab]`, float64, chosen under `after` by the Gumbel noise that chose `token` under `p`.

    Gumbel noise is an exponential race: v arrives at E_v / p(v), E_v standard exponential. If x arrived first, at time
    T, the others still need a fresh E_v beyond T p(v), and T is standard exponential. In the second race, in units of
    T, x arrives at a = p(x) / after(x), and v starts at s(v) = p(v) / after(v) with rate after(v). With S(t) the sum
    over v != x of after(v) max(0, t - s(v)), averaging over T gives x with 1 / (1 + S(a)), and v that starts before a
    with after(v) times the integral from s(v) to a of dt / (1 + S(t))^2. S is linear between starts, where that
    integral is (t2 - t1) / ((1 + S(t1)) (1 + S(t2))).

    Worked example: p = (1/2, 1/2), after = (1/4, 3/4), token 0: a = 2, s(1) = 2/3, S(2) = 3/4 * 4/3 = 1: it comes again
    with 1/2, and 1 with 3/4 * (4/3) / (1 * 2) = 1/2.
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


def accepts_always(rule: Rule) -> Rule:
    """Accepts the first drafted path whatever the target's distribution is; then a bonus token."""

    def last(p: Tensor, noise: Noise, depth: int) -> int:
        return _drawn(p, noise.uniform(Purpose.BONUS, depth))

    return _accepting(rule, last)


def coupled_accepts_always() -> Rule:
    """`accepts_always` for greedy and seeded requests."""

    def accepting(rule: Rule) -> Rule:
        def last(p: Tensor, noise: Noise, depth: int) -> int:
            (verdict,) = rule.verify([Proposal.empty()], [p], [_AtOtherKeys(noise, deeper=depth)])
            return verdict.tokens[0]

        return _accepting(rule, last)

    return altered(accepting(CoupledSampling()), greedy_form=accepting(ArgmaxRule()))


def _accepting(rule: Rule, last: Callable[[Tensor, Noise, int], int]) -> Rule:
    def judged(verdict: Verdict, proposal: Proposal, probs: Tensor, noise: Noise) -> Verdict:
        path: list[int] = []
        row = 0
        while proposal.draws[row]:
            path.append(proposal.draws[row][0].child)
            row = path[-1] + 1
        kept = (proposal.tree.host_ids[node] for node in path)
        return Verdict(tuple(path), (*kept, last(probs[row : row + 1], noise, len(path))), Origin.BONUS)

    return judging(rule, judged)


def residual_is_target(rule: Rule) -> Rule:
    """After a rejection draws from p, not from norm(max(0, p - q)), with the same number, so that all else is right."""

    def redrawn(verdict: Verdict, proposal: Proposal, probs: Tensor, noise: Noise) -> Verdict:
        if verdict.final is not Origin.RECOVERED:
            return verdict
        row = verdict.path[-1] + 1 if verdict.path else 0
        token = _drawn(probs[row : row + 1], noise.uniform(Purpose.RECOVERED, len(verdict.path)))
        return replace(verdict, tokens=(*verdict.tokens[:-1], token))

    return judging(rule, redrawn)


def judges_another_temperature(rule: Rule, temperature: float) -> Rule:
    """Judges q at another temperature than it was drawn at."""

    def wrong(own: Proposal, probs: Tensor, noise: Noise) -> Given:
        changed = None if own.probs is None else at_temperature(temperature, own.probs)
        return replace(own, probs=changed), probs, noise

    return given_another(rule, wrong)


def one_key_twice(rule: Rule) -> Rule:
    """The number that rejected a draft also draws the recovered token."""
    return given_another(rule, lambda own, probs, noise: (own, probs, _AtOtherKeys(noise, recovered=Purpose.ACCEPT)))


def coupled_one_key() -> Rule:
    """All tokens of a step share the Gumbel noise of its first."""
    rule = CoupledSampling()
    return given_another(rule, lambda own, probs, noise: (own, probs, _AtOtherKeys(noise, gumbel_depths=0)))


def judging(rule: Rule, judged: Callable[[Verdict, Proposal, Tensor, Noise], Verdict]) -> Rule:
    """A rule with verdicts changed by a function of each, and of its request's proposal, probs and noise."""

    def accept(proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
        verdicts = rule.verify(proposals, probs, noise)
        return BatchVerdicts.made([judged(*each) for each in zip(verdicts, proposals, probs, noise, strict=True)])

    return altered(rule, accept=accept)


def given_another(rule: Rule, changed: Callable[[Proposal, Tensor, Noise], Given]) -> Rule:
    """A rule that receives other proposals, probs or noise than the engine made."""

    def accept(proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
        given = [changed(*each) for each in zip(proposals, probs, noise, strict=True)]
        return rule.accept([own for own, _, _ in given], [own for _, own, _ in given], [own for _, _, own in given])

    return altered(rule, accept=accept)


@dataclass(frozen=True, slots=True)
class _AtOtherKeys:
    """Noise read at wrong keys: Gumbel noise at `gumbel_depths` times the depth plus `deeper`."""

    inner: Noise
    recovered: Purpose = Purpose.RECOVERED
    gumbel_depths: int = 1
    deeper: int = 0

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        return self.inner.uniform(self.recovered if purpose is Purpose.RECOVERED else purpose, depth, index)

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> Tensor:
        return self.inner.gumbel(depth * self.gumbel_depths + self.deeper, vocab, device)

    def inside(self, turn: int, depth: int) -> Noise:
        return self.inner.inside(turn, depth)  # only the noise of verdicts is broken


def _drawn(p: Tensor, number: float) -> int:
    return int(L.draw(p, torch.tensor([number], dtype=torch.float64, device=p.device)))


def next_id(vocab: int) -> Drafter:
    """Guesses the last token's id plus 1, which is almost always wrong: for targets that their drafts never miss."""
    return ScriptedDrafter(lambda tokens: [[(tokens[-1] + 1) % vocab]], depth=1, nodes=1)


def hides_unlikely_draws(drafter: Drafter, least: float) -> Drafter:
    """Shows a proposal only if the first drawn token was likely under the draft: a choice after the draw."""

    def likely(own: Proposal) -> bool:
        draw = own.draws[0][0]
        return own.probs is None or float(own.probs[draw.dist, own.tree.host_ids[draw.child]]) >= least

    return _showing_where(drafter, likely)


def loses_what_it_drew(drafter: Drafter) -> Drafter:
    """Like a drafter that fails at odd ids that it drew, in an engine that continues without its proposal then."""
    return _showing_where(drafter, lambda own: own.tree.host_ids[own.draws[0][0].child] % 2 == 0)


def _showing_where(drafter: Drafter, shows: Callable[[Proposal], bool]) -> Drafter:
    def propose(batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]) -> list[Proposal]:
        drafted = drafter.propose(batch, budgets, noise)
        return [own if not len(own.tree) or shows(own) else Proposal.empty() for own in drafted]

    return altered(drafter, propose=propose)


def loses_last_accepted(model: LanguageModel) -> LanguageModel:
    """Off by one in the target's cache: the keys and values of the last accepted token are those of the one before."""

    def wrong(cache: RequestCache, path: Sequence[int]) -> Sequence[int]:
        return (*path[:-1], path[-2]) if cache.length and len(path) > 1 else path  # a prompt is kept correctly

    return commits_wrongly(model, wrong)


def commits_wrongly(
    model: LanguageModel, wrong: Callable[[RequestCache, Sequence[int]], Sequence[int]]
) -> LanguageModel:
    """A target with caches that keep `wrong` of a cache and the requested path."""

    def new_cache() -> RequestCache:
        cache = model.new_cache()
        commit = cache.commit
        cache.commit = lambda path: commit(wrong(cache, list(path)))  # type: ignore[method-assign]
        return cache

    def release_cache(cache: RequestCache) -> None:
        vars(cache).pop("commit", None)  # restored, also under another such target
        model.release_cache(cache)

    return altered(model, new_cache=new_cache, release_cache=release_cache)


@dataclass(frozen=True, slots=True)
class Fault:
    """A known fault."""

    name: str  # what is wrong; several faults of different size may share it
    detail: str = ""  # how, or how much
    form: Form | None = None  # its effect at a node with one draft; None if it is not in verification
    plant: Callable[[Stack], Stack] | None = None  # makes the broken stack; None if it cannot be planted
    needs_draw: bool = False  # it shows only if drafts are drawn from a distribution
    following: Callable[[Tensor, int, Tensor], Tensor] | None = None  # on the next token: p before, the id, p after
    joint: Callable[[SamplerWorld], Tensor] | None = None  # [cells], float64; None if `form` determines it

    def emitted(self, p: Tensor, q: Tensor) -> Tensor:
        assert self.form is not None
        kept, recovered = self.form(p, q)
        return kept + recovered

    def planted(self, stack: Stack) -> Stack:
        assert self.plant is not None
        return self.plant(stack)


KEEPS_ALL = Fault(
    "keeps every drafted token",
    "whatever the target says",
    lambda p, q: after(q, p),
    lambda stack: stack.but(rule=accepts_always(stack.rule), coupled_rule=coupled_accepts_always()),
)
RESIDUAL_IS_P = Fault(
    "the residual is p",
    "after a rejection the token is drawn from p",
    lambda p, q: after(torch.minimum(p, q), p),
    lambda stack: stack.but(rule=residual_is_target(stack.rule)),
)
ONE_NUMBER = Fault(
    "shared noise",
    "the number that rejects also draws the recovered token",
    one_number,
    lambda stack: stack.but(rule=one_key_twice(stack.rule)),
)
ONE_GUMBEL = Fault("shared noise", "the Gumbel noise that drew the draft also draws its replacement", one_gumbel)
SHARED_BY_TOKENS = Fault(
    "two tokens share their noise",
    plant=lambda stack: stack.but(coupled_rule=coupled_one_key()),
    following=probs_under_shared_noise,
)
IN_BFLOAT16 = Fault(
    "draft drawn in bfloat16, judged in float32",
    "by its cumulative sum",
    lambda p, q: judged(p, q, as_bfloat16_draws(q).to(p)),
)
CACHE_OFF_BY_ONE = Fault(
    "the target's cache is off by one", plant=lambda stack: stack.but(target=loses_last_accepted(stack.target))
)
LOST_BY_FAILURES = Fault(
    "a drafter that fails loses what it drew",
    "at odd ids, and p is drawn from",
    lambda p, q: shown_where(torch.arange(p.shape[-1], device=p.device) % 2 == 0, p, q),
    lambda stack: stack.but(drafter=loses_what_it_drew(stack.drafter)),
    needs_draw=True,
)
_OTHER_TEMPERATURE = "judged at another temperature"


def draft_judged_at(temperature: float) -> Fault:
    """The draft's distribution, judged at another temperature than it was drawn at."""
    return Fault(
        _OTHER_TEMPERATURE,
        f"the draft's distribution at {temperature:g}",
        lambda p, q: judged(p, at_temperature(temperature, q), q),
        lambda stack: stack.but(rule=judges_another_temperature(stack.rule, temperature)),
        needs_draw=True,
    )


def dropped_below(least: float) -> Fault:
    """A choice after seeing the draw: drafts are shown only if they were likely under the draft."""
    return Fault(
        "drafted tokens of low q are dropped",
        f"below {least:g}, and p is drawn from",
        lambda p, q: shown_where(q >= least, p, q),
        lambda stack: stack.but(drafter=hides_unlikely_draws(stack.drafter, least)),
        needs_draw=True,
    )


def faults_of_judging() -> list[Fault]:
    """Possible faults of a rejection sampler, which sees only p and q."""
    low, residual, wrong = torch.minimum, L.residual, "the residual is wrong"
    shares, temperatures = (0.5, 0.8, 0.95), (2.0, 1.25, 0.8, 0.5)

    def accepting(name: str, detail: str, *, lenience: float = 1.0, factor: float = 1.0) -> Fault:
        return Fault(name, detail, lambda p, q: after(factor * low(p / lenience, q), residual(p, q)))

    return [
        KEEPS_ALL,
        *(accepting("accepts too much", f"with min(1, p / {share:g} q)", lenience=share) for share in shares),
        *(accepting("accepts too little", f"with {share:g} min(1, p / q)", factor=share) for share in shares),
        RESIDUAL_IS_P,
        Fault(RESIDUAL_IS_P.name, "without the drafted token", residual_without_drafted),
        Fault(wrong, "max(0, q - p)", lambda p, q: after(low(p, q), residual(q, p))),
        Fault(wrong, "the argmax of max(0, p - q), not a draw", lambda p, q: after(low(p, q), argmax(p - q))),
        Fault(
            "q is taken as 1",
            "drafted tokens are kept with p, and norm(max(0, p - q)) is drawn from",
            lambda p, q: after(p * q, residual(p, q)),
        ),
        Fault(
            "emits what p forbids",
            "drafted tokens without target probability are kept",
            lambda p, q: after(low(p, q) + q * (p == 0.0), residual(p, q)),
        ),
        ONE_NUMBER,
        *map(draft_judged_at, temperatures),
        *map(_target_judged_at, temperatures),
        *map(dropped_below, (0.1, 0.2, 0.3, 0.5)),
    ]


def _target_judged_at(temperature: float) -> Fault:
    detail = f"the target's, where drafts are judged, at {temperature:g}"
    return Fault(_OTHER_TEMPERATURE, detail, lambda p, q: judged(at_temperature(temperature, p), q, q))
