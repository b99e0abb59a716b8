"""Shares that processes have in a step: they add up to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from truedraft.training.loop import Objective


def assert_shares_add_up(objective: Objective, module: nn.Module, batch: Tensor, *parts: slice) -> None:
    """Of gradients and of what is logged, though no part is as long as another, up to sums in float32."""
    whole = objective.accumulate(batch, 0.5)
    expected = {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}
    module.zero_grad()
    shares = [objective.accumulate(batch, 0.5, part) for part in parts]
    assert expected and sum(part.stop - part.start for part in parts) == len(batch)
    for name in whole:
        assert name == "alpha" or sum(each[name] for each in shares) == pytest.approx(whole[name], rel=1e-5)
    for name, weight in module.named_parameters():
        if name in expected:
            assert weight.grad is not None
            within = 1e-5 * float(expected[name].abs().max())
            torch.testing.assert_close(weight.grad, expected[name], rtol=1e-5, atol=within)
