"""Distributions against slow, obvious references and against transformers' own logits processors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from truedraft import Engine
from truedraft.core import probs as L
from truedraft.core.params import SamplingParams
from truedraft.drafters import DraftModel
from truedraft.testing import MarkovModel
from truedraft.verification import BlockVerification, CoupledSampling, LenientSampling, SpeculativeSampling

EXACT = 1e-12
quick = settings(max_examples=150, deadline=None, derandomize=True)


def slow_dist(logits: list[float], params: SamplingParams) -> list[float]:
    """One row, in words: divide, keep the k-th and its ties, keep until top_p is crossed, drop below min_p."""
    if params.temperature == 0:
        return [float(i == logits.index(max(logits))) for i in range(len(logits))]
    scaled = [x / params.temperature for x in logits]
    if params.top_k:
        kth = sorted(scaled, reverse=True)[min(params.top_k, len(scaled)) - 1]
        scaled = [x if x >= kth else -math.inf for x in scaled]
    dist = softmax(scaled)
    if params.top_p < 1:
        mass = 0.0
        kept = set()
        for token in sorted(range(len(dist)), key=lambda i: (-dist[i], i)):
            if mass >= params.top_p:
                break
            kept.add(token)
            mass += dist[token]
        dist = [x if i in kept else 0.0 for i, x in enumerate(dist)]
        dist = [x / sum(dist) for x in dist]
    if params.min_p:
        dist = [x if x >= params.min_p * max(dist) else 0.0 for x in dist]
        dist = [x / sum(dist) for x in dist]
    return dist


def softmax(scores: list[float]) -> list[float]:
    weights = [math.exp(x - max(scores)) for x in scores]
    return [w / math.fsum(weights) for w in weights]


def warped(logits: Tensor, params: SamplingParams) -> Tensor:
    """What transformers makes of the logits, in the order of its own generate."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return torch.softmax(processors(torch.zeros(len(logits), 1, dtype=torch.int64), logits.clone()), dim=-1)


GRID = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature in (0.3, 1.0, 1.7)
    for top_k in (0, 1, 7, 50, 10_000)
    for top_p in (1.0, 0.9, 0.35, 1e-6)
    for min_p in (0.0, 0.05, 1.0)
]


@pytest.mark.parametrize(("dtype", "vocab", "error"), [(torch.float64, 200, EXACT), (torch.float32, 64, 1e-6)])
def test_same_support_and_distribution_as_transformers(dtype: torch.dtype, vocab: int, error: float) -> None:
    """In float32 away from ties and crossings within 1e-4 of a threshold, which these logits do not have."""
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(2), dtype=dtype) * 3
    if dtype is torch.float64:
        logits[1, ::3] = -math.inf
    for params in GRID:
        ours, theirs = L.probs_from_logits(logits, params), warped(logits, params)
        assert ours.dtype == dtype
        assert torch.equal(ours > 0, theirs > 0), params
        assert torch.allclose(ours, theirs, atol=error, rtol=0), params


@quick
@given(
    st.lists(st.floats(-8, 8), min_size=1, max_size=9),
    st.sampled_from([0.0, 0.25, 1.0, 3.0]),
    st.integers(0, 10),
    st.sampled_from([1.0, 0.93, 0.51, 0.07]),
    st.sampled_from([0.0, 0.013, 0.4]),
)
def test_distributions_in_words(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    # Away from crossings that rounding may decide either way.
    base = slow_dist(logits, SamplingParams(temperature=temperature, top_k=top_k))
    reached = [math.fsum(sorted(base, reverse=True)[:n]) for n in range(len(base))]
    near = any(abs(r - top_p) < 1e-9 for r in reached) or any(abs(x - min_p * max(base)) < 1e-9 for x in base if min_p)
    if not near:
        dist = L.probs_from_logits(torch.tensor([logits], dtype=torch.float64), params)[0]
        assert dist.tolist() == pytest.approx(slow_dist(logits, params), abs=EXACT)
        assert float(dist.sum()) == pytest.approx(1.0, abs=EXACT)


def test_the_crossing_token_stays_and_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3]], dtype=torch.float64).log()
    assert (L.probs_from_logits(logits, SamplingParams(temperature=1.0, top_p=0.6)) > 0).tolist() == [
        [True, True, False],
        [False, True, True],
    ]
    assert (L.probs_from_logits(logits, SamplingParams(temperature=1.0, top_p=0.4)) > 0).tolist() == [
        [True, False, False],
        [False, True, False],
    ]
    flat = torch.zeros(1, 4, dtype=torch.float64)  # 0.25 each: 0.25 and 0.5 are exact, so the second token reaches 0.5
    assert L.probs_from_logits(flat, SamplingParams(temperature=1.0, top_p=0.5)).tolist() == [[0.5, 0.5, 0.0, 0.0]]
    assert L.probs_from_logits(flat, SamplingParams(temperature=1.0, top_p=0.51))[0, 3] == 0


