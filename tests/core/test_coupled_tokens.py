"""The tokens that keyed noise chooses, found among few: always those of the definition, for distributions of every
shape.

All keys and distributions here are fixed, so nothing is flaky.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from core.test_noise import undo
from truedraft.core import coupled as C
from truedraft.core import probs
from truedraft.core.coupled import LazyGumbelMax, choices_by_definition, coupled_choices
from truedraft.core.noise import KeyedNoise, Purpose
from truedraft.core.params import SamplingParams
from truedraft.core.probs import probs_from_logits

CPU = torch.device("cpu")
PLAIN = SamplingParams(temperature=1.0)


def normal(rows: int, vocab: int, seed: int, scale: float) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def thinned(rows: int, vocab: int, seed: int, share: float) -> Tensor:
    chance = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(seed + 99))
    return normal(rows, vocab, seed, 1.0).masked_fill(chance > share, -math.inf).index_fill(1, torch.tensor([1]), 0.0)


SHAPES: dict[str, Callable[[int, int, int], Tensor]] = {
    "flat": lambda rows, vocab, seed: probs_from_logits(normal(rows, vocab, seed, 0.0), PLAIN),
    "nearly flat": lambda rows, vocab, seed: probs_from_logits(normal(rows, vocab, seed, 1.0), PLAIN),
    "steep": lambda rows, vocab, seed: probs_from_logits(normal(rows, vocab, seed, 5.0), PLAIN),
    "one token": lambda rows, vocab, seed: probs_from_logits(normal(rows, vocab, seed, 60.0), PLAIN),
    "top-k 50": lambda rows, vocab, seed: probs_from_logits(
        normal(rows, vocab, seed, 3.0), SamplingParams(temperature=1.0, top_k=50)
    ),
    "top-p 0.9": lambda rows, vocab, seed: probs_from_logits(
        normal(rows, vocab, seed, 3.0), SamplingParams(temperature=1.0, top_p=0.9)
    ),
    "one in nine": lambda rows, vocab, seed: probs_from_logits(thinned(rows, vocab, seed, 1 / 9), PLAIN),
    "one in seven": lambda rows, vocab, seed: probs_from_logits(thinned(rows, vocab, seed, 1 / 7), PLAIN),
    "one-hot": lambda rows, vocab, seed: probs_from_logits(normal(rows, vocab, seed, 1.0), SamplingParams()),
    "float64": lambda rows, vocab, seed: probs_from_logits(normal(rows, vocab, seed, 4.0).double(), PLAIN),
}
SIZES = [2, 7, 1023, 1024, 1025, 2049, 8192, 32_768, 33_000, 70_001, 150_000]


def places(rows: int, start: int = 0) -> list[C.Place]:
    return [(KeyedNoise(start + row, 10 + row, 3), row % 3) for row in range(rows)]


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_the_definition(shape: str) -> None:
    for vocab in SIZES:
        rows = 4 if vocab > 50_000 else 12
        dist, where = SHAPES[shape](rows, vocab, vocab), places(rows, vocab)
        for count in (1, 2, 8):
            found = coupled_choices([dist], where, count)
            assert found.shape == (rows, count)
            assert torch.equal(found, choices_by_definition(dist, where, count)), (vocab, count)


def test_tokens_are_those_of_the_definition_in_many_races() -> None:
    """4,000 distributions of 4,096 tokens, from flat to steep: often the winner has U < 1/2, which has its own way."""
    vocab, below = 4_096, 0
    for seed in range(40):
        dist = probs_from_logits(normal(100, vocab, seed, 1.0 + seed % 8), PLAIN)
        where = places(100, 1_000 * seed)
        found = coupled_choices([dist], where)[:, 0]
        assert torch.equal(found, choices_by_definition(dist, where)[:, 0])
        numbers = [
            float(noise.gumbel(depth, vocab, CPU)[token])
            for (noise, depth), token in zip(where, found.tolist(), strict=True)
        ]
        below += sum(number < -math.log(math.log(2)) for number in numbers)
    assert below > 200


@pytest.mark.parametrize("shape", ["flat", "nearly flat", "steep", "one in seven", "float64"])
def test_few_tokens_are_left_to_the_definition(shape: str) -> None:
    """What the filter is for; and it never says that it cannot tell, which would be right too but slow."""
    vocab = 40_000
    for seed in range(10):
        dist = SHAPES[shape](1, vocab, seed)[0].numpy()
        for count in (1, 8):
            left = LazyGumbelMax(vocab).candidates(dist, seed * 0x9E3779B97F4A7C15 % 2**64, count)
            assert left is not None
            assert (np.diff(left) > 0).all()
            assert count <= len(left) < 60 * count


def test_a_row_is_what_it_is_alone() -> None:
    """Rows of all shapes, in one tensor or in several, in any order and with noise that they share."""
    vocab = 9_000
    probs = [SHAPES[shape](2, vocab, 5) for shape in SHAPES if shape != "float64"]
    where = places(2 * len(probs))
    alone = [coupled_choices([dist], [place], 3) for dist, place in zip(torch.cat(probs).split(1), where, strict=True)]
    assert torch.equal(coupled_choices(probs, where, 3), torch.cat(alone))
    assert torch.equal(coupled_choices([torch.cat(probs)], where, 3), torch.cat(alone))
    back = coupled_choices([torch.cat(probs).flip(0)], where[::-1], 3)
    assert torch.equal(back, torch.cat(alone).flip(0))
    shared = [where[0]] * len(where)
    assert torch.equal(coupled_choices(probs, shared, 3), choices_by_definition(torch.cat(probs), shared, 3))


def test_distributions_over_vocabularies_of_several_sizes() -> None:
    probs = [SHAPES["steep"](2, vocab, vocab) for vocab in (3, 9_000, 5, 9_000, 12_000)]
    where = places(10)
    expected = [choices_by_definition(dist, where[2 * i : 2 * i + 2], 2) for i, dist in enumerate(probs)]
    assert torch.equal(coupled_choices(probs, where, 2), torch.cat(expected))


def test_none_is_chosen_where_nothing_has_mass_or_a_row_is_broken() -> None:
    for vocab in (6, 9_000):
        dist = torch.zeros(5, vocab)
        dist[0, [2, 5]] = 0.5
        dist[2] = torch.nan
        dist[3] = 1 / vocab
        dist[3, 4] = torch.nan
        dist[4] = 1 / vocab
        for chosen in (coupled_choices([dist], places(5), 3), choices_by_definition(dist, places(5), 3)):
            found = chosen.tolist()
            assert sorted(found[0]) == [2, 5, vocab]
            assert found[0][2] == vocab
            assert found[1] == found[2] == found[3] == [vocab] * 3
            assert len(set(found[4]) - {vocab}) == 3


def test_more_tokens_than_the_vocabulary_has() -> None:
    dist = SHAPES["nearly flat"](2, 3, 0)
    for found in (coupled_choices([dist], places(2), 5), choices_by_definition(dist, places(2), 5)):
        assert found[:, :3].sort().values.tolist() == [[0, 1, 2]] * 2
        assert found[:, 3:].tolist() == [[3, 3]] * 2


@pytest.mark.parametrize("word", [0, 1, 2**64 - 1, 2**64 - 2**11, 2**64 - 2**33, 2**64 - 2**33 - 1, 2**63, 2**63 - 1])
def test_the_most_extreme_bits_win_as_the_definition_says(word: int) -> None:
    """A token whose hash is `word`, at several probabilities: its bits are where the filter rounds most."""
    vocab, token = 5_000, 1_234
    key = (undo(word) - 0x9E3779B97F4A7C15) % 2**64 ^ token
    for scale in (0.0, 1.0, 4.0):
        for power in (0, -10, -20, -30, -36):
            logits = normal(1, vocab, 3, scale).double()
            logits[0, token] = logits.logsumexp(-1) + power * math.log(2.0)
            dist = probs_from_logits(logits, PLAIN)
            left = LazyGumbelMax(vocab).candidates(dist[0].numpy(), key, 1)
            best = int((dist.log() + C.gumbel_of(C.signed(key), torch.arange(vocab))).argmax())
            assert left is not None and best in left


@pytest.mark.parametrize("vocab", [3, 1_024, 32_768, 32_769, 100_000])
def test_the_filter_has_the_bits_of_the_generator_and_never_more_than_the_distance_to_one(vocab: int) -> None:
    """Keys at the ends too: their sums with token ids carry and wrap around."""
    for key in (0, 1, 2**64 - 1, 2**63, 0x61C8864680B583EB, 2**40 - 5, 0x9E3779B97F4A7C15):
        race = LazyGumbelMax(vocab)
        race._fill_lead(key)
        uniform = torch.exp(-torch.exp(-C.gumbel_of(C.signed(key), torch.arange(vocab)))).numpy()
        upper = uniform >= 0.5
        lead = race._lead.astype(np.float64) / -(2.0**64)
        assert (lead[~upper] < 0).all()
        assert (lead[upper] > 0).all()
        assert np.abs(lead[upper] - (1 - uniform[upper])).max() < 2.0**-24
        assert (lead[upper] <= (1 - uniform[upper]) * (1 + 2.0**-20)).all()


class GivenNoise:
    """Gumbel numbers as they were given."""

    def __init__(self, numbers: list[float]) -> None:
        self.numbers = torch.tensor(numbers, dtype=torch.float64)

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        raise AssertionError("coupled sampling draws nothing by a uniform number")

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> Tensor:
        return self.numbers


class BiasedNoise(KeyedNoise):
    """Keyed noise with a change of its own."""

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> Tensor:
        return super().gumbel(depth, vocab, device) + 100.0 * (torch.arange(vocab) == 7)


def test_noise_that_is_given_as_numbers_is_taken_as_it_is() -> None:
    dist = torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.9, 0.0], [0.25, 0.25, 0.5]])
    given: list[C.Place] = [
        (GivenNoise([0.0, 1.0, 50.0]), 0),
        (GivenNoise([3.0, 0.0, 50.0]), 4),
        (KeyedNoise(1, 2, 3), 0),
    ]
    expected = choices_by_definition(dist, given, 2)
    assert expected[:2].tolist() == [[1, 0], [0, 1]]
    assert torch.equal(coupled_choices([dist], given, 2), expected)
    ties: list[C.Place] = [(GivenNoise([0.0, 0.0, 0.0]), 0)]
    assert coupled_choices([torch.full((1, 3), 1 / 3)], ties, 3).tolist() == [[0, 1, 2]]


def test_a_subclass_of_keyed_noise_with_its_own_numbers_is_not_passed_over() -> None:
    dist = SHAPES["nearly flat"](1, 9_000, 0)
    assert coupled_choices([dist], [(BiasedNoise(1, 2, 3), 0)]).tolist() == [[7]]


def test_a_device_asks_for_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where reading waits, the choice is one expression over all rows, and gives the same tokens."""
    probs = [SHAPES["steep"](1, 9_000, seed) for seed in range(4)] + [SHAPES["steep"](2, 50, 1)]
    here = [coupled_choices(probs[:4], places(4)), coupled_choices(probs[4:], places(2))]
    monkeypatch.setattr(C.transfers, "waits", lambda device: True)
    monkeypatch.setattr(C, "_choose_on_cpu", None)
    monkeypatch.setattr(Tensor, "numpy", None)
    for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(Tensor, name, None)
    there = coupled_choices(probs, [*places(4), *places(2)])
    monkeypatch.undo()
    assert torch.equal(there, torch.cat(here))


def test_the_noise_of_few_rows_is_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dist, rows = SHAPES["nearly flat"](9, 50, 1), list[int]()
    expected = choices_by_definition(dist, places(9), 3)
    monkeypatch.setattr(probs, "_AT_ONCE", 4 * 50)
    by_noise = C.choices_by_noise
    monkeypatch.setattr(C, "choices_by_noise", lambda own, *more: (rows.append(len(own)), by_noise(own, *more))[1])
    assert choices_by_definition(dist, places(9), 3).equal(expected)
    assert rows == [3, 3, 3]


@pytest.mark.parametrize(
    ("scale", "count"), [(1.0, 1_025), (1e-60, 1)], ids=["more tokens than groups", "tiny numbers"]
)
def test_where_the_filter_cannot_tell_the_definition_decides(scale: float, count: int) -> None:
    dist = SHAPES["nearly flat"](1, 5_000, 0).double() * scale
    before = dist.clone()
    assert LazyGumbelMax(5_000).candidates(dist[0].numpy(), 5, count) is None
    assert torch.equal(coupled_choices([dist], places(1), count), choices_by_definition(dist, places(1), count))
    assert torch.equal(dist, before)
