"""Muon for the hidden matrices, AdamW for embeddings and norms, stepped as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class OptimizerConfig:
    """Peak rates and decays.

    Muon's rate is in AdamW's units (`match_rms_adamw`): an update has a root mean square of 0.2 times it.
    """

    matrix_rate: float = 2e-3
    vector_rate: float = 2e-3
    matrix_weight_decay: float = 0.1
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0


class MixedOptimizer:
    """Two torch optimizers behind one `step`, with the rates scaled by a schedule."""

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig) -> None:
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim == 2 and id(p) not in embeddings]
        others = [p for p in trained if p.ndim != 2 or id(p) in embeddings]
        self._parameters = trained
        self._clip_norm = config.clip_norm
        self._peaks = (config.matrix_rate, config.vector_rate)
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                matrices,
                lr=config.matrix_rate,
                weight_decay=config.matrix_weight_decay,
                momentum=config.momentum,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(others, lr=config.vector_rate, betas=config.betas, weight_decay=0.0),
        )

    def step(self, multiplier: float) -> float:
        """Clip, update and clear the gradients; returns the norm that the gradients had before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        for optimizer, peak in zip(self._optimizers, self._peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * multiplier
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def state_dict(self) -> list[dict[str, Any]]:
        """Both optimizers' states, for a checkpoint."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restore what `state_dict` returned."""
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)