def test_top_p_looks_at_what_top_k_left_and_min_p_at_what_top_p_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    # After top-k 2 the distribution is (4/7, 3/7): 0.55 is reached by the first token alone, unlike in the full
    # distribution.
    assert (L.probs_from_logits(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.55)) > 0).sum() == 1
    assert (L.probs_from_logits(logits, SamplingParams(temperature=1.0, top_p=0.55)) > 0).sum() == 2
    assert (L.probs_from_logits(logits, SamplingParams(temperature=1.0, top_p=0.95, min_p=0.45)) > 0).sum() == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 33, 5000])
def test_greedy_is_one_hot_at_the_lowest_id_among_ties(dtype: torch.dtype, vocab: int) -> None:
    logits = torch.full((3, vocab), -1.0, dtype=dtype)
    ties = sorted({vocab // 3, vocab // 2, vocab - 1})
    logits[:, ties] = 2.5
    dist = L.probs_from_logits(logits, SamplingParams(temperature=0.0, top_k=3, top_p=0.5))
    assert dist.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert dist.sum(dim=-1).tolist() == [1.0] * 3
    assert dist.argmax(dim=-1).tolist() == [ties[0]] * 3


BROKEN = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (1.0, 2, 1.0, 0.0),
        (0.5, 0, 0.8, 0.0),
        (1.0, 2, 0.8, 0.1),
    ]
]


@pytest.mark.parametrize("params", BROKEN, ids=["greedy", "plain", "top-k", "top-p", "all"])
def test_broken_and_masked_rows(params: SamplingParams) -> None:
    """What is no distribution is not finite at any temperature, and touches no other row; masked tokens have no
    mass."""
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(4))
    clean = L.probs_from_logits(logits, params)
    logits[1, 5], logits[3, 0] = math.nan, math.inf
    logits[4] = -math.inf
    dist = L.probs_from_logits(logits, params)
    assert dist.sum(dim=-1).isfinite().tolist() == [True, False, True, False, False]
    assert torch.equal(dist[[0, 2]], clean[[0, 2]])
    logits[4, [2, 4]] = torch.tensor([0.5, 0.4])
    masked = L.probs_from_logits(logits[4:], params)[0]
    assert float(masked.sum()) == pytest.approx(1.0)
    assert masked[2] > 0 and not masked[[0, 1, 3, 5, 6, 7, 8]].any()


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-39, 1e-45, 1e-300])
def test_tiny_temperatures_are_nearly_greedy_not_broken(temperature: float) -> None:
    """SamplingParams takes any temperature from 0 on: dividing finite logits by it must not overflow to NaN."""
    logits = torch.tensor([[20.0, 30.0, -10.0]])
    dist = L.probs_from_logits(logits, SamplingParams(temperature=temperature))
    assert dist.tolist() == [[0.0, 1.0, 0.0]]


def test_logits_are_not_changed_and_half_precision_is_computed_in_float32() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(5), requires_grad=True)
    before = logits.detach().clone()
    half = before.bfloat16()
    for params in (*GRID[:20], *BROKEN):
        assert not L.probs_from_logits(logits, params).requires_grad
        assert torch.equal(L.probs_from_logits(half, params), L.probs_from_logits(half.float(), params))
    assert torch.equal(logits, before)


def test_top_k_counts_ties_of_the_logits_not_of_their_quotients() -> None:
    """(0 - 1) / 3 and (1e-300 - 1) / 3 are one number; their tokens are still first and second."""
    logits = torch.tensor([[0.0, 1.0, 1.0, 1e-300]], dtype=torch.float64)
    for temperature in (0.5, 1.0, 3.0):
        dist = L.probs_from_logits(logits, SamplingParams(temperature=temperature, top_k=3))
        assert (dist > 0).tolist() == [[False, True, True, True]]


# ------------------------------------------------------------------------------- the likeliest token


