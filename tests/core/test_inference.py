"""The mode without gradients, entered where it does not hold."""

from __future__ import annotations

import torch

from truedraft.core.inference import in_inference_mode


@in_inference_mode
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_results_carry_no_gradient_and_the_mode_is_left_as_it_was() -> None:
    x = torch.ones(2, requires_grad=True)
    assert doubled(x).is_inference() and not torch.is_inference_mode_enabled()
    with torch.inference_mode():
        assert doubled(x).is_inference() and torch.is_inference_mode_enabled()
