"""Faults planted on purpose: what published samplers did wrong, around the user's own rule, drafter and target.

Each stands before the part that it breaks and changes one thing. What it does to the law of a token at a node with one
draft is known in closed form (`emitted_...`), so that one knows how large a fault a test was shown: p is the target's
law `[tokens, vocab]` at each node, q the law that the draft was drawn from, one-hot for a deterministic candidate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.cache import RequestCache
from truedraft.certify.delegating import DelegatingModel
from truedraft.certify.recording import RecordingDrafter
from truedraft.core import laws as L
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise, Purpose
from truedraft.core.proposals import DrawKind, Proposal
from truedraft.core.trees import TokenTree
from truedraft.core.verdicts import Origin, Verdict
from truedraft.drafters.base import Drafter, DraftRequest
from truedraft.verification import CoupledSampling, Rule
from truedraft.verification.rule import DeviceVerdicts, HasKind, JudgedSlot, Outcome

JUDGED_AT = 2.0
"""The temperature at which q is judged where it should be 1."""
SHOWN_FROM = 0.3
"""Draft probability below which a drawn token is hidden."""


class _Around(Rule):
    """A rule that does as another one does, but for what a subclass changes."""

    def __init__(self, inner: Rule) -> None:
        self.inner = inner
        self.name = inner.name  # type: ignore[misc]
        self.lossless = inner.lossless  # type: ignore[misc]
        self.judges = inner.judges  # type: ignore[misc]

    def check(self, kinds: Iterable[DrawKind], drafter: str) -> None:
        """As the inner rule."""
        self.inner.check(kinds, drafter)

    def joins(self, draws: Sequence[HasKind]) -> bool:
        """As the inner rule."""
        return self.inner.joins(draws)

    def decide(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> DeviceVerdicts:
        """As the inner rule."""
        return self.inner.decide(proposals, laws, noise)

    def outcomes(self, group: Sequence[JudgedSlot]) -> list[Outcome]:
        """Those of the inner rule: the faults here are in what is shipped, not in its kernel."""
        return self.inner.outcomes(group)


# ------------------------------------------------------------------------------------------------ faults of rules


class AcceptsAlways(_Around):
    """Keeps the first drafted path whole, whatever the target says; then a bonus token."""

    def decide(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> DeviceVerdicts:
        """Judge nothing."""
        return DeviceVerdicts.of([self._verdict(*each) for each in zip(proposals, laws, noise, strict=True)])

    def _verdict(self, proposal: Proposal, laws: Tensor, noise: Noise) -> Verdict:
        path: list[int] = []
        slot = 0
        while proposal.draws[slot]:
            path.append(proposal.draws[slot][0].child)
            slot = path[-1] + 1
        last = self._last(laws[slot : slot + 1], noise, len(path))
        return Verdict(tuple(path), (*(proposal.tree.token_list[node] for node in path), last), Origin.BONUS)

    def _last(self, law: Tensor, noise: Noise, depth: int) -> int:
        """The token behind the path, from the law `[1, vocab]` there."""
        uniform = torch.tensor([noise.uniform(Purpose.BONUS, depth)], dtype=torch.float64, device=law.device)
        return int(L.draw(law, uniform))


class CoupledAcceptsAlways(AcceptsAlways):
    """The same for greedy and coupled requests."""

    def __init__(self) -> None:
        super().__init__(CoupledSampling())

    def _last(self, law: Tensor, noise: Noise, depth: int) -> int:
        (verdict,) = self.inner.verify([Proposal.empty()], [law], [_Deeper(noise, depth)])
        return verdict.tokens[0]


class ResidualIsTarget(_Around):
    """After a rejection draws from p, not from norm(max(0, p - q))."""

    def decide(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> DeviceVerdicts:
        """Judge rightly, and draw the recovered token again, wrongly, by the same number."""
        verdicts = self.inner.verify(proposals, laws, noise)
        return DeviceVerdicts.of([self._redrawn(*each) for each in zip(verdicts, laws, noise, strict=True)])

    def _redrawn(self, verdict: Verdict, laws: Tensor, noise: Noise) -> Verdict:
        if verdict.final is not Origin.RECOVERED:
            return verdict
        slot = verdict.path[-1] + 1 if verdict.path else 0
        number = noise.uniform(Purpose.RECOVERED, len(verdict.path))
        uniform = torch.tensor([number], dtype=torch.float64, device=laws.device)
        return replace(verdict, tokens=(*verdict.tokens[:-1], int(L.draw(laws[slot : slot + 1], uniform))))


class JudgesAnotherTemperature(_Around):
    """Judges q at a temperature at which it was not drawn."""

    def decide(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> DeviceVerdicts:
        """Judge against flatter laws."""
        wrong = [own if own.laws is None else replace(own, laws=flattened(own.laws)) for own in proposals]
        return self.inner.decide(wrong, laws, noise)


class OneKeyTwice(_Around):
    """The number that rejected a draft also draws the recovered token."""

    def decide(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> DeviceVerdicts:
        """Judge with noise in which two decisions read one number."""
        return self.inner.decide(proposals, laws, [_AcceptIsRecovered(own) for own in noise])


class CoupledOneKey(_Around):
    """All tokens of a step share the Gumbel noise of its first."""

    def __init__(self) -> None:
        super().__init__(CoupledSampling())

    def decide(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> DeviceVerdicts:
        """Judge with noise that does not depend on the depth."""
        return self.inner.decide(proposals, laws, [_FirstDepth(own) for own in noise])


class _NoiseAround:
    """Noise that reads another's numbers."""

    def __init__(self, inner: Noise) -> None:
        self.inner = inner

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        return self.inner.uniform(purpose, depth, index)

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> Tensor | None:
        return self.inner.gumbel(depth, vocab, device)