def test_the_likeliest_token_is_that_of_torch() -> None:
    """Also with many ties, with -inf, with NaN (the first one) and across rows that are not contiguous."""
    scores = (torch.randn(6, 501, generator=torch.Generator().manual_seed(8)) * 3).bfloat16()
    scores[1] = -math.inf
    scores[2, [40, 9, 300]] = math.nan
    scores[3, ::2] = -math.inf
    scores[4, [77, 400]] = math.inf
    for view in (
        scores,
        scores[::2],
        scores[:, 5:60],
        scores.float(),
        scores.half(),
        scores.double(),
        scores.T,
        scores[:0],
    ):
        assert L.most_likely(view).tolist() == view.argmax(dim=-1).tolist()


# ------------------------------------------------------------------------------- packed batches

some_params = st.sampled_from(
    [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, seed=4, max_tokens=5),  # the same distribution as the one before
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=0.5, top_p=0.7),
    ]
)


@quick
@given(st.lists(st.tuples(some_params, st.integers(0, 4)), max_size=8))
def test_groups_of_rows_have_the_distributions_of_each_group_alone(groups: list[tuple[SamplingParams, int]]) -> None:
    total = sum(count for _, count in groups)
    logits = torch.randn(total, 7, generator=torch.Generator().manual_seed(total), dtype=torch.float64)
    probs = L.batch_probs(logits, groups)
    assert [len(dist) for dist in probs] == [count for _, count in groups]
    start = 0
    for dist, (params, count) in zip(probs, groups, strict=True):
        assert torch.equal(dist, L.probs_from_logits(logits[start : start + count], params))
        start += count


@quick
@given(st.lists(st.tuples(some_params, st.integers(0, 9)), max_size=8))
def test_many_rows_have_the_distributions_of_few_at_a_time(groups: list[tuple[SamplingParams, int]]) -> None:
    logits = torch.randn(sum(count for _, count in groups), 7, generator=torch.Generator().manual_seed(1))
    whole = L.batch_probs(logits, groups)
    with pytest.MonkeyPatch.context() as patch:
        most, made = [0], L.probs_from_logits
        patch.setattr(L, "_AT_ONCE", 4 * 7)
        patch.setattr(L, "probs_from_logits", lambda own, params: (most.append(len(own)), made(own, params))[1])
        in_blocks = L.batch_probs(logits, groups)
    assert max(most) <= 4
    assert all(one.equal(other) for one, other in zip(whole, in_blocks, strict=True))


def test_no_row_of_several_is_worked_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(L, "_AT_ONCE", 3)
    sizes: list[int] = []
    for rows in range(9):
        given = torch.arange(rows * 2).view(rows, 2)
        once, twice = L.by_rows(
            lambda own, more: (sizes.append(len(own)), (own, own[:, 0] + more))[1], given, given[:, 1]
        )
        assert once.equal(given) and twice.equal(given.sum(1))
    assert sizes == [0, 1, 2, 3, *(2, 2), *(3, 2), *(2, 2, 2), *(3, 2, 2), *(2, 2, 2, 2)]


# ------------------------------------------------------------------------------- residuals and overlaps

vectors = (
    st.integers(1, 6)
    .flatmap(
        lambda n: st.tuples(*(st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1.0)), min_size=n, max_size=n),) * 2)
    )
    .filter(lambda pair: min(sum(pair[0]), sum(pair[1])) > 0)
)


def as_probs(pair: tuple[list[float], list[float]]) -> tuple[Tensor, Tensor]:
    p, q = (torch.tensor(weights, dtype=torch.float64) for weights in pair)
    return p / p.sum(dim=-1, keepdim=True), q / q.sum(dim=-1, keepdim=True)


@quick
@given(vectors)
def test_identities_of_acceptance(pair: tuple[list[float], list[float]]) -> None:
    """overlap + TV = 1, and accepted mass + rejected mass * residual = p: the theorem behind speculative sampling."""
    p, q = as_probs(pair)
    assert float(L.overlap(p, q) + L.total_variation(p, q)) == pytest.approx(1.0, abs=EXACT)
    left = L.residual(p, q)
    assert float(left.sum()) == pytest.approx(1.0, abs=EXACT)
    assert bool((left >= 0).all())
    assert torch.allclose(torch.minimum(p, q) + (1 - L.overlap(p, q)) * left, p, atol=EXACT, rtol=0)
    assert float(L.total_variation(p, q)) == float(L.total_variation(q, p))
    assert torch.equal(L.residual(p, p), p)
    assert float(L.total_variation(p, p)) == 0.0


