"""Worlds for rejection samplers: small tables of a target and a draft, rows drawn from them, and the exact answer.

A world drafts k tokens of a vocabulary V, each from its own distribution after the tokens before it. For any lossless
sampler, its tokens, continued to k + 1 by the target's own draws, have the target's joint distribution.

A text of d tokens is numbered in base V, the first token first; a *cell* is the number of a text of k + 1 tokens.

Of faulty samplers the joint distribution of the cells has a closed form, too: a fault changes how much of the draft's
mass is kept, what is drawn after a rejection, or the bonus token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from truedraft.certify import faults
from truedraft.certify.faults import Fault, faults_of_judging
from truedraft.certify.worlds import Table
from truedraft.core import probs as L

_NEAR = 0.02
_PEAK = 6.0


@dataclass(frozen=True, slots=True)
class Rows:
    """Input of a sampler."""

    draft_tokens: Tensor  # [batch, k], int64
    draft_probs: Tensor  # [batch, k, vocab], float32: what each was drawn from; one-hot if it was not drawn
    target_probs: Tensor  # [batch, k + 1, vocab], float32: before each drafted token and after the last

    def __len__(self) -> int:
        return len(self.draft_tokens)


@dataclass(frozen=True)
class SamplerWorld:
    """A target and a draft over all texts of up to k tokens, float64; the name is for reports."""

    name: str
    target: tuple[Tensor, ...]  # [vocab**d, vocab] for d = 0 to k: after each text of d tokens
    draft: tuple[Tensor, ...]  # [vocab**d, vocab] for d = 0 to k - 1

    @property
    def vocab(self) -> int:
        return self.target[0].shape[1]

    @property
    def drafted(self) -> int:
        return len(self.draft)

    @cached_property
    def joint(self) -> Tensor:
        """The probability of each cell, `[vocab**(k + 1)]`, float64."""
        return self.continued(self.target[0].flatten())

    def continued(self, mass: Tensor) -> Tensor:
        """Mass `[vocab**d]` on texts of d tokens, spread over cells by the target's draws after them."""
        for after in self.target:
            if len(after) == len(mass):
                mass = (mass[:, None] * after).flatten()
        return mass

    def rows(self, batch: int, generator: torch.Generator) -> Rows:
        text = torch.zeros(batch, dtype=torch.int64)
        tokens, drafts, targets = [], [], [self.target[0][text]]
        for depth in range(self.drafted):
            drafts.append(self.draft[depth][text])
            tokens.append(drawn(drafts[-1], generator))
            text = text * self.vocab + tokens[-1]
            targets.append(self.target[depth + 1][text])
        return Rows(torch.stack(tokens, 1), torch.stack(drafts, 1).float(), torch.stack(targets, 1).float())

    def cells(self, emitted: Tensor, generator: torch.Generator) -> Tensor:
        """The cells `[batch]` of emitted tokens `[batch, k + 1]`, where -1 is continued by draws of the target."""
        text = torch.zeros(len(emitted), dtype=torch.int64)
        for depth in range(self.drafted + 1):
            own = drawn(self.target[depth][text], generator)
            text = text * self.vocab + torch.where(emitted[:, depth] < 0, own, emitted[:, depth])
        return text


def drawn(probs: Tensor, generator: torch.Generator) -> Tensor:
    """A token `[rows]` from each distribution `[rows, vocab]`, float64; never one without mass."""
    return L.draw(probs, torch.rand(len(probs), dtype=torch.float64, generator=generator))


Probs = Callable[[tuple[int, ...]], Tensor]  # the distribution `[vocab]`, float64, after a text


