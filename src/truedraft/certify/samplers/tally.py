"""Counts of a sampler's output in one world: cells, pairs, acceptance, deviations by place, and invalid tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.certify.checks import Finding, Part, Status
from truedraft.certify.counts import total_variation, variation_by_chance
from truedraft.certify.samplers.suspects import accepted_by_rule
from truedraft.certify.samplers.worlds import Rows, SamplerWorld
from truedraft.core import probs as L

PAIRS = ("neighbouring rows of a call share their noise", "calls repeat the noise of the call before")


class Tally:
    """Counts of one world.

    Attributes:
        cells: `[cells]`, float64: rows by cell.
        pairs: `[kinds of pairs, vocab**2]`: pairs of first tokens, by their kind in `PAIRS`.
        accepted: number of accepted drafted tokens.
        strays: number of rows that continue after a token that was not drafted.
        forbidden: number of tokens without target probability.
    """

    def __init__(self, world: SamplerWorld) -> None:
        self.world = world
        self.cells = torch.zeros_like(world.joint)
        self.pairs = world.joint.new_zeros(len(PAIRS), world.vocab**2)
        self.accepted = 0
        self.strays = 0
        self.forbidden = 0
        self._recovered = torch.zeros(world.vocab, dtype=torch.float64)  # at the first position
        self._bonus = torch.zeros(2, world.vocab, dtype=torch.float64)  # observed, expected

    @property
    def rows(self) -> int:
        return int(self.cells.sum())

    @property
    def accepted_by_rule(self) -> float:
        """Number of drafted tokens that token-by-token speculative sampling would have accepted in as many rows."""
        return self.rows * accepted_by_rule(self.world)

    def count(self, calls: Sequence[Tensor]) -> None:
        """Count the cells `[batch]` of two calls with equal rows."""
        vocab = self.world.vocab
        self.cells += torch.cat(list(calls)).bincount(minlength=len(self.cells))
        first, second = (each // vocab**self.world.drafted for each in calls)
        adjacent = torch.cat([each[: len(each) // 2 * 2].view(-1, 2) for each in (first, second)])
        for kind, (one, other) in enumerate((adjacent.unbind(1), (first, second))):
            self.pairs[kind] += (one * vocab + other).bincount(minlength=vocab**2)

    def add(self, rows: Rows, emitted: Tensor) -> None:
        """Count acceptance and invalid tokens of a sampler's output `[batch, k + 1]`."""
        world, drafted = self.world, self.world.drafted
        lengths = (emitted >= 0).sum(-1)
        self.accepted += int((lengths - 1).sum())
        last_but = torch.arange(drafted) < (lengths - 1)[:, None]
        self.strays += int(((emitted[:, :-1] != rows.draft_tokens) & last_but).any(-1).sum())
        self._recovered += emitted[lengths == 1, 0].bincount(minlength=world.vocab)
        text = torch.zeros(len(rows), dtype=torch.int64)
        bonus = lengths == drafted + 1
        for depth in range(drafted + 1):
            there = emitted[:, depth] >= 0
            p, token = world.target[depth][text], emitted[:, depth].clamp_min(0)
            self.forbidden += int((p.gather(1, token[:, None])[:, 0] == 0.0)[there].sum())
            if depth == drafted:
                self._bonus[0] += token[bonus].bincount(minlength=world.vocab)
                self._bonus[1] += p[bonus].sum(0)
            text = text * world.vocab + token

    def merge(self, other: Tally) -> None:
        self.cells += other.cells
        self.pairs += other.pairs
        self.accepted += other.accepted
        self.strays += other.strays
        self.forbidden += other.forbidden
        self._recovered += other._recovered
        self._bonus += other._bonus

    def places(self) -> list[Finding]:
        """Distances of tokens from the target by place, with recovered and bonus tokens as in speculative sampling."""
        world = self.world
        found = []
        shape = (world.vocab,) * (world.drafted + 1)
        for place in range(world.drafted + 1):
            others = [axis for axis in range(world.drafted + 1) if axis != place]
            observed, exact = (each.view(shape).sum(others) for each in (self.cells, world.joint))
            found.append(_place(f"token {place + 1}", world, observed, exact))
        recovered = L.residual(world.target[0][0], world.draft[0][0])
        found.append(_place("recovered at the first token", world, self._recovered, recovered))
        expected = self._bonus[1] / self._bonus[1].sum().clamp_min(1.0)
        found.append(_place("bonus", world, self._bonus[0], expected))
        return [each for each in found if each.facts["rows"]]


def worst_places(tallies: Sequence[Tally]) -> list[Finding]:
    """The worst world for each place, by the ratio of its distance to the one by chance."""
    worst: dict[str, Finding] = {}
    for tally in tallies:
        for place in tally.places():
            worst[place.name] = max(worst.get(place.name, place), place, key=_excess)
    return list(worst.values())


def _excess(place: Finding) -> float:
    by_chance, off = place.facts["by_chance"], float(place.facts["total_variation"])
    return off / by_chance if by_chance else math.inf * off if off else 0.0


def _place(name: str, world: SamplerWorld, observed: Tensor, exact: Tensor) -> Finding:
    """The tokens of one place in one world; a lossless sampler's distance is about the one by chance."""
    rows = int(observed.sum())
    facts = {
        "world": world.name,
        "rows": rows,
        "total_variation": total_variation(observed, exact),
        "by_chance": variation_by_chance(rows, exact),
    }
    text = "{rows:,} rows: total variation {total_variation:.4f}, by chance {by_chance:.4f}; its worst world: {world}"
    return Finding(Part.PLACES, name, Status.MEASURED, text.format(**facts), facts)
