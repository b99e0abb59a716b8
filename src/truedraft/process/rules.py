"""Verification rules for steps of any process with a known target distribution.

Each is a pure function of distributions, the drafted outcome and fresh noise. It keeps the draft as often as any exact
rule can (a maximal coupling), and its outcome has the target's distribution p, whatever the draft's q is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from truedraft.core import probs as L

Judged: TypeAlias = tuple[Tensor, Tensor]
"""Whether each draft is kept `[rows]`, bool, and the outcomes, in the shape of the drafted ones."""
Draws: TypeAlias = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""From an attempt's number and rows `[some]` to standard normal `[some, size]` and uniform numbers `[some]`."""


@dataclass(frozen=True, slots=True)
class Gaussian:
    """Normal distributions N(mean, L L^T), one for each row.

    Attributes:
        mean: `[rows, size]`.
        scale: L: standard deviations `[rows, 1]` or `[rows, size]`, which may be 0, or lower triangles
            `[rows, size, size]`, which must be regular.
    """

    mean: Tensor
    scale: Tensor

    def at(self, z: Tensor) -> Tensor:
        return self.mean + (self.scale * z if self.scale.dim() == 2 else (self.scale @ z[..., None])[..., 0])

    def whitened(self, offsets: Tensor) -> Tensor:
        """L^-1 of offsets `[rows, size]`; where a deviation is 0, infinite for a nonzero offset and 0 otherwise."""
        if self.scale.dim() == 2:
            return torch.where(offsets == 0.0, 0.0, offsets / self.scale)
        return torch.linalg.solve_triangular(self.scale, offsets[..., None], upper=False)[..., 0]

    def log_density(self, x: Tensor) -> Tensor:
        """Log density `[rows]` at x `[rows, size]`, up to a constant that depends only on the size."""
        if self.scale.dim() == 2:
            volume = self.scale.expand_as(self.mean).log().sum(-1)
        else:
            volume = self.scale.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -0.5 * self.whitened(x - self.mean).square().sum(-1) - volume

    def rows(self, rows: Tensor) -> Gaussian:
        return Gaussian(self.mean[rows], self.scale[rows])


def accept_probability(p_x: Tensor, q_x: Tensor) -> Tensor:
    """min(1, p / q) of a drafted outcome; 0 where p is 0."""
    return p_x / torch.maximum(p_x, q_x).clamp_min(torch.finfo(p_x.dtype).tiny)


def discrete(p: Tensor, q: Tensor, drafted: Tensor, accept: Tensor, again: Tensor) -> Judged:
    """Keep x ~ q with probability min(1, p / q), else draw from norm(max(0, p - q)); Leviathan et al. 2211.17192.

    x comes out with probability min(p, q) + (1 - overlap) max(0, p - q) / (1 - overlap) = p.

    Args:
        p, q: target and draft distribution `[rows, outcomes]`.
        drafted: outcomes `[rows]`, int64.
        accept, again: uniform numbers `[rows]` for the acceptance and the residual draw.
    """
    at = drafted[:, None]
    kept = accept < accept_probability(p.gather(1, at), q.gather(1, at))[:, 0]
    return kept, torch.where(kept, drafted, L.draw(L.residual(p, q), again))


