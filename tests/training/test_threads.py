"""Which number of threads a loop of small steps ends with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from truedraft.training.texts.answer_writer import ThreadTrial


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("seconds", "kept"), [({1: 1.0, 2: 2.0}, 1), ({1: 2.0, 2: 1.5}, 2)])
def test_the_faster_is_kept_after_some_turns(seconds: dict[int, float], kept: int) -> None:
    now = [0.0]
    trial = ThreadTrial(torch.device("cpu"), lambda: now[0])
    used = []

    def step() -> int:
        used.append(torch.get_num_threads())
        now[0] += seconds[used[-1]]
        return len(used)

    assert [trial.run(step) for _ in range(200)] == list(range(1, 201))
    assert set(used[:150]) == {1, 2} and set(used[150:]) == {kept}
    trial.stop()
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_device_is_left_alone() -> None:
    trial = ThreadTrial(torch.device("meta"))
    assert {trial.run(torch.get_num_threads) for _ in range(200)} == {2}
