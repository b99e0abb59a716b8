"""What faulty samplers emit, in closed form: the joint distribution of a world's cells under each known fault.

A fault changes one thing about speculative sampling: how much of the draft's mass is kept, what is drawn after a
rejection, or the bonus token. p is the target's distribution, q the draft's, `[texts, vocab]` each. Which fault a
sampler has is told by which of these distributions its tokens are likeliest under, not by rules about single numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from truedraft.certify.faults import emitted_by_one_key
from truedraft.certify.samplers.worlds import SamplerWorld
from truedraft.core import probs as L

_EPSILON, _DELTA = 0.09, 0.3  # of typical acceptance, as published
_TYPICAL = f"kept where p is above min({_EPSILON:g}, {_DELTA:g} exp(-H))"


@dataclass(frozen=True, slots=True)
class Level:
    """The distributions by which the tokens of one depth are judged.

    Attributes:
        p: `[texts, vocab]`, float64: the target's.
        q: the draft's.
        before: the target's one position earlier, after the text without its last token.
        after: `[texts, vocab, vocab]`: the target's one position later, behind each token.
    """

    p: Tensor
    q: Tensor
    before: Tensor
    after: Tensor


Step = Callable[[Level], tuple[Tensor, Tensor]]
"""The mass `[texts, vocab]` of drafted tokens that are kept, and of tokens drawn after a rejection; together 1."""
Joint = Callable[[SamplerWorld], Tensor]
"""The probability of each cell `[cells]`, float64."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A fault that is known.

    Attributes:
        fault: what is wrong, in a few words; several suspects can be the same fault in other measures.
        detail: how, or how much.
        joint: what a sampler with it emits.
    """

    fault: str
    detail: str
    joint: Joint


def suspects() -> list[Suspect]:
    """All faults that can be named."""
    by_steps: list[tuple[str, str, Joint]] = [
        (fault, detail, partial(_joint, step=step)) for fault, detail, step in _steps()
    ]
    bonuses: list[tuple[str, str, Joint]] = [
        ("the bonus token is wrong", detail, partial(_joint, bonus=bonus)) for detail, bonus in _BONUSES
    ]
    others: list[tuple[str, str, Joint]] = [
        ("shared noise", "one number judges all drafted tokens of a row", _one_number_for_all),
        ("typical acceptance", f"{_TYPICAL}, behind it the argmax", _typical_joint),
        ("typical acceptance", f"{_TYPICAL}, behind it a draw from p", partial(_joint, step=_typical_drawn)),
        ("greedy", "the argmax of p is emitted, whatever was drafted", _greedy),
        ("judged at another temperature", "all of the target's distributions at temperature 2", partial(_flat, 2.0)),
        ("judged at another temperature", "all of the target's distributions at 0.5", partial(_flat, 0.5)),
    ]
    return [Suspect(*each) for each in (*by_steps, *bonuses, *others)]


def emitted_by_rule(world: SamplerWorld) -> Tensor:
    """What speculative sampling without a fault emits: the target's joint distribution."""
    return _joint(world)


def accepted_by_rule(world: SamplerWorld) -> float:
    """How many drafted tokens of a row speculative sampling keeps on average, token by token."""
    reach, kept = torch.ones(1, dtype=torch.float64), 0.0
    for p, q in zip(world.target, world.draft, strict=False):
        reach = (reach[:, None] * torch.minimum(p, q)).flatten()
        kept += float(reach.sum())
    return kept


# ----------------------------------------------------------------------------------------------------- joint answers


def _sound(level: Level) -> tuple[Tensor, Tensor]:
    kept = torch.minimum(level.p, level.q)
    return kept, _rest(kept) * L.residual(level.p, level.q)


def _own_bonus(world: SamplerWorld) -> Tensor:
    return world.target[-1]