def sampler_worlds() -> list[SamplerWorld]:
    """Worlds of two to five tokens, one to three drafted: zeros, peaks, ties, and candidates that were not drawn."""
    near, other = _table("near p", 4, "dense"), _table("near q", 4, "dense")
    return [
        *(
            _world(vocab, k, f"{p} target, {q} draft", _table(f"p{k}", vocab, p), _table(f"q{k}", vocab, q))
            for vocab, k, p, q in _STYLED
        ),
        _world(4, 2, "target nearly the draft", near, lambda text: (1.0 - _NEAR) * near(text) + _NEAR * other(text)),
        _world(3, 2, "target equals the draft", *(_table("equal", 3, "dense"),) * 2),
        _world(3, 2, "ties", _table("ties p", 3, "dense", 2), _table("ties q", 3, "dense", 2)),
        _world(5, 1, "peaked target, flat draft", _peaked("peaked", 5), _table("flat q", 5, "dense", 2)),
        _world(4, 2, "flat target, peaked draft", _table("flat p", 4, "dense", 2), _peaked("peaked q", 4)),
        _world(5, 1, "target cut as by top-p", _cut(_table("cut", 5, "dense"), 3), _table("cut q", 5, "dense")),
        _world(
            3, 3, "target and draft cut", _cut(_table("both p", 3, "dense"), 2), _cut(_table("both q", 3, "dense"), 2)
        ),
        _world(4, 2, "likeliest candidate", *_candidate(4, 0)),
        _world(3, 3, "unlikely candidate", *_candidate(3, 1)),
    ]


_STYLED = (
    (2, 3, "dense", "dense"),
    (3, 2, "dense", "dense"),
    (5, 1, "dense", "dense"),
    (3, 2, "varied", "varied"),
    (4, 2, "dense", "sparse"),
    (4, 1, "sparse", "dense"),
    (2, 2, "one-hot", "dense"),
)


def _world(vocab: int, drafted: int, words: str, target: Probs, draft: Probs) -> SamplerWorld:
    def table(probs: Probs, depth: int) -> Tensor:
        return torch.stack([probs(text) for text in itertools.product(range(vocab), repeat=depth)])

    tokens = "token" if drafted == 1 else "tokens"
    return SamplerWorld(
        f"{words}; {vocab} ids, {drafted} {tokens} drafted",
        tuple(table(target, depth) for depth in range(drafted + 1)),
        tuple(table(draft, depth) for depth in range(drafted)),
    )


def _table(name: str, vocab: int, style: str, largest: int = 9) -> Probs:
    return Table(f"sampler {name}", vocab, style, largest).probs


def _weighed(table: Probs, weights: Callable[[Tensor], Tensor]) -> Probs:
    def probs(text: tuple[int, ...]) -> Tensor:
        own = weights(table(text))
        return own / own.sum()

    return probs


def _peaked(name: str, vocab: int) -> Probs:
    return _weighed(_table(name, vocab, "dense"), lambda p: p**_PEAK + 1e-3)


def _cut(table: Probs, kept: int) -> Probs:
    return _weighed(table, lambda p: torch.zeros_like(p).scatter(0, p.topk(kept).indices, 1.0) * p)


def _candidate(vocab: int, rank: int) -> tuple[Probs, Probs]:
    """A target, and a draft that always proposes the token of a rank under another table."""
    ranked = _table(f"candidate {rank}", vocab, "dense")
    draft = _weighed(ranked, lambda p: torch.eye(vocab).to(p)[p.argsort(descending=True, stable=True)[rank]])
    return _table(f"candidate p {rank}", vocab, "dense"), draft


_TYPICAL = f"kept where p is above min({faults.EPSILON:g}, {faults.DELTA:g} exp(-H))"


Step = Callable[[SamplerWorld, int], faults.Masses]
"""Verification at a depth of a world: the masses are `[texts, vocab]`, float64."""


def suspects() -> list[Fault]:
    """All faults that can be named; `joint_of` gives their output."""
    position, typical, other = "judged at the wrong position", "typical acceptance", "judged at another temperature"
    bonus = "the bonus token is wrong"
    typically = _judging(lambda p, q: faults.after(faults.typical(p, q), faults.argmax(p)))
    return [
        *faults_of_judging(),
        Fault(position, "by the target one token later", joint=partial(_joint, step=_too_late)),
        Fault(position, "by the target one token earlier", joint=partial(_joint, step=_too_early)),
        *(Fault(bonus, detail, joint=partial(_joint, bonus=drawn_from)) for detail, drawn_from in _BONUSES),
        Fault("shared noise", "one number judges all drafted tokens of a row", joint=_one_number_for_all),
        Fault(typical, f"{_TYPICAL}, then the argmax", joint=partial(_joint, step=typically, bonus=_BONUSES[2][1])),
        Fault(typical, f"{_TYPICAL}, then a draw from p", lambda p, q: faults.after(faults.typical(p, q), p)),
        Fault("greedy", "the argmax of p is emitted, whatever was drafted", joint=partial(_as_if, faults.argmax)),
        *(
            Fault(
                other,
                f"all of the target's distributions at {at}",
                joint=partial(_as_if, partial(faults.at_temperature, t)),
            )
            for at, t in (("temperature 2", 2.0), ("0.5", 0.5))
        ),
    ]


