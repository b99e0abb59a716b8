"""Closed forms of faulty samplers' output: the joint distribution of a world's cells under each known fault.

A fault changes how much of the draft's mass is kept, what is drawn after a rejection, or the bonus token. p is the
target's distribution, q the draft's, `[texts, vocab]` each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from truedraft.certify import faults
from truedraft.certify.faults import Fault, faults_of_judging
from truedraft.certify.samplers.worlds import SamplerWorld
from truedraft.core import probs as L

_TYPICAL = f"kept where p is above min({faults.EPSILON:g}, {faults.DELTA:g} exp(-H))"


@dataclass(frozen=True, slots=True)
class Level:
    """The distributions for verification at one depth, float64."""

    p: Tensor  # [texts, vocab]: the target's
    q: Tensor  # [texts, vocab]: the draft's
    before: Tensor  # the target's one position earlier, after the text without its last token
    after: Tensor  # [texts, vocab, vocab]: the target's one position later, after each token


Step = Callable[[Level], tuple[Tensor, Tensor]]
"""The mass `[texts, vocab]` of kept drafted tokens, and of tokens drawn after a rejection; together 1."""


def suspects() -> list[Fault]:
    """All faults that can be named; `joint_of` gives their output."""
    position, typical, other = "judged at the wrong position", "typical acceptance", "judged at another temperature"
    bonus = "the bonus token is wrong"
    typically = _judging(lambda p, q: faults.after(faults.typical(p, q), faults.argmax(p)))
    return [
        *faults_of_judging(),
        Fault(position, "by the target one token later", joint=partial(_joint, step=_too_late)),
        Fault(
            position,
            "by the target one token earlier",
            joint=partial(_joint, step=lambda level: faults.judged(level.before, level.q, level.q)),
        ),
        *(Fault(bonus, detail, joint=partial(_joint, bonus=drawn_from)) for detail, drawn_from in _BONUSES),
        Fault("shared noise", "one number judges all drafted tokens of a row", joint=_one_number_for_all),
        Fault(typical, f"{_TYPICAL}, then the argmax", joint=partial(_joint, step=typically, bonus=_BONUSES[2][1])),
        Fault(typical, f"{_TYPICAL}, then a draw from p", lambda p, q: faults.after(faults.typical(p, q), p)),
        Fault("greedy", "the argmax of p is emitted, whatever was drafted", joint=partial(_as_if, faults.argmax)),
        Fault(
            other,
            "all of the target's distributions at temperature 2",
            joint=partial(_as_if, partial(faults.at_temperature, 2.0)),
        ),
        Fault(
            other,
            "all of the target's distributions at 0.5",
            joint=partial(_as_if, partial(faults.at_temperature, 0.5)),
        ),
    ]


def joint_of(fault: Fault, world: SamplerWorld) -> Tensor:
    """The probability of each cell of a world `[cells]`, float64, for a sampler with a fault."""
    if fault.joint is not None:
        return fault.joint(world)
    assert fault.form is not None
    return _joint(world, _judging(fault.form))


def _judging(form: faults.Form) -> Step:
    return lambda level: form(level.p, level.q)


_SOUND = _judging(faults.sound)


def accepted_by_rule(world: SamplerWorld) -> float:
    """Mean number of drafted tokens per row that token-by-token speculative sampling keeps."""
    reach, kept = torch.ones(1, dtype=torch.float64), 0.0
    for p, q in zip(world.target, world.draft, strict=False):
        reach = (reach[:, None] * torch.minimum(p, q)).flatten()
        kept += float(reach.sum())
    return kept


# ----------------------------------------------------------------------------------------------------- joint answers


def _joint(
    world: SamplerWorld, step: Step = _SOUND, bonus: Callable[[SamplerWorld], Tensor] = lambda world: world.target[-1]
) -> Tensor:
    """The cells of a token-by-token rule; `bonus` gives `[texts, vocab]` for texts of k tokens."""
    cells = torch.zeros_like(world.joint)
    reach = torch.ones(1, dtype=torch.float64)  # probability that each text was drafted and kept
    for depth in range(world.drafted):
        kept, recovered = step(_level(world, depth))
        cells += world.continued((reach[:, None] * recovered).flatten())
        reach = (reach[:, None] * kept).flatten()
    return cells + (reach[:, None] * bonus(world)).flatten()


def _level(world: SamplerWorld, depth: int) -> Level:
    p = world.target[depth]
    before = p if depth == 0 else world.target[depth - 1].repeat_interleave(world.vocab, dim=0)
    after = world.target[depth + 1].view(len(p), world.vocab, world.vocab)
    return Level(p, world.draft[depth], before, after)


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


def _too_late(level: Level) -> tuple[Tensor, Tensor]:
    """After a drafted x: kept with min(1, p'(x) / q(x)), p' the target after x; else from norm(max(0, p' - q))."""
    own = level.after.diagonal(dim1=-2, dim2=-1)
    kept = level.q * faults.ratio(own, level.q).clamp_max(1.0)
    left = L.residual(level.after, level.q[:, None].expand_as(level.after))  # [texts, drafted, vocab]
    return kept, ((level.q - kept)[..., None] * left).sum(-2)