def _joint(world: SamplerWorld, step: Step = _sound, bonus: Callable[[SamplerWorld], Tensor] = _own_bonus) -> Tensor:
    """The cells of a rule that judges token by token; `bonus` gives `[texts, vocab]` for texts of k tokens."""
    cells = torch.zeros_like(world.joint)
    reach = torch.ones(1, dtype=torch.float64)  # of each text: that it was drafted, and kept
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
    """Given that a text was kept the number is uniform below the least acceptance so far."""
    cells = torch.zeros_like(world.joint)
    reach = torch.ones(1, dtype=torch.float64)
    least = torch.ones(1, dtype=torch.float64)
    for p, q in zip(world.target, world.draft, strict=False):
        accepts = torch.minimum(_ratio(p, q).clamp_max(1.0), least[:, None])
        kept = q * accepts / least[:, None].clamp_min(1e-300)
        cells += world.continued((reach[:, None] * _rest(kept) * L.residual(p, q)).flatten())
        reach, least = (reach[:, None] * kept).flatten(), accepts.flatten()
    return cells + (reach[:, None] * world.target[-1]).flatten()


def _typical_joint(world: SamplerWorld) -> Tensor:
    return _joint(world, _typical_argmax, lambda world: _argmax(world.target[-1]))


def _greedy(world: SamplerWorld) -> Tensor:
    argmax = tuple(_argmax(p) for p in world.target)
    return SamplerWorld(world.name, argmax, world.draft).joint


def _flat(temperature: float, world: SamplerWorld) -> Tensor:
    return SamplerWorld(world.name, tuple(_at(temperature, p) for p in world.target), world.draft).joint


_BONUSES: tuple[tuple[str, Callable[[SamplerWorld], Tensor]], ...] = (
    ("drawn one position too early", lambda world: world.target[-2].repeat_interleave(world.vocab, dim=0)),
    ("drawn from the draft's last distribution", lambda world: world.draft[-1].repeat_interleave(world.vocab, dim=0)),
    ("the argmax, not a draw", lambda world: _argmax(world.target[-1])),
    ("uniform over the vocabulary", lambda world: torch.full_like(world.target[-1], 1.0 / world.vocab)),
)


# ------------------------------------------------------------------------------------------------------- single steps


def _steps() -> Sequence[tuple[str, str, Step]]:
    """Fault, detail and step of each."""
    shares, temperatures, thresholds = (0.5, 0.8, 0.95), (2.0, 1.25, 0.8, 0.5), (0.1, 0.2, 0.3, 0.5)
    return (
        ("keeps every drafted token", "whatever the target says", _keeps_all),
        *(("accepts too much", f"with min(1, p / {share:g} q)", partial(_lenient, share)) for share in shares),
        *(("accepts too little", f"with {share:g} min(1, p / q)", partial(_strict, share)) for share in shares),
        ("the residual is p", "after a rejection the token is drawn from p", _residual_is_p),
        ("the residual is p", "without the drafted token", _residual_without_drafted),
        ("the residual is wrong", "max(0, q - p)", _residual_reversed),
        ("the residual is wrong", "the argmax of max(0, p - q), not a draw", _residual_argmax),
        ("q is taken as 1", "drafted tokens are kept with p, and norm(max(0, p - q)) is drawn from", _q_is_one),
        ("shared noise", "the number that rejects also draws the recovered token", _one_number),
        *(
            ("judged at another temperature", f"the draft's distribution at {t:g}", partial(_draft_at, t))
            for t in temperatures
        ),
        *(
            (
                "judged at another temperature",
                f"the target's, where drafts are judged, at {t:g}",
                partial(_target_at, t),
            )
            for t in temperatures
        ),
        *(
            ("drafted tokens of low q are dropped", f"below {least:g}, and p is drawn from", partial(_dropping, least))
            for least in thresholds
        ),
        ("emits what p forbids", "drafted tokens without target probability are kept", _keeps_forbidden),
        ("judged at the wrong position", "by the target one token later", _too_late),
        ("judged at the wrong position", "by the target one token earlier", _too_early),
    )


def _rest(kept: Tensor) -> Tensor:
    """The mass that is not kept, `[texts, 1]`."""
    return (1.0 - kept.sum(-1, keepdim=True)).clamp_min(0.0)


def _ratio(p: Tensor, q: Tensor) -> Tensor:
    return p / q.clamp_min(1e-300)


def _argmax(p: Tensor) -> Tensor:
    return functional.one_hot(p.argmax(-1), p.shape[-1]).double()


def _at(temperature: float, p: Tensor) -> Tensor:
    powers = p ** (1.0 / temperature)
    return powers / powers.sum(-1, keepdim=True)


