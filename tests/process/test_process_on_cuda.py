"""The same processes on a CUDA device. Skipped, visibly, where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from process.worlds import Walk, Wells
from truedraft.process import Chains, Draft, LastOutput, Process, Stays, speculate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WORLDS: dict[str, tuple[Process, Tensor, Draft]] = {
    "gaussian": (Wells(), Wells().start(), LastOutput()),
    "shared noise": (Walk(0.8), Walk(0.8).initial(torch.zeros(4, 2, dtype=torch.float64)), Stays()),
}


def run(world: str, device: str, window: int | None) -> Chains:
    process, start, draft = WORLDS[world]
    return speculate(process, start.to(device), 60, draft=draft, window=window, seed=3, keep_path=True)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("world", WORLDS)
def test_paths_are_those_of_the_cpu_up_to_the_last_bits_of_functions(world: str, window: int) -> None:
    host, device = run(world, "cpu", window), run(world, "cuda", window)
    assert host.path is not None and device.path is not None
    assert device.path.device.type == "cuda"
    assert torch.allclose(host.path, device.path.cpu(), rtol=1e-9, atol=1e-9)
    assert host.rounds == device.rounds


@pytest.mark.parametrize("world", WORLDS)
def test_windows_are_chosen_there(world: str) -> None:
    chains = run(world, "cuda", None)
    assert not any(chains.errors) and bool((chains.at == 60).all())
