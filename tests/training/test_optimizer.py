"""Muon: torch's, and in float32 where bfloat16 is emulated."""

from __future__ import annotations

import pytest
import torch

from truedraft.training import optimizer
from truedraft.training.optimizer import Muon, orthogonalized

SHAPES = ((24, 40), (40, 24), (32, 32))
RATE = 0.02


def _matrices(seed: int) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=dice) for shape in SHAPES]


@pytest.mark.parametrize(("bfloat16", "tolerance"), [(True, 0.0), (False, 0.03)])
def test_steps_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, bfloat16: bool, tolerance: float) -> None:
    """To the bit where both multiply bfloat16; in float32 within its rounding, as a part of an update."""
    monkeypatch.setattr(optimizer, "has_bfloat16", lambda device: bfloat16)
    ours, theirs = ([torch.nn.Parameter(each) for each in _matrices(1)] for _ in range(2))
    own = Muon(ours, RATE, 0.1, 0.95)
    reference = torch.optim.Muon(theirs, RATE, 0.1, 0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for optimized in (ours, theirs):
            for parameter, gradient in zip(optimized, _matrices(10 + step), strict=True):
                parameter.grad = gradient
            optimized[2].grad = None if step == 1 else optimized[2].grad  # no update without a gradient
        own.step()
        reference.step()
        for mine, other in zip(ours, theirs, strict=True):
            assert float((mine - other).square().mean().sqrt()) <= tolerance * 0.2 * RATE * (step + 1)
    assert own.state_dict()["state"][0].keys() == {"momentum_buffer"}


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_are_near_one(shape: tuple[int, int]) -> None:
    left, _, right = torch.linalg.svd(_matrices(3)[SHAPES.index(shape)].double(), full_matrices=False)
    matrix = left * torch.linspace(0.05, 1.0, min(shape), dtype=torch.float64) @ right
    made = left.T @ orthogonalized(matrix, torch.float64) @ right.T
    assert made.diag().min() > 0.6 and made.diag().max() < 1.25
    assert torch.allclose(made, torch.diag(made.diag()), atol=1e-9)  # in the same directions


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert not orthogonalized(torch.zeros(4, 6)).any()