def _judged(p: Tensor, q: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """As if the target had p and the draft q, where drafts are drawn from another distribution."""
    kept = drawn * _ratio(p, q).clamp_max(1.0)
    return kept, _rest(kept) * L.residual(p, q)


def _keeps_all(level: Level) -> tuple[Tensor, Tensor]:
    return level.q, torch.zeros_like(level.q)


def _lenient(share: float, level: Level) -> tuple[Tensor, Tensor]:
    kept = torch.minimum(level.p / share, level.q)
    return kept, _rest(kept) * L.residual(level.p, level.q)


def _strict(share: float, level: Level) -> tuple[Tensor, Tensor]:
    kept = share * torch.minimum(level.p, level.q)
    return kept, _rest(kept) * L.residual(level.p, level.q)


def _residual_is_p(level: Level) -> tuple[Tensor, Tensor]:
    kept = torch.minimum(level.p, level.q)
    return kept, _rest(kept) * level.p


def _residual_without_drafted(level: Level) -> tuple[Tensor, Tensor]:
    """After x was rejected y != x comes with p(y) / (1 - p(x)); what was certain is never rejected."""
    kept = torch.minimum(level.p, level.q)
    weight = (level.q - kept) / (1.0 - level.p).clamp_min(1e-300)
    return kept, level.p * (weight.sum(-1, keepdim=True) - weight)


def _residual_reversed(level: Level) -> tuple[Tensor, Tensor]:
    kept = torch.minimum(level.p, level.q)
    return kept, _rest(kept) * L.residual(level.q, level.p)


def _residual_argmax(level: Level) -> tuple[Tensor, Tensor]:
    kept = torch.minimum(level.p, level.q)
    return kept, _rest(kept) * _argmax(level.p - level.q)


def _q_is_one(level: Level) -> tuple[Tensor, Tensor]:
    kept = level.p * level.q
    return kept, _rest(kept) * L.residual(level.p, level.q)


def _one_number(level: Level) -> tuple[Tensor, Tensor]:
    kept = torch.minimum(level.p, level.q)
    return kept, (emitted_by_one_key(level.p, level.q) - kept).clamp_min(0.0)


def _draft_at(temperature: float, level: Level) -> tuple[Tensor, Tensor]:
    return _judged(level.p, _at(temperature, level.q), level.q)


def _target_at(temperature: float, level: Level) -> tuple[Tensor, Tensor]:
    return _judged(_at(temperature, level.p), level.q, level.q)


def _dropping(least: float, level: Level) -> tuple[Tensor, Tensor]:
    shown = level.q * (level.q >= least)
    kept = torch.minimum(level.p, shown)
    rejected = shown.sum(-1, keepdim=True) - kept.sum(-1, keepdim=True)
    return kept, rejected * L.residual(level.p, level.q) + _rest(shown) * level.p


def _keeps_forbidden(level: Level) -> tuple[Tensor, Tensor]:
    kept = torch.minimum(level.p, level.q) + level.q * (level.p == 0.0)
    return kept, _rest(kept) * L.residual(level.p, level.q)


def _typical_kept(level: Level) -> Tensor:
    entropy = torch.special.entr(level.p).sum(-1, keepdim=True)
    return level.q * (level.p > (_DELTA * (-entropy).exp()).clamp_max(_EPSILON))


def _typical_drawn(level: Level) -> tuple[Tensor, Tensor]:
    kept = _typical_kept(level)
    return kept, _rest(kept) * level.p


def _typical_argmax(level: Level) -> tuple[Tensor, Tensor]:
    kept = _typical_kept(level)
    return kept, _rest(kept) * _argmax(level.p)


def _too_late(level: Level) -> tuple[Tensor, Tensor]:
    """Behind a drafted x: kept with min(1, p'(x) / q(x)), p' the target after x; else from norm(max(0, p' - q))."""
    own = level.after.diagonal(dim1=-2, dim2=-1)
    kept = level.q * _ratio(own, level.q).clamp_max(1.0)
    left = L.residual(level.after, level.q[:, None].expand_as(level.after))  # [texts, drafted, vocab]
    return kept, ((level.q - kept)[..., None] * left).sum(-2)


def _too_early(level: Level) -> tuple[Tensor, Tensor]:
    return _judged(level.before, level.q, level.q)