def test_residual_by_hand_and_by_row() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.5, 0.5, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.5, 0.3], [0.2, 0.3, 0.5], [0.0, 0.25, 0.75]], dtype=torch.float64)
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.3, 0.5], [2 / 3, 1 / 3, 0.0]], dtype=torch.float64)
    assert torch.allclose(L.residual(p, q), expected, atol=EXACT)
    assert L.overlap(p, q).tolist() == pytest.approx([0.7, 1.0, 0.25])
    assert L.total_variation(p, q).tolist() == pytest.approx([0.3, 0.0, 0.75])


@quick
@given(vectors)
def test_residuals_in_float32_are_distributions(pair: tuple[list[float], list[float]]) -> None:
    p, q = (dist.float() for dist in as_probs(pair))
    left = L.residual(p, q)
    assert bool(left.isfinite().all()) and bool((left >= 0).all())
    assert float(left.sum()) == pytest.approx(1.0, abs=1e-6)
    assert bool((left[p == 0] == 0).all())


# ------------------------------------------------------------------------------- drawing

BELOW_ONE = 1.0 - 2.0**-53


def drawn(dist: list[float], uniforms: list[float], dtype: torch.dtype = torch.float64) -> list[int]:
    probs = torch.tensor(dist, dtype=dtype).expand(len(uniforms), -1)
    return L.draw(probs, torch.tensor(uniforms, dtype=torch.float64)).tolist()


def test_the_worked_example_of_draw() -> None:
    assert drawn([0.2, 0.0, 0.8], [0.0, 0.1, math.nextafter(0.2, 0), 0.2, 0.5, BELOW_ONE]) == [0, 0, 0, 2, 2, 2]


def test_tokens_without_mass_are_never_drawn_at_the_ends() -> None:
    ends = [0.0, 5e-324, 2.0**-54, 0.5, BELOW_ONE, 1.0]
    assert set(drawn([0.0, 0.0, 1.0, 0.0, 0.0], ends)) == {2}
    assert drawn([0.0, 0.5, 0.0, 0.5, 0.0], ends) == [1, 1, 1, 3, 3, 3]
    assert set(drawn([0.0, 0.1, 0.0] + [1e-30] * 3 + [0.9, 0.0], ends, torch.float32)) <= {1, 6}


@quick
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(2.0**-40, 1.0, width=32)), min_size=1, max_size=40).filter(any),
    st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, BELOW_ONE, 0.5, 2.0**-53])),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_draw_inverts_the_cumulative_sum(weights: list[float], u: float, dtype: torch.dtype) -> None:
    """Also for distributions that sum to 1 only up to rounding: the slow search below scales u by the sum."""
    dist = torch.tensor(weights, dtype=dtype)
    dist /= dist.sum(dim=-1, keepdim=True)
    token = int(L.draw(dist[None], torch.tensor([u], dtype=torch.float64)))
    assert dist[token] > 0
    values = dist.double().tolist()
    reached = [math.fsum(values[: i + 1]) for i in range(len(values))]
    assert reached[token] >= u * reached[-1] - 1e-14
    assert (reached[token - 1] if token else 0.0) <= u * reached[-1] + 1e-14


def test_rows_are_drawn_each_by_its_own_number() -> None:
    probs = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])
    assert L.draw(probs, torch.tensor([0.6, 0.99, 0.2], dtype=torch.float64)).tolist() == [1, 0, 0]
    assert L.draw(probs, torch.tensor([0.4, 0.0, 0.3], dtype=torch.float64)).dtype == torch.int64


def test_a_row_without_a_distribution_draws_the_number_of_tokens() -> None:
    """Which no token has: so a caller need not look at the distribution first."""
    for vocab in (1, 5, 1000):
        probs = torch.stack([torch.full((vocab,), 1.0 / vocab), torch.zeros(vocab), torch.full((vocab,), math.nan)])
        for u in (0.0, 0.3, BELOW_ONE):
            found = L.draw(probs, torch.full((3,), u, dtype=torch.float64)).tolist()
            assert found[0] < vocab
            assert found[1:] == [vocab, vocab]


