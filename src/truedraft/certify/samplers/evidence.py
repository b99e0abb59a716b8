"""Evidence that a sampler's tokens do not have the target's distribution: e-values that may be looked at at any time.

Under a lossless sampler the cells of a world are independent draws from its joint distribution p. For any other
distribution r, fixed beforehand or averaged over beforehand, the product over rows of r(cell) / p(cell) is a martingale
that starts at 1, and so is a mean of such products: it ever reaches 1 / a with probability a at most (Ville's
inequality), however many worlds, rows and looks there are. Three kinds of r are taken, a share of the mean for each:

- every known fault (`suspects`), as it is and mixed with p, over all worlds together: few rows are enough for these;
- any distribution at all, world by world: r is averaged over Dirichlet priors around p, which gives the product in
  closed form from the counts of the cells;
- rows that are not independent: pairs of first tokens, of neighbouring rows of a call and of equal rows of two calls,
  again over Dirichlet priors.

Where p is 0 the product is taken with `FLOOR` in its place, which only makes it smaller for a lossless sampler: one
token that came from a number that was rounded to 0 condemns nobody, a few do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.certify.e_process import EProcess, log_mean
from truedraft.certify.faults import Fault
from truedraft.certify.samplers.suspects import joint_of
from truedraft.certify.samplers.worlds import SamplerWorld

FLOOR = 2.0**-22
"""What a cell without target probability is taken to have, at least: of the size of a rounding of float32."""
_CONCENTRATIONS = (4.0, 32.0, 256.0, 2048.0, 16384.0)
_ELSEWHERE = 0.05  # the share of a prior that is uniform over cells, those without target probability included
_STRENGTHS = (0.999, 0.5, 0.2, 0.05)
PAIRS = ("neighbouring rows of a call share their noise", "calls repeat the noise of the call before")


@dataclass(slots=True)
class Counts:
    """What was seen of one world.

    Attributes:
        cells: `[cells]`, float64: rows by cell.
        pairs: `[kinds of pairs, vocab**2]`: pairs of first tokens, by their kind in `PAIRS`.
    """

    cells: Tensor
    pairs: Tensor

    @property
    def rows(self) -> int:
        """How many rows were seen."""
        return int(self.cells.sum())


class Evidence:
    """Counts of all worlds, and what they say.

    Args:
        worlds: that are tested.
        suspects: the faults that are known.

    Attributes:
        suspects: these.
        counts: of each world.
        process: the e-value when so many rows were seen.
    """

    def __init__(self, worlds: Sequence[SamplerWorld], suspects: Sequence[Fault]) -> None:
        self._worlds = worlds
        self.suspects = suspects
        self.counts = [
            Counts(torch.zeros_like(world.joint), world.joint.new_zeros(len(PAIRS), world.vocab**2)) for world in worlds
        ]
        self._ratios = [_ratios(world, suspects) for world in worlds]
        self.process = EProcess(known=0.45, any=0.45, pairs=0.1)

    @property
    def rows(self) -> int:
        """How many rows were seen in all worlds."""
        return sum(each.rows for each in self.counts)

    def add(self, world: int, cells: Sequence[Tensor]) -> None:
        """Go on with two calls of equal rows of a world, by its number: their cells `[batch]` each."""
        counts, own = self.counts[world], self._worlds[world]
        counts.cells += torch.cat(list(cells)).bincount(minlength=len(counts.cells))
        first, second = (each // own.vocab**own.drafted for each in cells)
        beside = torch.cat([each[: len(each) // 2 * 2].view(-1, 2) for each in (first, second)])
        for kind, (one, other) in enumerate((beside.unbind(1), (first, second))):
            counts.pairs[kind] += (one * own.vocab + other).bincount(minlength=own.vocab**2)

    def merge(self, other: Evidence) -> None:
        """Add the rows of another run over the same worlds."""
        for mine, its in zip(self.counts, other.counts, strict=True):
            mine.cells += its.cells
            mine.pairs += its.pairs

    def log_e(self) -> float:
        """The logarithm of the e-value against "the sampler is lossless"."""
        return self.process.mean(self.log_parts())

    def log_parts(self) -> dict[str, float]:
        """The logarithm of each kind of r's e-value."""
        return {
            "known": log_mean(self._of_suspects()),
            "any": log_mean(torch.tensor(self.log_e_of_worlds(), dtype=torch.float64)),
            "pairs": log_mean(self._of_pairs()),
        }

    def log_e_of_worlds(self) -> list[float]:
        """The logarithm of each world's e-value against its joint distribution, whatever else it follows."""
        return [log_dirichlet(each.cells, world.joint) for each, world in zip(self.counts, self._worlds, strict=True)]

    def log_dependence(self) -> Tensor:
        """How much likelier pairs are as pairs than as two rows of any distribution, the logarithm, for each of
        `PAIRS`: a sampler whose single tokens are wrong already is not called dependent for that."""
        found = self._of_pairs()
        for world, (counts, own) in enumerate(zip(self.counts, self._worlds, strict=True)):
            for kind, pairs in enumerate(counts.pairs.view(-1, own.vocab, own.vocab)):
                for alone in (pairs.sum(0), pairs.sum(1)):
                    found[world, kind] -= log_dirichlet(alone, own.target[0][0])
        return found.sum(0)

    def log_likelihoods(self) -> Tensor:
        """Of each suspect `[suspects]`: the likelihood ratio against p in the share of rows that suits it best."""
        return self._of_suspects().amax(-1)

    def _of_suspects(self) -> Tensor:
        """`[suspects, strengths]`, over all worlds."""
        terms = [ratios @ each.cells for each, ratios in zip(self.counts, self._ratios, strict=True)]
        return torch.stack(terms).sum(0)

    def _of_pairs(self) -> Tensor:
        """`[worlds, kinds of pairs]`."""
        found = []
        for counts, world in zip(self.counts, self._worlds, strict=True):
            alone = torch.outer(world.target[0][0], world.target[0][0]).flatten()
            found.append([log_dirichlet(own, alone) for own in counts.pairs])
        return torch.tensor(found, dtype=torch.float64)


