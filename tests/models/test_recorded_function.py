"""Functions of tensors are recorded once for each shape that comes back, and replayed at addresses that stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.backends import HostRecorder
from truedraft.models.backends.graphs.replay import RecordedFunction


class Fixture:
    """x * factor + y, recorded; notes what the function was given."""

    def __init__(self, most: int = 64, *, recorded: bool = True) -> None:
        self.recorder = HostRecorder()
        self.given: list[tuple[Tensor, Tensor]] = []
        self.function = RecordedFunction(self._sum, self.recorder if recorded else None, most)

    def _sum(self, x: Tensor, y: Tensor, factor: int) -> tuple[Tensor, ...]:
        self.given.append((x, y))
        return x * factor + y[:, None], y

    def call(self, rows: int, factor: int = 2, width: int = 3) -> tuple[Tensor, ...]:
        x, y = torch.randn(rows, width), torch.randn(rows)
        found = self.function((x, y), factor)
        assert found[0].equal(x * factor + y[:, None])
        assert found[1].equal(y)
        return found


def test_a_shape_is_recorded_when_it_comes_back_and_replayed_from_then_on() -> None:
    fixture = Fixture()
    for call, (recordings, warmups) in enumerate(((0, 1), (1, 2), (1, 2), (1, 2))):
        fixture.call(3)
        assert (len(fixture.recorder.made), fixture.function.warmups) == (recordings, warmups), call
    assert fixture.recorder.made[0].replays == 3


def test_numbers_of_rows_share_recordings_up_to_a_power_of_two() -> None:
    fixture = Fixture()
    for rows in (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 7, 8):
        fixture.call(rows)
    assert [each.outputs[0].shape[0] for each in fixture.recorder.made] == [4, 1, 2, 8]
    assert fixture.function.warmups == 8


def test_other_numbers_and_widths_are_recorded_apart() -> None:
    fixture = Fixture()
    for factor, width in ((2, 3), (5, 3), (2, 4), (2, 3), (5, 3), (2, 4), (5, 3)):
        fixture.call(2, factor, width)
    assert [each.replays for each in fixture.recorder.made] == [1, 2, 1]


def test_addresses_stay_and_what_was_returned_is_not_overwritten() -> None:
    fixture = Fixture()
    for rows in (4, 4, 3, 4, 3):
        fixture.call(rows)
    first = {tuple(each.data_ptr() for each in given) for given in fixture.given[1:]}  # the first has its own
    assert len(first) == 1
    kept = [fixture.call(4) for _ in range(3)]
    copies = [tuple(each.clone() for each in found) for found in kept]
    fixture.call(4)
    assert all(a.equal(b) for found, copy in zip(kept, copies, strict=True) for a, b in zip(found, copy, strict=True))


def test_of_too_many_recordings_the_one_unused_longest_goes() -> None:
    fixture = Fixture(most=2)
    for rows in (1, 1, 2, 2, 1, 4, 4, 1):
        fixture.call(rows)
    assert len(fixture.recorder.made) == 3
    fixture.call(2)
    assert len(fixture.recorder.made) == 4
    assert fixture.function.warmups == 7


def test_without_a_recorder_the_function_gets_the_very_arguments() -> None:
    fixture = Fixture(recorded=False)
    x, y = torch.randn(3, 2), torch.randn(3)
    found = fixture.function((x, y), 4)
    assert fixture.given[0][0] is x
    assert found[1] is y
    assert (fixture.function.warmups, fixture.recorder.made) == (0, [])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("not permitted")])
def test_what_cannot_be_recorded_is_called_as_it_is(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture()
    fixture.call(2)
    tried = []

    def broken(given: object) -> None:
        tried.append(given)
        raise error

    monkeypatch.setattr(fixture.recorder, "record", broken)
    for _ in range(2):
        fixture.call(2)
    assert len(tried) == 1 and fixture.recorder.made == []
