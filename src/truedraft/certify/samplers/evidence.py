"""Evidence that a sampler's tokens do not have the target's distribution: e-values, valid at any stopping time.

Under a lossless sampler the cells of a world are independent draws from its joint distribution p. For any other
distribution r, fixed beforehand or averaged over beforehand, the product over rows of r(cell) / p(cell) is a martingale
that starts at 1, and so is a mean of such products: it ever reaches 1 / a with probability at most a (Ville's
inequality), however many worlds, rows and looks there are. The mean has three kinds of r:

- every known fault (`suspects`), pure and mixed with p, over all worlds together: few rows are enough for these;
- any distribution at all, world by world: r is averaged over Dirichlet priors around p (`counts`);
- rows that are not independent: pairs of first tokens, of neighbouring rows of a call and of equal rows of two calls,
  also over Dirichlet priors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from truedraft.certify.counts import FLOOR, log_dirichlet
from truedraft.certify.e_process import CERTAIN, EProcess, log_mean
from truedraft.certify.faults import Fault
from truedraft.certify.samplers.suspects import joint_of
from truedraft.certify.samplers.tally import PAIRS, Tally
from truedraft.certify.samplers.worlds import SamplerWorld

_STRENGTHS = (0.999, 0.5, 0.2, 0.05)
UNKNOWN = "none of the known faults"
DEPENDENT = "rows share their noise"


class Evidence:
    """Evidence from the counts of all worlds; `process` has the e-value by number of rows."""

    def __init__(self, worlds: Sequence[SamplerWorld], suspects: Sequence[Fault]) -> None:
        self.suspects = suspects
        self.tallies = [Tally(world) for world in worlds]
        self._ratios = [_ratios(world, suspects) for world in worlds]
        self.process = EProcess(known=0.45, any=0.45, pairs=0.1)

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.tallies)

    def merge(self, other: Evidence) -> None:
        for mine, its in zip(self.tallies, other.tallies, strict=True):
            mine.merge(its)

    def log_e(self) -> float:
        """The logarithm of the e-value against "the sampler is lossless"."""
        return self.process.mean(self.log_parts())

    def log_parts(self) -> dict[str, float]:
        return {
            "known": log_mean(self._of_suspects()),
            "any": log_mean(torch.tensor(self.log_e_of_worlds(), dtype=torch.float64)),
            "pairs": log_mean(self._of_pairs()),
        }

    def log_e_of_worlds(self) -> list[float]:
        """The logarithm of each world's e-value against its joint distribution, for any alternative."""
        return [log_dirichlet(each.cells, each.world.joint) for each in self.tallies]

    def log_dependence(self) -> Tensor:
        """Log likelihood ratio of pairs as pairs against two independent rows of any distribution, for each of `PAIRS`,
        so that a sampler with wrong single tokens is not called dependent."""
        found = self._of_pairs()
        for number, tally in enumerate(self.tallies):
            for kind, pairs in enumerate(tally.pairs.view(-1, tally.world.vocab, tally.world.vocab)):
                for marginal in (pairs.sum(0), pairs.sum(1)):
                    found[number, kind] -= log_dirichlet(marginal, tally.world.target[0][0])
        return found.sum(0)

    def log_likelihoods(self) -> Tensor:
        """The likelihood ratio of each suspect `[suspects]` against p, at its best mixture share."""
        return self._of_suspects().amax(-1)

    def _of_suspects(self) -> Tensor:
        """`[suspects, strengths]`, over all worlds."""
        terms = [ratios @ each.cells for each, ratios in zip(self.tallies, self._ratios, strict=True)]
        return torch.stack(terms).sum(0)

    def _of_pairs(self) -> Tensor:
        """`[worlds, kinds of pairs]`."""
        found = []
        for tally in self.tallies:
            independent = torch.outer(tally.world.target[0][0], tally.world.target[0][0]).flatten()
            found.append([log_dirichlet(own, independent) for own in tally.pairs])
        return torch.tensor(found, dtype=torch.float64)


def _ratios(world: SamplerWorld, suspects: Sequence[Fault]) -> Tensor:
    """log r/p `[suspects, strengths, cells]` of each suspect, mixed with p."""
    p = world.joint
    r = torch.stack([joint_of(each, world) for each in suspects])[:, None]  # [suspects, 1, cells]
    strength = torch.tensor(_STRENGTHS, dtype=torch.float64)[:, None]
    mixed = strength * r + (1.0 - strength) * p
    # A cell without mass in both is no evidence on this suspect.
    return torch.where(mixed > 0.0, mixed.clamp_min(1e-300).log() - p.clamp_min(FLOOR).log(), 0.0)


# ------------------------------------------------------------------------------------------ diagnosis


def diagnose(evidence: Evidence) -> dict[str, Any]:
    """Name the fault.

    Every known fault has a likelihood in closed form, and so has the free fit (a Dirichlet average in each world, which
    pays for its freedom): the most likely is named. Rows that depend on each other come first, because under them no
    likelihood of single rows means anything.

    Args:
        evidence: from all runs.

    Returns:
        The fault, or `UNKNOWN` if no known one explains the tokens as well as a free fit of each world; its detail; the
        next fault of another name, and the log10 likelihood ratio to it; further observations, one sentence each.
    """
    logs = evidence.log_likelihoods()
    order = logs.argsort(descending=True).tolist()
    best = evidence.suspects[order[0]]
    other = next(number for number in order if evidence.suspects[number].name != best.name)
    lead = float(logs[order[0]] - logs[other]) / math.log(10.0)
    free = sum(evidence.log_e_of_worlds())
    pairs = evidence.log_dependence()
    kind = int(pairs.argmax())
    found = {
        "fault": best.name,
        "detail": best.detail,
        "log10_over_next": lead,
        "next_fault": evidence.suspects[other].name,
        "notes": _notes(evidence),
    }
    if float(pairs[kind]) >= math.log(CERTAIN):
        return found | {"fault": DEPENDENT, "detail": PAIRS[kind], "next_fault": best.name}
    if float(logs[order[0]]) < free:
        return found | {"fault": UNKNOWN, "detail": f"the nearest is {best.name!r} ({best.detail})"}
    return found


def _notes(evidence: Evidence) -> list[str]:
    strays, forbidden = (sum(getattr(each, name) for each in evidence.tallies) for name in ("strays", "forbidden"))
    rows = evidence.rows
    notes = []
    if strays:
        notes.append(
            f"{strays} of {rows} rows go on behind a token that was not drafted: nobody knows the target there"
        )
    if forbidden:
        notes.append(f"{forbidden} tokens in {rows} rows have target probability 0")
    return notes