def log_dirichlet(counts: Tensor, probs: Tensor) -> float:
    """The logarithm of the averaged likelihood ratio of counts against a distribution.

    The prior is a mean of Dirichlet distributions with parameters c b, b nearly `probs`, for several c. With n rows,
    n_i of them in cell i, one c gives

        Gamma(c) / Gamma(c + n) times the product over i of Gamma(c b_i + n_i) / (Gamma(c b_i) p_i^n_i).

    Args:
        counts: `[cells]`, float64.
        probs: `[cells]`, float64.
    """
    return float(log_dirichlets(counts[None], probs)[0])


def log_dirichlets(counts: Tensor, probs: Tensor) -> Tensor:
    """The same for several counts `[samples, cells]`: `[samples]`."""
    base = (1.0 - _ELSEWHERE) * probs + _ELSEWHERE / len(probs)
    rows = counts.sum(-1)
    against = counts @ probs.clamp_min(FLOOR).log()
    logs = []
    for c in _CONCENTRATIONS:
        prior = c * base
        inside = (torch.lgamma(prior + counts) - torch.lgamma(prior)).sum(-1)
        logs.append(math.lgamma(c) - torch.lgamma(rows + c) + inside - against)
    return torch.logsumexp(torch.stack(logs), 0) - math.log(len(logs))


def _ratios(world: SamplerWorld, suspects: Sequence[Fault]) -> Tensor:
    """log r/p `[suspects, strengths, cells]` of each suspect, mixed with p."""
    p = world.joint
    r = torch.stack([joint_of(each, world) for each in suspects])[:, None]  # [suspects, 1, cells]
    strength = torch.tensor(_STRENGTHS, dtype=torch.float64)[:, None]
    mixed = strength * r + (1.0 - strength) * p
    # A cell that neither has is as unlikely under both: it says nothing of this suspect.
    return torch.where(mixed > 0.0, mixed.clamp_min(1e-300).log() - p.clamp_min(FLOOR).log(), 0.0)
