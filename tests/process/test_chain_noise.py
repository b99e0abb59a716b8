"""Noise of chains: the same bits as those of text, no key twice, and numbers of the right distribution."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from truedraft.core.noise import GOLDEN, Purpose, mix, mixed, open_unit, open_unit_of, signed
from truedraft.process.noise import RoundNoise, chain_roots, numbers


def test_keys_of_tensors_are_those_of_whole_numbers() -> None:
    states, parts = [0, 1, GOLDEN, 2**63 + 5], [7, 0, 2**40, 3]
    made = mixed(torch.tensor([signed(each) for each in states]), torch.tensor(parts))
    expected = [mix(state, part) for state, part in zip(states, parts, strict=True)]
    assert made.tolist() == [signed(each) for each in expected]
    assert open_unit_of(made).tolist() == [open_unit(each) for each in expected]


@pytest.mark.parametrize("size", [0, 1, 7])
def test_few_numbers_are_made_another_way_and_have_the_same_bits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = mixed(torch.arange(12).view(3, 4), signed(GOLDEN))
    for some in (keys, keys[:, 1], keys[1:, ::2], keys[:0]):
        few = numbers(some, size, Purpose.ACCEPT, 3, torch.float64)
        with monkeypatch.context() as patched:
            patched.setattr("truedraft.process.noise._FEW", -1)
            assert torch.equal(numbers(some, size, Purpose.ACCEPT, 3, torch.float64), few)
        assert few.shape == (*some.shape, max(size, 1))


def rounds(calls: int = 0) -> RoundNoise:
    roots = chain_roots(3, 50, torch.device("cpu"))
    return RoundNoise(roots, torch.arange(50) % 4, torch.full((50,), calls), 5, torch.float64)


def test_no_two_decisions_share_a_number() -> None:
    seen: list[float] = []
    for calls in (0, 1):
        noise = rounds(calls)
        for depth in range(5):
            here = noise.at(depth)
            seen += [here.uniform(purpose) for purpose in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.BONUS)]
            for number in range(2):
                normal, uniform = here.attempt(number, torch.arange(50), 3)
                seen += [torch.special.ndtr(normal).flatten().round(decimals=14), uniform]
    found = torch.cat(seen)
    assert len(found.unique()) == len(found)


def test_shared_numbers_belong_to_the_step_and_others_to_the_call() -> None:
    first, second = rounds(0), rounds(1)
    assert torch.equal(first.at(2).shared_normal(4), second.at(2).shared_normal(4))
    assert torch.equal(first.at(2).shared_uniform(), second.at(2).shared_uniform())
    assert not torch.equal(first.at(2).normal(Purpose.DRAFT, 4), second.at(2).normal(Purpose.DRAFT, 4))
    # Chains 0 and 4 stand at step 0, chain 1 at step 1: a step's numbers go with it, whatever its depth in a round.
    roots = chain_roots(3, 2, torch.device("cpu"))
    later = RoundNoise(roots, torch.tensor([2, 3]), torch.tensor([0, 0]), 1, torch.float64)
    assert torch.equal(later.at(0).shared_normal(4), first.at(2).shared_normal(4)[:2])


def test_rows_of_several_depths_are_those_of_each() -> None:
    noise = rounds()
    each = torch.cat([noise.at(depth).uniform(Purpose.ACCEPT) for depth in range(3)])
    assert torch.equal(noise.first(3).uniform(Purpose.ACCEPT), each)
    depths, chains = torch.tensor([2, 0]), torch.tensor([7, 9])
    assert torch.equal(noise.of(depths, chains).uniform(Purpose.BONUS)[0], noise.at(2).uniform(Purpose.BONUS)[7])


@pytest.mark.parametrize("size", [1, 400])
def test_numbers_are_normal_and_uniform(size: int) -> None:
    here = rounds().at(1)
    assert stats.kstest(here.normal(Purpose.DRAFT, size).flatten().numpy(), "norm").pvalue > 1e-3
    assert stats.kstest(here.uniform(Purpose.ACCEPT).numpy(), "uniform").pvalue > 1e-3
