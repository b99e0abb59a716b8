"""The law of what each rule gives, by integration over its noise: the rules themselves are asked, at every cell."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from truedraft.process import Gaussian, rules
from truedraft.process.rules import Judged

Rule = Callable[[Gaussian, Gaussian, Tensor, Tensor, Tensor], Judged]


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------------------------------ discrete


def discrete_law(rule: Callable[..., Judged], p: Tensor, q: Tensor) -> Tensor:
    """The distribution of the outcome, the rule being asked once in every cell of its two uniform numbers."""
    left = np.maximum(p.numpy() - q.numpy(), 0.0)
    cuts = np.cumsum(left) / left.sum() if left.sum() else np.array([1.0])
    cuts = np.minimum(np.unique(np.concatenate([cuts, np.cumsum(p.numpy()), [1.0]])), 1.0)
    law = torch.zeros_like(p)
    for x in range(len(p)):
        stays = min(1.0, float(p[x] / q[x])) if q[x] else 1.0
        for accept, again in itertools.product([(0.0, stays), (stays, 1.0)], itertools.pairwise([0.0, *cuts])):
            size = (accept[1] - accept[0]) * (again[1] - again[0])
            if size > 1e-14:
                middles = [torch.tensor([sum(cell) / 2], dtype=torch.float64) for cell in (accept, again)]
                _, outcome = rule(p[None], q[None], torch.tensor([x]), *middles)
                law[outcome] += q[x] * size
    return law


def distributions(seed: int, size: int) -> tuple[Tensor, Tensor]:
    weights = torch.rand(2, size, generator=random(seed), dtype=torch.float64)
    weights[torch.rand(2, size, generator=random(seed + 99)) < 0.25] = 0.0
    weights[:, 0] += 1e-3
    p, q = weights / weights.sum(-1, keepdim=True)
    return p, q


@pytest.mark.parametrize("seed", range(8))
def test_discrete_outcomes_follow_the_target_exactly(seed: int) -> None:
    p, q = distributions(seed, 2 + seed % 4)
    assert torch.allclose(discrete_law(rules.discrete, p, q), p, rtol=0, atol=1e-12)
    assert torch.allclose(discrete_law(rules.discrete, p, p), p, rtol=0, atol=1e-12)


def test_a_discrete_rule_that_draws_again_from_the_target_is_seen() -> None:
    def again_from_p(p: Tensor, q: Tensor, drafted: Tensor, accept: Tensor, again: Tensor) -> Judged:
        kept, _ = rules.discrete(p, q, drafted, accept, again)
        return kept, torch.where(kept, drafted, torch.searchsorted(p.cumsum(-1), again[:, None])[:, 0])

    p, q = distributions(3, 4)
    assert (discrete_law(again_from_p, p, q) - p).abs().max() > 1e-3


# ------------------------------------------------------------------------------------------ Gaussians of one covariance


def panels(edges: list[float], points: int = 40) -> tuple[Tensor, Tensor]:
    """Nodes and weights of Gauss and Legendre, between each two edges."""
    nodes, weights = np.polynomial.legendre.leggauss(points)
    at = [(a + b) / 2 + (b - a) / 2 * nodes for a, b in itertools.pairwise(edges)]
    each = [(b - a) / 2 * weights for a, b in itertools.pairwise(edges)]
    return torch.from_numpy(np.concatenate(at)), torch.from_numpy(np.concatenate(each))


def stays_until(rule: Rule, p: Gaussian, q: Gaussian, z: Tensor) -> Tensor:
    """The share of `accept` below which a draft stays, found by asking: bisection for each row."""
    low, high = torch.zeros(len(z), dtype=torch.float64), torch.ones(len(z), dtype=torch.float64)
    for _ in range(60):
        middle = (low + high) / 2
        kept, _ = rule(p, q, q.at(z), z, middle)
        low, high = torch.where(kept, middle, low), torch.where(kept, high, middle)
    return low


def spread(gaussian: Gaussian, rows: int) -> Gaussian:
    return Gaussian(gaussian.mean.expand(rows, -1), gaussian.scale.expand(rows, *gaussian.scale.shape[1:]))


def expectation_error(rule: Rule, p: Gaussian, q: Gaussian) -> float:
    """How far E f(outcome) is from E f under p, over plane waves f, by quadrature over the noise z, at the most.

    The integrand has a fold where phi(z + d) = phi(z): the plane e.z = -|d| / 2, where panels meet.
    """
    size = p.mean.shape[-1]
    factor = (p.scale if p.scale.dim() == 3 else torch.diag_embed(p.scale.expand_as(p.mean)))[0]
    d = torch.linalg.solve(factor, (q.mean - p.mean)[0])
    fold = float(-d.norm() / 2)
    along, weights = panels(sorted([-9.0, -4.0, 0.0, 4.0, 9.0, max(fold, -8.9)]))
    density = torch.exp(-0.5 * along.square()) / math.sqrt(2 * math.pi) * weights
    if size == 1:
        z = along[:, None] * torch.sign(d) if d.norm() else along[:, None]
        mass = density
    else:
        e = d / d.norm() if d.norm() else torch.tensor([1.0, 0.0], dtype=torch.float64)
        across = torch.stack([-e[1], e[0]])
        z = (along[:, None, None] * e + along[None, :, None] * across).reshape(-1, 2)
        mass = (density[:, None] * density[None, :]).flatten()
    wide_p, wide_q = spread(p, len(z)), spread(q, len(z))
    share = stays_until(rule, wide_p, wide_q, z)
    drafted = wide_q.at(z)
    _, rejected = rule(wide_p, wide_q, drafted, z, torch.full_like(share, 1.0 - 1e-16))
    worst = 0.0
    for wave in torch.randn(12, size, generator=random(5), dtype=torch.float64) / factor.diagonal().abs().mean():
        exact = torch.exp(1j * (wave @ p.mean[0]) - 0.5 * (factor.T @ wave).square().sum())
        values = share * torch.exp(1j * (drafted @ wave)) + (1 - share) * torch.exp(1j * (rejected @ wave))
        worst = max(worst, float(((values * mass).sum() - exact).abs()))
    return worst


def pair(size: int, seed: int, kind: str, apart: float = 1.0) -> tuple[Gaussian, Gaussian]:
    generator = random(seed)
    means = torch.randn(2, 1, size, generator=generator, dtype=torch.float64) * apart
    scale = {
        "one": torch.rand(1, 1, generator=generator, dtype=torch.float64) + 0.2,
        "each": torch.rand(1, size, generator=generator, dtype=torch.float64) + 0.2,
        "triangle": torch.randn(1, size, size, generator=generator, dtype=torch.float64).tril() * 0.3
        + torch.eye(size, dtype=torch.float64),
    }[kind]
    return Gaussian(means[0], scale), Gaussian(means[1], scale)


CASES = [(size, kind, apart) for size in (1, 2) for kind in ("one", "each", "triangle") for apart in (0.1, 1.0, 3.0)]


@pytest.mark.parametrize(("size", "kind", "apart"), CASES)
def test_reflected_outcomes_follow_the_target_by_quadrature(size: int, kind: str, apart: float) -> None:
    p, q = pair(size, 7 * size, kind, apart)
    assert expectation_error(rules.reflection, p, q) < 1e-9


def test_equal_means_are_always_kept() -> None:
    p, _ = pair(2, 3, "triangle")
    z = torch.randn(1, 2, generator=random(1), dtype=torch.float64)
    kept, outcome = rules.reflection(p, p, p.at(z), z, torch.tensor([1 - 1e-16], dtype=torch.float64))
    assert kept.all() and torch.equal(outcome, p.at(z))
    assert expectation_error(rules.reflection, p, p) < 1e-9


def wrong_axis(p: Gaussian, q: Gaussian, drafted: Tensor, z: Tensor, accept: Tensor) -> Judged:
    kept, _ = rules.reflection(p, q, drafted, z, accept)
    return kept, torch.where(kept[:, None], drafted, p.at(-z.flip(-1)))


def again_from_target(p: Gaussian, q: Gaussian, drafted: Tensor, z: Tensor, accept: Tensor) -> Judged:
    kept, _ = rules.reflection(p, q, drafted, z, accept)
    return kept, torch.where(kept[:, None], drafted, p.at(z))


@pytest.mark.parametrize("rule", [wrong_axis, again_from_target])
def test_a_broken_coupling_is_seen_by_quadrature(rule: Rule) -> None:
    assert expectation_error(rule, *pair(2, 14, "each")) > 1e-3


@pytest.mark.parametrize("scale", [torch.zeros(1, 1), torch.tensor([[1.0, 0.0]])], ids=["all", "one"])
def test_without_a_deviation_only_equal_means_are_kept(scale: Tensor) -> None:
    scale = scale.double()
    p = Gaussian(torch.tensor([[1.0, 2.0]], dtype=torch.float64), scale)
    q = Gaussian(torch.tensor([[1.0, 2.5]], dtype=torch.float64), scale)
    z = torch.tensor([[0.3, -0.4]], dtype=torch.float64)
    little = torch.tensor([1e-9], dtype=torch.float64)
    kept, outcome = rules.reflection(p, q, q.at(z), z, little)
    assert not kept.any() and torch.equal(outcome, p.at(z))
    kept, outcome = rules.reflection(p, p, p.at(z), z, 1.0 - little)
    assert kept.all() and torch.equal(outcome, p.at(z))


@pytest.mark.parametrize("size", [1, 2, 64])
@pytest.mark.parametrize("kind", ["each", "triangle"])
def test_acceptance_and_outcomes_of_many_draws(size: int, kind: str) -> None:
    rows = 20000
    p, q = pair(size, size, kind, 1.0 / math.sqrt(size))
    wide_p, wide_q = spread(p, rows), spread(q, rows)
    z, accept = drawer(random(11), size)(0, torch.arange(rows))
    kept, outcomes = rules.reflection(wide_p, wide_q, wide_q.at(z), z, accept)
    d = p.whitened(q.mean - p.mean)[0]
    expected = 2 * stats.norm.cdf(-float(d.norm()) / 2)
    assert abs(float(kept.double().mean()) - expected) < 5 * math.sqrt(0.25 / rows)
    v = wide_p.whitened(outcomes - wide_p.mean)
    for direction in (d / d.norm(), torch.ones(size, dtype=torch.float64) / math.sqrt(size)):
        assert stats.kstest((v @ direction).numpy(), "norm").pvalue > 1e-5
    assert stats.kstest(v.square().sum(-1).numpy(), "chi2", args=(size,)).pvalue > 1e-5


# ------------------------------------------------------------------------------------------ unequal covariances


def test_rejection_of_unequal_covariances_follows_the_target_by_quadrature() -> None:
    """In one dimension: what stays has density min(p, q), and what is drawn again p (1 - q / p) over its sum."""
    p = Gaussian(torch.tensor([[0.3]], dtype=torch.float64), torch.tensor([[0.7]], dtype=torch.float64))
    q = Gaussian(torch.tensor([[-0.4]], dtype=torch.float64), torch.tensor([[1.1]], dtype=torch.float64))
    # p = q where a x^2 + b x + c = 0
    a = 0.5 / 1.1**2 - 0.5 / 0.7**2
    b = 0.3 / 0.7**2 + 0.4 / 1.1**2
    c = 0.5 * 0.4**2 / 1.1**2 - 0.5 * 0.3**2 / 0.7**2 - math.log(0.7) + math.log(1.1)
    x, weights = panels(sorted([-12.0, -3.0, 0.3, 3.0, 12.0, *np.roots([a, b, c]).tolist()]))
    z = ((x - q.mean[0, 0]) / q.scale[0, 0])[:, None]
    wide_p, wide_q = spread(p, len(x)), spread(q, len(x))

    def rule(p: Gaussian, q: Gaussian, drafted: Tensor, z: Tensor, accept: Tensor) -> Judged:
        return rules.rejection(p, q, drafted, accept, drawer(random(3), 1))

    density_p, density_q = (
        torch.from_numpy(stats.norm.pdf(x.numpy(), float(each.mean), float(each.scale))) for each in (p, q)
    )
    share = stays_until(rule, wide_p, wide_q, z)
    left = density_p * rules.residual_keeps(wide_p.log_density(x[:, None]), wide_q.log_density(x[:, None]))
    rejected = float((density_q * (1 - share) * weights).sum())
    law = density_q * share + rejected * left / float((left * weights).sum())
    assert torch.allclose(law, density_p, rtol=0, atol=1e-11)


def drawer(generator: torch.Generator, size: int) -> rules.Draws:
    def draw(number: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.randn(len(rows), size, generator=generator, dtype=torch.float64)
        return z, torch.rand(len(rows), generator=generator, dtype=torch.float64)

    return draw


@pytest.mark.parametrize("size", [1, 2, 64])
def test_rejection_of_many_draws(size: int) -> None:
    rows, generator = 20000, random(23)
    p, q = pair(size, size + 5, "each", 0.5 / math.sqrt(size))
    q = Gaussian(q.mean, q.scale * (1.0 + 0.4 / math.sqrt(size)))
    wide_p, wide_q = spread(p, rows), spread(q, rows)
    draws, draw = [], drawer(generator, size)
    z, accept = draw(0, torch.arange(rows))

    def attempt(number: int, left: Tensor) -> tuple[Tensor, Tensor]:
        draws.append(len(left))
        return draw(number, left)

    kept, outcomes = rules.gaussian(wide_p, wide_q, wide_q.at(z), z, accept, attempt)
    assert 0.3 < float(kept.double().mean()) < 0.99
    assert abs(sum(draws) / rows - 1.0) < 0.1, "one draw a step on average"
    v = wide_p.whitened(outcomes - wide_p.mean)
    assert stats.kstest(v[:, 0].numpy(), "norm").pvalue > 1e-5
    assert stats.kstest(v.square().sum(-1).numpy(), "chi2", args=(size,)).pvalue > 1e-5
    # Covariances taken as equal, the outcomes would not be the target's.
    _, wrong = rules.reflection(wide_p, wide_q, wide_q.at(z), z, accept)
    v = wide_p.whitened(wrong - wide_p.mean)
    assert stats.kstest(v.square().sum(-1).numpy(), "chi2", args=(size,)).pvalue < 1e-9


def test_each_row_is_judged_by_its_own_covariances() -> None:
    p, q = pair(2, 9, "each")
    p, q = spread(p, 3), spread(q, 3)
    q = Gaussian(q.mean, q.scale * torch.tensor([[1.0], [1.5], [0.0]]))
    z = torch.randn(3, 2, generator=random(2), dtype=torch.float64)
    accept = torch.full((3,), 0.9, dtype=torch.float64)
    asked, draw = [], drawer(random(4), 2)

    def attempt(number: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        asked.append(rows.tolist())
        return draw(number, rows)

    kept, outcomes = rules.gaussian(p, q, q.at(z), z, accept, attempt)
    first = p.rows(torch.tensor([0])), q.rows(torch.tensor([0]))
    assert torch.equal(outcomes[:1], rules.reflection(*first, q.at(z)[:1], z[:1], accept[:1])[1])
    assert not kept[2] and torch.isfinite(outcomes).all(), "a draft without a density is never kept"
    assert asked[0] == [2] and all(0 not in rows for rows in asked)
