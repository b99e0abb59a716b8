"""Keyed noise: the same bits everywhere, no key twice, uniform and Gumbel as they should be, and frozen for good.

All keys here are fixed, so nothing is flaky. Where a bound is statistical, the false-alarm probability that it would
have for fresh keys is stated.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from truedraft.core import noise as N
from truedraft.core.noise import KeyedNoise, Purpose, gumbel_of, mix

CPU = torch.device("cpu")
FULL = (1 << 64) - 1
words = st.integers(0, FULL)


def slow_mix(state: int, part: int) -> int:
    """One step of splitmix64 from Vigna's published C code, written down again."""
    z = (state ^ (part % 2**64)) + 0x9E3779B97F4A7C15
    z %= 2**64
    z = (z ^ (z // 2**30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z // 2**27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z // 2**31)


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def undo(word: int) -> int:
    """The input that the finaliser turns into `word`: each of its steps can be undone."""

    def unshift(z: int, count: int) -> int:
        found = z
        for _ in range(64 // count + 1):
            found = z ^ (found >> count)
        return found

    z = unshift(word, 31)
    z = unshift(z * pow(0x94D049BB133111EB, -1, 2**64) % 2**64, 27)
    return unshift(z * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64, 30)


# ------------------------------------------------------------------------------- bits


@settings(max_examples=200, deadline=None, derandomize=True)
@given(words, st.integers(-(2**63), 2**64 - 1))
def test_one_link_is_splitmix64(state: int, part: int) -> None:
    assert mix(state, part) == slow_mix(state, part)
    assert 0 <= mix(state, part) <= FULL


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(words, min_size=1, max_size=20))
def test_python_and_tensors_have_the_same_bits(values: list[int]) -> None:
    tensor = torch.tensor([signed(value) for value in values], dtype=torch.int64)
    assert [word % 2**64 for word in N._finalise(tensor).tolist()] == [N._finalise_int(value) for value in values]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(words, st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_gumbel_noise_is_that_of_the_python_bits(key: int, tokens: list[int]) -> None:
    found = gumbel_of(key, torch.tensor(tokens, dtype=torch.int64))
    assert found.dtype == torch.float64
    expected = [-math.log(-math.log(((slow_mix(key, token) >> 11) + 0.5) * 2.0**-53)) for token in tokens]
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_keys_are_chained_as_documented() -> None:
    """(seed, sample), then position, purpose, step, index for a decision; position, purpose, token for Gumbel noise."""
    seed, sample, position, step = 11, 3, 1000, 17
    noise = KeyedNoise(seed, position, step, sample)
    root = slow_mix(slow_mix(0x9E3779B97F4A7C15, seed), sample)
    for purpose, depth, index in [(Purpose.DRAFT, 0, 0), (Purpose.ACCEPT, 2, 5), (Purpose.RECOVERED, 4, 0)]:
        key = root
        for part in (position + depth, int(purpose), step, index):
            key = slow_mix(key, part)
        assert noise.uniform(purpose, depth, index) == pytest.approx(key / 2**64, abs=2.0**-51)
    key = slow_mix(slow_mix(root, position + 2), int(Purpose.COUPLED))
    assert torch.equal(noise.gumbel(2, 9, CPU), gumbel_of(key, torch.arange(9)))


def test_numbers_of_few_tokens_under_many_keys_are_the_same_bits() -> None:
    """Keys one for each token, in numpy and in torch, and at both ends of the signed and unsigned range."""
    keys = [0, 1, FULL, 1 << 63, (1 << 63) - 1, *(slow_mix(i, 3) for i in range(95))]
    tokens = np.arange(100, dtype=np.int64) * 1_511
    expected = torch.stack([gumbel_of(key, torch.tensor(token)) for key, token in zip(keys, tokens, strict=True)])
    assert torch.equal(torch.from_numpy(N.gumbel_of_each(np.array(keys, np.uint64), tokens)), expected)
    many = torch.tensor([signed(key) for key in keys])
    assert torch.equal(gumbel_of(many, torch.from_numpy(tokens)), expected)
    table = gumbel_of(many[:, None], torch.arange(7))
    assert torch.equal(table, torch.stack([gumbel_of(key, torch.arange(7)) for key in keys]))


def test_the_key_of_gumbel_noise_says_all_of_its_numbers() -> None:
    class Own(KeyedNoise):
        def gumbel(self, depth: int, vocab: int, device: torch.device) -> torch.Tensor:
            return torch.zeros(vocab, dtype=torch.float64)

    noise = KeyedNoise(5, 10, 0, 2)
    key = N.gumbel_key(noise, 3)
    assert key is not None
    assert torch.equal(noise.gumbel(3, 50, CPU), gumbel_of(key, torch.arange(50)))
    assert N.gumbel_key(Own(5, 10, 0), 3) is None, "its numbers are its own"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_has_the_same_bits() -> None:
    values = torch.arange(-50_000, 50_000) * 0x5851F42D4C957F2D
    assert torch.equal(N._finalise(values.cuda()).cpu(), N._finalise(values))
    host, device = gumbel_of(123, torch.arange(100_000)), gumbel_of(123, torch.arange(100_000, device="cuda")).cpu()
    assert torch.allclose(host, device, rtol=1e-14, atol=1e-14)


# ------------------------------------------------------------------------------- frozen values

FROZEN_MIX = {
    (0, 0): 0xE220A8397B1DCDAF,  # the first output of splitmix64 seeded with 0, as published
    (1, 2): 0x1D0B14E4DB018FED,
    (2**63, 5): 0x54A64D19D7534F30,
    (123456789, -1): 0x189AD894C9F05854,
}
FROZEN_UNIFORM = {
    (0, 0, 0, 0): [0.8775123895971513, 0.33199185788601165, 0.990206580659909, 0.2769229630357754],
    (7, 12, 3, 3): [0.9385609474744032, 0.529250271938458, 0.572094296970332, 0.7326525936374835],
    (2**63 + 5, 100, 2, 2): [0.8455692799800383, 0.09141577626035574, 0.14552222884569438, 0.25025554659200483],
}
FROZEN_GUMBEL = {
    (0, 0, 0, 0): [1.6009898124654052, 0.8208766346644134, 1.0600437800324995, 0.0539218908455401],
    (7, 12, 3, 3): [-0.3592655124971284, -0.27689557593974806, -0.7638751170169762, 4.168452151140847],
    (2**63 + 5, 100, 2, 2): [-1.627522444135816, -0.21962828254825106, 0.4745987544704875, -1.0169762933618804],
}


def test_the_generator_never_changes() -> None:
    """A seed in somebody's notebook must give the same answer in every version: never edit these numbers."""
    assert {pair: mix(*pair) for pair in FROZEN_MIX} == FROZEN_MIX
    asked = [(Purpose.DRAFT, 0, 0), (Purpose.ACCEPT, 1, 2), (Purpose.RECOVERED, 3, 0), (Purpose.BONUS, 0, 0)]
    for (seed, position, step, sample), expected in FROZEN_UNIFORM.items():
        noise = KeyedNoise(seed, position, step, sample)
        assert [noise.uniform(*each) for each in asked] == pytest.approx(expected, abs=2.0**-51, rel=0)
    for (seed, position, step, sample), expected in FROZEN_GUMBEL.items():
        assert KeyedNoise(seed, position, step, sample).gumbel(1, 4, CPU).tolist() == pytest.approx(expected, rel=1e-12)


# ------------------------------------------------------------------------------- keys


def test_no_two_keys_share_a_number() -> None:
    """28,800 keys of small numbers, where mistakes of mixing show; chance repeats among them: below 5e-8."""
    seen = set()
    count = 0
    for seed, sample, position, step in itertools.product(range(6), range(3), range(5), range(5)):
        noise = KeyedNoise(seed, position, step, sample)
        for purpose, index in itertools.product(Purpose, range(8)):
            # At depth 0 only: position + depth is one number, see the next test.
            if purpose is not Purpose.COUPLED:
                seen.add(noise.uniform(purpose, 0, index))
                count += 1
        if step == 0:  # Gumbel noise has no step in its key
            seen.update(noise.gumbel(0, 8, CPU).tolist())
            count += 8
    assert len(seen) == count


def test_a_position_is_a_position_from_wherever_it_is_reached() -> None:
    for depth in range(4):
        ahead, there = KeyedNoise(5, 10, 2), KeyedNoise(5, 10 + depth, 2)
        assert ahead.uniform(Purpose.ACCEPT, depth, 1) == there.uniform(Purpose.ACCEPT, 0, 1)
        assert torch.equal(ahead.gumbel(depth, 5, CPU), there.gumbel(0, 5, CPU))


def test_coupled_noise_knows_no_step_and_no_vocabulary_size() -> None:
    """So tokens do not depend on how many target calls came before, nor on padded ids."""
    early, late = KeyedNoise(5, 10, 0), KeyedNoise(5, 10, 9)
    assert torch.equal(early.gumbel(3, 50, CPU), late.gumbel(3, 50, CPU))
    assert torch.equal(early.gumbel(3, 64, CPU)[:50], late.gumbel(3, 50, CPU))
    assert not torch.equal(early.gumbel(2, 50, CPU), early.gumbel(3, 50, CPU))
    assert not torch.equal(early.gumbel(2, 50, CPU), KeyedNoise(5, 10, 0, sample=1).gumbel(2, 50, CPU))
    assert early.uniform(Purpose.ACCEPT, 3) != late.uniform(Purpose.ACCEPT, 3)


def test_gumbel_noise_is_kept_for_the_step_and_right_after_a_change_of_size() -> None:
    noise = KeyedNoise(5, 10, 0)
    first = noise.gumbel(1, 8, CPU)
    assert noise.gumbel(1, 8, CPU) is first
    assert noise.gumbel(1, 16, CPU).shape == (16,)
    assert torch.equal(noise.gumbel(1, 8, CPU), first)


# ------------------------------------------------------------------------------- distributions


@pytest.mark.parametrize("varied", ["seed", "sample", "position", "depth", "step", "index"])
def test_uniform_numbers_are_uniform_along_every_part_of_the_key(varied: str) -> None:
    """Kolmogorov-Smirnov over 12,000 keys that differ in one part; false alarm 1e-8 for each part."""
    numbers = []
    for i in range(12_000):
        at = {"seed": 3, "position": 40, "step": 5, "sample": 0, "depth": 0, "index": 0, varied: i}
        noise = KeyedNoise(at["seed"], at["position"], at["step"], at["sample"])
        numbers.append(noise.uniform(Purpose.ACCEPT, at["depth"], at["index"]))
    assert stats.kstest(numbers, "uniform").pvalue > 1e-8
    assert 0.0 < min(numbers) < max(numbers) < 1.0
    series = np.array(numbers)
    for lag in (1, 2, 64):  # 5.7 standard errors: false alarm below 2e-8 each
        assert abs(np.corrcoef(series[:-lag], series[lag:])[0, 1]) < 5.7 / math.sqrt(len(series))


def test_gumbel_numbers_have_the_gumbel_distribution() -> None:
    """A million tokens of one key, and one token of many keys; 5.5 standard errors (4e-8) and KS at 1e-8."""
    count = 1_000_000
    noise = gumbel_of(2**63 + 12345, torch.arange(count))
    assert bool(noise.isfinite().all())
    variance = math.pi**2 / 6
    assert abs(float(noise.mean()) - 0.5772156649015329) < 5.5 * math.sqrt(variance / count)
    # The variance of a sample variance is (kurtosis - 1) sigma^4 / n; a Gumbel's kurtosis is 3 + 12/5.
    assert abs(float(noise.var()) - variance) < 5.5 * variance * math.sqrt(4.4 / count)
    assert abs(float(torch.corrcoef(torch.stack([noise[:-1], noise[1:]]))[0, 1])) < 5.5 / math.sqrt(count)
    assert stats.kstest(noise[::10].numpy(), "gumbel_r").pvalue > 1e-8
    along = [float(KeyedNoise(1, position, 0).gumbel(0, 3, CPU)[2]) for position in range(3_000)]
    assert stats.kstest(along, "gumbel_r").pvalue > 1e-8
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 5.7 / math.sqrt(len(along))


# ------------------------------------------------------------------------------- the ends of the interval


@pytest.mark.parametrize("word", [0, FULL, FULL - (1 << 11), 1 << 63], ids=["zeros", "ones", "next", "half"])
def test_numbers_stay_strictly_inside_the_interval_for_the_most_extreme_bits(word: int) -> None:
    """u = 1 would make a Gumbel number infinite, and infinity beside log 0 a NaN that wins the argmax."""
    noise = KeyedNoise(seed=0, position=0, step=0)
    state = slow_mix(slow_mix(0x9E3779B97F4A7C15, 0), 0)
    for part in (0, int(Purpose.ACCEPT), 0):
        state = slow_mix(state, part)
    index = (undo(word) - 0x9E3779B97F4A7C15) % 2**64 ^ state
    assert slow_mix(state, index) == word
    assert 0.0 < noise.uniform(Purpose.ACCEPT, 0, index) < 1.0
    token = signed((undo(word) - 0x9E3779B97F4A7C15) % 2**64 ^ 99)
    assert bool(gumbel_of(99, torch.tensor([token])).isfinite().all())