def joint_of(fault: Fault, world: SamplerWorld) -> Tensor:
    """The probability of each cell of a world `[cells]`, float64, for a sampler with a fault."""
    if fault.joint is not None:
        return fault.joint(world)
    assert fault.form is not None
    return _joint(world, _judging(fault.form))


def _judging(form: faults.Form) -> Step:
    return lambda world, depth: form(world.target[depth], world.draft[depth])


_SOUND = _judging(faults.sound)


def accepted_by_rule(world: SamplerWorld) -> float:
    """Mean number of drafted tokens per row that token-by-token speculative sampling keeps."""
    reach, kept = torch.ones(1, dtype=torch.float64), 0.0
    for p, q in zip(world.target, world.draft, strict=False):
        reach = (reach[:, None] * torch.minimum(p, q)).flatten()
        kept += float(reach.sum())
    return kept


def _joint(
    world: SamplerWorld, step: Step = _SOUND, bonus: Callable[[SamplerWorld], Tensor] = lambda world: world.target[-1]
) -> Tensor:
    """The cells of a token-by-token rule; `bonus` gives `[texts, vocab]` for texts of k tokens."""
    cells = torch.zeros_like(world.joint)
    reach = torch.ones(1, dtype=torch.float64)  # probability that each text was drafted and kept
    for depth in range(world.drafted):
        kept, recovered = step(world, depth)
        cells += world.continued((reach[:, None] * recovered).flatten())
        reach = (reach[:, None] * kept).flatten()
    return cells + (reach[:, None] * bonus(world)).flatten()


def _one_number_for_all(world: SamplerWorld) -> Tensor:
    """Given that a text was kept, the number is uniform below the least acceptance so far."""
    cells = torch.zeros_like(world.joint)
    reach = torch.ones(1, dtype=torch.float64)
    least = torch.ones(1, dtype=torch.float64)
    for p, q in zip(world.target, world.draft, strict=False):
        accepts = torch.minimum(faults.ratio(p, q).clamp_max(1.0), least[:, None])
        kept = q * accepts / least[:, None].clamp_min(1e-300)
        cells += world.continued((reach[:, None] * faults.rest(kept) * L.residual(p, q)).flatten())
        reach, least = (reach[:, None] * kept).flatten(), accepts.flatten()
    return cells + (reach[:, None] * world.target[-1]).flatten()


def _as_if(changed: Callable[[Tensor], Tensor], world: SamplerWorld) -> Tensor:
    return SamplerWorld(world.name, tuple(map(changed, world.target)), world.draft).joint


_BONUSES: tuple[tuple[str, Callable[[SamplerWorld], Tensor]], ...] = (
    ("drawn one position too early", lambda world: world.target[-2].repeat_interleave(world.vocab, dim=0)),
    ("drawn from the draft's last distribution", lambda world: world.draft[-1].repeat_interleave(world.vocab, dim=0)),
    ("the argmax, not a draw", lambda world: faults.argmax(world.target[-1])),
    ("uniform over the vocabulary", lambda world: torch.full_like(world.target[-1], 1.0 / world.vocab)),
)


def _too_early(world: SamplerWorld, depth: int) -> faults.Masses:
    before = world.target[depth - 1].repeat_interleave(world.vocab, dim=0) if depth else world.target[0]
    return faults.judged(before, world.draft[depth], world.draft[depth])


def _too_late(world: SamplerWorld, depth: int) -> faults.Masses:
    """After a drafted x: kept with min(1, p'(x) / q(x)), p' the target after x; else from norm(max(0, p' - q))."""
    q = world.draft[depth]
    later = world.target[depth + 1].view(len(q), world.vocab, world.vocab)  # [texts, drafted, vocab]
    kept = q * faults.ratio(later.diagonal(dim1=-2, dim2=-1), q).clamp_max(1.0)
    left = L.residual(later, q[:, None].expand_as(later))
    return kept, ((q - kept)[..., None] * left).sum(-2)