def reflection(p: Gaussian, q: Gaussian, drafted: Tensor, z: Tensor, accept: Tensor) -> Judged:
    """Couple Gaussians of one covariance L L^T; De Bortoli et al. 2501.05370, section 3 (Bou-Rabee et al. 1805.00452).

    With d = L^-1 (m_q - m_p), x = m_q + L z is kept with probability min(1, phi(z + d) / phi(z)), else the outcome is y
    = m_p + L (z - 2 (e.z) e), e = d / |d|: the noise is mirrored. It is kept with probability 2 Phi(-|d| / 2).

    Proof. Let v = L^-1 (outcome - m_p). A kept x has v = z + d, so density min(phi(v - d), phi(v)) at v. A mirrored one
    has v = R z with R = I - 2 e e^T, R R = I, R d = -d, so density phi(R v) - min(phi(R v), phi(R v + d)) = phi(v) -
    min(phi(v), phi(v - d)), because phi depends only on lengths. The sum is phi(v).

    Where a deviation is 0 and the means differ in it, nothing can be kept, and the noise is not mirrored: m_p + L z.

    Args:
        drafted: x `[rows, size]`.
        z: the noise that x was drafted with `[rows, size]`.
    """
    d = p.whitened(q.mean - p.mean)
    disjoint = torch.isinf(d).any(-1, keepdim=True)
    d = d.masked_fill(disjoint, 0.0)
    square = d.square().sum(-1)
    log_ratio = -(d * z).sum(-1) - 0.5 * square
    kept = (accept.log() < log_ratio) & ~disjoint[:, 0]
    e = d / square.sqrt().clamp_min(torch.finfo(d.dtype).tiny)[:, None]
    mirrored = p.at(z - 2.0 * (e * z).sum(-1, keepdim=True) * e)
    return kept, torch.where(kept[:, None], drafted, mirrored)


def rejection(p: Gaussian, q: Gaussian, drafted: Tensor, accept: Tensor, draws: Draws) -> Judged:
    """Couple Gaussians of any covariances: keep x with min(1, p / q), else draw y ~ p until one is kept with 1 - q / p.

    The second part draws from norm(max(0, p - q)): it needs 1 / TV(p, q) draws on average and is reached with
    probability TV(p, q), so a step needs one on average. The number is unbounded, because any bound would bias it; a
    draw needs no call of the target. If either has no density (a deviation of 0), nothing is kept and the outcome is
    drawn from p.

    Args:
        draws: the noise of each attempt.
    """
    dense = torch.isfinite(p.log_density(p.mean)) & torch.isfinite(q.log_density(q.mean))
    kept = dense & (accept.log() < p.log_density(drafted) - q.log_density(drafted))
    outcomes = drafted.clone()
    if len(flat := torch.nonzero(~dense)[:, 0]):
        outcomes[flat] = p.rows(flat).at(draws(0, flat)[0])
    left = torch.nonzero(~kept & dense)[:, 0]
    attempt = 0
    while len(left):
        z, uniform = draws(attempt, left)
        here = p.rows(left)
        y = here.at(z)
        stays = uniform < residual_keeps(here.log_density(y), q.rows(left).log_density(y))
        outcomes[left[stays]] = y[stays]
        left = left[~stays]
        attempt += 1
    return kept, outcomes


def residual_keeps(log_p: Tensor, log_q: Tensor) -> Tensor:
    """max(0, 1 - q / p): the probability with which a draw from p counts as one from norm(max(0, p - q))."""
    return -torch.expm1((log_q - log_p).clamp_max(0.0))


def gaussian(p: Gaussian, q: Gaussian, drafted: Tensor, z: Tensor, accept: Tensor, draws: Draws) -> Judged:
    """Rows with equal scales by `reflection`, others by `rejection`; what was drafted does not decide."""
    if p.scale.shape == q.scale.shape:
        equal = (p.scale == q.scale).flatten(1).all(-1)
        if equal.all():
            return reflection(p, q, drafted, z, accept)
    else:
        p, q = _triangles(p), _triangles(q)
        equal = (p.scale == q.scale).flatten(1).all(-1)
    kept, outcomes = torch.empty_like(equal), torch.empty_like(drafted)
    same, other = torch.nonzero(equal)[:, 0], torch.nonzero(~equal)[:, 0]
    kept[same], outcomes[same] = reflection(p.rows(same), q.rows(same), drafted[same], z[same], accept[same])
    kept[other], outcomes[other] = rejection(
        p.rows(other), q.rows(other), drafted[other], accept[other], lambda attempt, rows: draws(attempt, other[rows])
    )
    return kept, outcomes


def _triangles(dist: Gaussian) -> Gaussian:
    if dist.scale.dim() == 3:
        return dist
    return Gaussian(dist.mean, torch.diag_embed(dist.scale.expand_as(dist.mean)))