def test_a_large_vocabulary_in_float32_keeps_its_tail() -> None:
    """200,000 equal tokens: a float32 cumulative sum would merge cells; the sum here is in float64."""
    count = 200_000
    dist = torch.full((1, count), 1.0 / count)
    for token in (0, 12_345, count // 2, count - 1):
        found = int(L.draw(dist, torch.tensor([(token + 0.5) / count], dtype=torch.float64)))
        assert found == token


# ------------------------------------------------------------------------------- without tokens


def some_probs(rows: int, vocab: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.softmax(torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab), dtype=dtype) * 2, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [2, 5, 300])
def test_one_token_of_each_row_gives_the_bits_of_one_row_alone(vocab: int, dtype: torch.dtype) -> None:
    p = some_probs(7, vocab, dtype)
    tokens = torch.arange(7)[:, None] % vocab
    for row, token, ours in zip(p, tokens, L.without_tokens(p, tokens), strict=True):
        rest = row.clone()
        rest[token] = 0.0
        assert torch.equal(ours, rest / rest.sum())
        assert torch.equal(L.without_tokens(row, token), ours)


def test_a_token_that_is_named_twice_is_taken_out_once() -> None:
    p = some_probs(2, 9)
    assert torch.equal(
        L.without_tokens(p, torch.tensor([[1, 5, 1], [0, 0, 0]])), L.without_tokens(p, torch.tensor([[1, 5], [0, 0]]))
    )


def test_where_nothing_is_left() -> None:
    p = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    assert torch.equal(L.without_tokens(p, torch.tensor([[1, 1], [0, 1]])), torch.zeros(2, 3))
    assert L.without_tokens(torch.tensor([1.0, 1e-45]), torch.tensor([0])).tolist() == [0.0, 1.0]


def test_the_distributions_given_are_left_as_they_were() -> None:
    p = some_probs(3, 6)
    before = p.clone()
    L.without_tokens(p, torch.tensor([[1], [2], [3]]))
    assert torch.equal(p, before)


# ------------------------------------------------------------------------------------------ rows on demand

SHAPED = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=3),
    SamplingParams(temperature=0.9, top_p=0.8),
    SamplingParams(temperature=0.9, min_p=0.2),
]


@pytest.mark.parametrize("params", SHAPED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_is_computed_where_it_is_read(
    params: SamplingParams, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = (3 * torch.randn(4, 11, generator=torch.Generator().manual_seed(1))).to(dtype)
    wanted, computed, compute = L.probs_from_logits(logits, params), [], L.probs_from_logits
    monkeypatch.setattr(L, "probs_from_logits", lambda rows, own: (computed.append(rows), compute(rows, own))[1])
    probs = L.RowProbs(logits, params)
    assert torch.equal(probs[2], wanted[2]) and probs[2] is probs[2]
    assert probs.entry(0, 5) == float(wanted[0, 5]) and probs.entry(2, 3) == float(wanted[2, 3])
    assert [torch.equal(*each) for each in zip(computed, (logits[2:3], logits[:1]), strict=True)] == [True, True]
    assert (probs.shape, probs.device, probs.broken) == (logits.shape, logits.device, set())
    as_given = L.RowProbs(wanted)
    assert as_given.entry(1, 4) == float(wanted[1, 4]) and torch.equal(as_given[3], wanted[3])


@pytest.mark.parametrize("params", SHAPED)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 4, 10])
def test_a_row_without_a_distribution_is_one_hot_and_told_of(params: SamplingParams, wrong: float, place: int) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(2)).to(dtype)
        logits[1, place if wrong != -torch.inf else slice(None)] = wrong
        probs = L.RowProbs(logits, params)
        assert probs[0].sum() == pytest.approx(1.0) and probs.broken == set()
        assert probs[1].tolist() == [1.0] + [0.0] * 10
        assert probs.broken == {1}


class Whole(SpeculativeSampling):
    """A stranger's rule, which reads whole tensors."""

    def accept(self, proposals, probs, noise):  # type: ignore[no-untyped-def]
        assert all(isinstance(own, Tensor) for own in probs)
        return super().accept(proposals, probs, noise)


def test_rules_that_accept_or_measure_in_their_own_way_get_tensors() -> None:
    rules = SpeculativeSampling(), BlockVerification(), LenientSampling(0.5), CoupledSampling(), Whole()
    assert [rule.reads_rows for rule in rules] == [True, True, False, False, False]
    target = MarkovModel.random(5, 1)
    drafter, params = DraftModel(MarkovModel.random(5, 2), 3), SamplingParams(temperature=1.0, max_tokens=20)
    for rule in rules:
        assert len(Engine(target, drafter, rule).generate([1, 2], params).token_ids) == 20
