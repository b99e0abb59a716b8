"""The nucleus by candidates against the sorted definition, bit for bit, and against a slow one in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.pairwise import named, pairwise
from truedraft.core import probs as N
from truedraft.core.params import SamplingParams
from truedraft.core.probs import probs_from_logits

TOP_P = (1e-6, 0.3, 0.9, 0.99, 0.9999, 1 - 1e-7, 1 - 1e-16)
quick = settings(max_examples=200, deadline=None, derandomize=True)


def slow_nucleus(dist: list[float], top_p: float) -> list[int]:
    """Sort by mass, then by id; take until the mass reaches top_p."""
    kept, mass = [], 0.0
    for token in sorted(range(len(dist)), key=lambda i: (-dist[i], i)):
        kept.append(token)
        mass += dist[token]
        if mass >= top_p:
            break
    return sorted(kept)


def logits(rows: int, vocab: int, scale: float, seed: int, *, rounded: bool = False) -> Tensor:
    values = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return values.bfloat16().float() if rounded else values


@pytest.mark.parametrize(
    ("vocab", "dtype", "rounded"),
    pairwise([1, 2, 5, 33, 1000, 2049, 8192], [torch.float32, torch.float64], named(distinct=False, ties=True)),
)
def test_the_same_bits_as_the_sorted_distribution(vocab: int, dtype: torch.dtype, rounded: bool) -> None:
    """Distributions from flat to nearly one-hot, nuclei from one token to all, with the ties that bfloat16 logits
    bring."""
    for seed, scale in enumerate((0.0, 1e-3, 1.0, 3.0, 5.0, 20.0)):
        dist = torch.softmax(logits(3, vocab, scale, seed, rounded=rounded).to(dtype), dim=-1)
        for top_p in TOP_P:
            found = N.nucleus_by_candidates(dist.clone(), top_p)
            assert torch.equal(found, N.nucleus_by_sorting(dist, top_p)), (scale, top_p)
            assert float((found.sum(dim=-1) - 1).abs().max()) < (1e-6 if dtype is torch.float32 else 1e-12)


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.5, 3.0, 4.5])
def test_a_large_vocabulary_has_the_bits_of_the_sorted_distribution(scale: float) -> None:
    """32,000 tokens, nuclei of tens to most of them: below, within and beyond the candidates of the first look."""
    dist = torch.softmax(logits(2, 32_000, scale, 7, rounded=True), dim=-1)
    found = N.nucleus_by_candidates(dist.clone(), 0.9)
    assert torch.equal(found, N.nucleus_by_sorting(dist, 0.9))
    first_look = dist >= 0.1 / N._USUAL_COUNT
    reached = torch.where(first_look, dist, 0.0).sum(dim=-1, dtype=torch.float64)
    assert bool((reached >= 0.9).all()) == (scale > 2.0)  # so every look has decided some distribution of this test
    assert bool(((found > 0) & ~first_look).any()) == (scale < 2.0)


@quick
@given(
    st.lists(st.sampled_from([0.0, 1e-30, 0.001, 0.25, 0.5, 0.7, 1.0]), min_size=1, max_size=12).filter(any),
    st.sampled_from([0.05, 0.25, 0.5, 0.75, 0.9, 1 - 1e-9]),
)
def test_the_tokens_of_the_slow_definition(weights: list[float], top_p: float) -> None:
    dist = torch.tensor(weights, dtype=torch.float64)
    dist /= dist.sum()
    expected = [token for token in slow_nucleus(dist.tolist(), top_p) if dist[token] > 0]
    for find in (N.nucleus_by_sorting, N.nucleus_by_candidates):
        found = find(dist.clone()[None], top_p)[0]
        assert found.nonzero().flatten().tolist() == expected
        assert torch.allclose(found, torch.where(found > 0, dist, 0.0) / dist[expected].sum(), atol=1e-15)


@pytest.mark.parametrize("vocab", [8, 3000, 40_000])
def test_ties_at_the_crossing_go_to_the_lowest_ids(vocab: int) -> None:
    """One token with half of the mass, last; the others share the rest equally: a nucleus takes the first of them."""
    dist = torch.full((1, vocab), 0.5 / (vocab - 1), dtype=torch.float64)
    dist[0, -1] = 0.5
    for find in (N.nucleus_by_sorting, N.nucleus_by_candidates):
        kept = find(dist.clone(), 0.75)[0] > 0
        count = int(kept.sum()) - 1
        assert bool(kept[-1])
        assert bool(kept[:count].all())
        assert abs(count - (vocab - 1) / 2) <= 1


def test_tokens_without_mass_are_never_kept_and_too_little_mass_keeps_all_the_others() -> None:
    dist = torch.tensor([[0.25, 0.0, 0.5, 0.0, 0.25]])
    for find in (N.nucleus_by_sorting, N.nucleus_by_candidates):
        assert find(dist.clone(), 1 - 1e-16).tolist() == dist.tolist()
        short = find(dist * 0.999, 0.9999)  # the mass of a float32 distribution may stay below top_p by rounding
        assert short.tolist() == [pytest.approx(dist[0].tolist())]


# ------------------------------------------------------------------------------- rows and their neighbours

LAWS = [
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.7, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.3, top_k=50, top_p=0.95),
    SamplingParams(temperature=1.0, min_p=0.02),
    SamplingParams(temperature=0.9, top_k=20),
    SamplingParams(temperature=0.0),
]


@pytest.mark.parametrize("params", LAWS, ids=["top-p", "top-p, min-p", "top-k, top-p", "min-p", "top-k", "greedy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_distribution_alone_and_among_any_others(params: SamplingParams, dtype: torch.dtype) -> None:
    """Peaked and flat rows side by side: what one needs to be decided changes no bit of another."""
    rows = [logits(1, 5000, scale, seed) for seed, scale in enumerate((0.0, 8.0, 0.1, 3.0, 1.0, 5.0))]
    together = torch.cat(rows).to(dtype)
    dist = probs_from_logits(together, params)
    for i in range(len(rows)):
        assert torch.equal(probs_from_logits(together[i : i + 1], params)[0], dist[i])
    backwards = probs_from_logits(together.flip(0), params).flip(0)
    assert torch.equal(backwards, dist)
    assert torch.equal(probs_from_logits(together[2:5], params), dist[2:5])


def test_broken_logits_of_a_large_vocabulary_are_found() -> None:
    """Where softmax and the nucleus run vectorised: one bad logit anywhere makes the row not finite."""
    good = logits(1, 4000, 3.0, 9)
    for place in (0, 17, 2048, 3999):
        for bad in (math.nan, math.inf):
            broken = good.clone()
            broken[0, place] = bad
            both = torch.cat([broken, good])
            for params in LAWS:
                dist = probs_from_logits(both, params)
                assert dist.sum(dim=-1).isfinite().tolist() == [False, True]
                assert torch.equal(dist[1:], probs_from_logits(good, params))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_keeps_the_same_tokens() -> None:
    dist = torch.softmax(logits(4, 32_000, 3.0, 11, rounded=True).double(), dim=-1)
    found = N.keep_nucleus(dist.cuda(), 0.9).cpu()
    assert torch.allclose(found, N.nucleus_by_candidates(dist.clone(), 0.9), atol=1e-15)
