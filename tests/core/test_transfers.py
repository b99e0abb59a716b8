"""What goes up is there unchanged, what comes back comes in one transfer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from truedraft.core import transfers

CPU = torch.device("cpu")


def test_the_cpu_is_not_waited_for_and_everything_else_is() -> None:
    assert not transfers.waits(CPU)
    for name in ("cuda", "mps", "xpu", "meta"):
        assert transfers.waits(torch.device(name))


def test_uploads_keep_numbers_and_types() -> None:
    ids = transfers.upload([3, -1, 2**40], CPU)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [3, -1, 2**40]
    uniforms = transfers.upload([0.1, 1 - 2**-53], CPU, torch.float64)
    assert uniforms.dtype == torch.float64
    assert uniforms.tolist() == [0.1, 1 - 2**-53]
    assert transfers.upload([], CPU).shape == (0,)


def test_fetching_gives_every_tensor_its_own_numbers_exactly() -> None:
    tensors = [
        torch.tensor([[5, 2**52 + 1], [-3, 0]]),
        torch.tensor([0.1, float("nan"), float("inf")], dtype=torch.float32),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([True, False]),
        torch.tensor([False]),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor([1.5], dtype=torch.bfloat16),
    ]
    found = transfers.fetch(tensors)
    assert found[0] == [5, 2**52 + 1, -3, 0]
    assert found[1][0] == float(torch.tensor(0.1)) and found[1][1] != found[1][1] and found[1][2] == float("inf")
    assert found[2:] == [[], [1.0, 0.0], [0.0], [0.1], [1.5]]


def test_a_fetch_reads_once_and_without_numbers_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> object:
        reads.append(tensor.numel())
        return tolist(tensor)

    monkeypatch.setattr(Tensor, "tolist", counted)
    monkeypatch.setattr(transfers, "waits", lambda device: True)
    transfers.fetch([torch.ones(2), torch.tensor([1]), torch.ones(3, 2)])
    assert reads == [9]
    assert transfers.fetch([torch.ones(0), torch.ones(2, 0)]) == [[], []]
    assert transfers.fetch([]) == []
    assert reads == [9]