class _AcceptIsRecovered(_NoiseAround):
    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        return self.inner.uniform(Purpose.ACCEPT if purpose is Purpose.RECOVERED else purpose, depth, index)


class _FirstDepth(_NoiseAround):
    def gumbel(self, depth: int, vocab: int, device: torch.device) -> Tensor | None:
        return self.inner.gumbel(0, vocab, device)


class _Deeper(_NoiseAround):
    def __init__(self, inner: Noise, by: int) -> None:
        super().__init__(inner)
        self._by = by

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> Tensor | None:
        return self.inner.gumbel(depth + self._by, vocab, device)


# ---------------------------------------------------------------------------------- faults of drafters and targets


class OneToken(RecordingDrafter):
    """Drafts one token a step: then what a planted fault does to the law is known in closed form. No fault itself."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.limits = Budget(1, 1, 1)


class Wrong(Drafter):
    """Guesses the id behind the last token's, which is hardly ever right: for targets that their drafts never miss."""

    name: ClassVar[str] = "next id"

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self.limits = Budget(1, 1, 1)

    @property
    def kinds(self) -> frozenset[DrawKind]:
        """Deterministic candidates."""
        return frozenset({DrawKind.DETERMINISTIC})

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        """One candidate for each request."""
        return [
            Proposal.deterministic(TokenTree.chain([(request.tokens[-1] + 1) % self._vocab] * min(1, budget.depth)))
            for request, budget in zip(batch, budgets, strict=True)
        ]


class HidesUnlikelyDraws(OneToken):
    """Looks at what was drawn and shows it only if the draft was sure: a choice made after seeing the draw."""

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        """Proposals of one token each, without those that the draft gave less than `SHOWN_FROM`."""
        return [
            own if not len(own.tree) or _first_probability(own) >= SHOWN_FROM else Proposal.empty()
            for own in super().propose(batch, budgets, noise)
        ]


def _first_probability(proposal: Proposal) -> float:
    draw = proposal.draws[0][0]
    return 1.0 if proposal.laws is None else float(proposal.laws[draw.law, proposal.tree.token_list[draw.child]])


class LosesLastAccepted(DelegatingModel):
    """Off by one in the target's cache: the keys and values of the last accepted token are those of the one before."""

    def new_cache(self) -> RequestCache:
        """A cache whose commits go wrong after an acceptance."""
        cache = super().new_cache()
        cache.commit = functools.partial(_commit_wrongly, cache.commit)  # type: ignore[method-assign]
        return cache

    def release_cache(self, cache: RequestCache) -> None:
        """Give it back as it was."""
        del cache.commit
        super().release_cache(cache)


def _commit_wrongly(commit: Callable[[Sequence[int]], None], path: Sequence[int]) -> None:
    """Of the last token and one accepted behind it, keep the first twice."""
    commit((path[0], path[0]) if len(path) == _ONE_ACCEPTED else path)


_ONE_ACCEPTED = 2


# --------------------------------------------------------------------------------------------------- what they emit


def flattened(q: Tensor) -> Tensor:
    """Laws `[..., vocab]` at the temperature `JUDGED_AT`."""
    flat = q.pow(1.0 / JUDGED_AT)
    return flat / flat.sum(dim=-1, keepdim=True)


def emitted_always(p: Tensor, q: Tensor) -> Tensor:
    """Of `AcceptsAlways`: q itself."""
    return q


def emitted_by_target_residual(p: Tensor, q: Tensor) -> Tensor:
    """Of `ResidualIsTarget`: min(p, q) + (1 - sum min(p, q)) p."""
    kept = torch.minimum(p, q)
    return kept + (1.0 - kept.sum(dim=-1, keepdim=True)) * p


def emitted_at_another_temperature(p: Tensor, q: Tensor) -> Tensor:
    """Of `JudgesAnotherTemperature`: x ~ q stays with min(1, p/q'), else norm(max(0, p - q')), q' the flatter law."""
    other = flattened(q)
    kept = q * (p / other.clamp_min(torch.finfo(p.dtype).tiny)).clamp_max(1.0)
    return kept + (1.0 - kept.sum(dim=-1, keepdim=True)) * L.residual(p, other)


def emitted_by_one_key(p: Tensor, q: Tensor) -> Tensor:
    """Of `OneKeyTwice`: given a rejection of x, the number is uniform over [a(x), 1), a = min(1, p/q).

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
    """Of `HidesUnlikelyDraws`: shown drafts are judged rightly; where one was hidden the token is drawn from p."""
    shown = q * (q >= SHOWN_FROM)
    kept = torch.minimum(p, q) * (q >= SHOWN_FROM)
    rejected = shown.sum(dim=-1, keepdim=True) - kept.sum(dim=-1, keepdim=True)
    hidden = 1.0 - shown.sum(dim=-1, keepdim=True)
    return kept + rejected * L.residual(p, q) + hidden * p
