"""Muon for the hidden matrices, AdamW for embeddings and norms, stepped together; and the schedule of their rates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from truedraft.machine import has_bfloat16

_WARMUP_STEPS = 20
_QUINTIC = (3.4445, -4.7750, 2.0315)
_QUINTIC_STEPS = 5


@dataclass(frozen=True)
class OptimizerConfig:
    """Peak rates and decays; Muon's are in AdamW's units (an update has a root mean square of 0.2 times it)."""

    matrix_rate: float = 2e-3
    vector_rate: float = 2e-3
    matrix_weight_decay: float = 0.1
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0


class Muon(torch.optim.Optimizer):
    """Muon with updates of AdamW's size (2502.16982, section 2.2), as `torch.optim.Muon` computes it, but in float32 on
    devices without bfloat16 products, which emulate them in a hundred times the time.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                mean = state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonalized(matrix.grad.lerp(mean, group["momentum"]))  # Nesterov
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonalized(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The matrix with singular values near 1 (about 0.7 to 1.2), by the quintic Newton-Schulz iteration of Muon.

    `dtype` is that of the products, by default bfloat16 where the device multiplies it.
    """
    if dtype is None:
        dtype = torch.bfloat16 if has_bfloat16(matrix.device) else torch.float32
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    first, third, fifth = _QUINTIC
    for _ in range(_QUINTIC_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.T if tall else x


class MixedOptimizer:
    """Muon and AdamW with a common `step`; `tables` are further matrices for AdamW, such as output layers."""

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig, tables: Iterable[torch.Tensor] = ()) -> None:
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        embeddings |= {id(table) for table in tables}
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim == 2 and id(p) not in embeddings]
        others = [p for p in trained if p.ndim != 2 or id(p) in embeddings]
        self._parameters = trained
        self._clip_norm = config.clip_norm
        self._optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            self._optimizers.append(Muon(matrices, config.matrix_rate, config.matrix_weight_decay, config.momentum))
        if others:
            adam = torch.optim.AdamW(others, lr=config.vector_rate, betas=config.betas, weight_decay=0.0)
            self._optimizers.append(adam)
        self.peak: float = max((each.defaults["lr"] for each in self._optimizers), default=0.0)

    def step(self, multiplier: float) -> float:
        """Clip, update and clear the gradients; returns the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * multiplier
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)


class SeparateOptimizers:
    """Disjoint parts of a model updated together, each at its own rates and clipped by its own norm."""

    def __init__(self, *parts: MixedOptimizer) -> None:
        self._parts = parts
        self.peak = max(part.peak for part in parts)

    def step(self, multiplier: float) -> float:
        return math.hypot(*(part.step(multiplier) for part in self._parts))

    def state_dict(self) -> list[Any]:
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, states: list[Any]) -> None:
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)


@dataclass(frozen=True)
class WarmupStableDecay:
    """Linear warm-up, a constant phase, then a decay to `floor` by 1 - sqrt (2405.18392).

    A checkpoint of the constant phase can be decayed now and trained on later: it does not depend on the decay.
    """

    warmup_steps: int
    stable_steps: int  # the warm-up included
    decay_steps: int
    floor: float = 0.0

    @classmethod
    def of(cls, steps: int, decay_share: float) -> WarmupStableDecay:
        decay = min(steps - 1, round(steps * decay_share))
        return cls(min(_WARMUP_STEPS, steps - decay), steps - decay, decay)

    @property
    def total_steps(self) -> int:
        return self.stable_steps + self.decay_steps

    def shortened(self, steps: int) -> WarmupStableDecay:
        if steps >= self.total_steps:
            return self
        decay = min(steps - 1, round(steps * self.decay_steps / self.total_steps))
        stable = steps - decay
        return replace(self, warmup_steps=min(self.warmup_steps, stable), stable_steps=stable, decay_steps=decay)

    def __call__(self, step: int) -> float:
        """The multiplier for the update number `step`, from 0."""
        if step < min(self.warmup_steps, self.stable_steps):
            return (step + 1) / self.warmup_steps
        if step < self.stable_steps:
            return 1.0
        done = (step - self.stable_steps + 1) / (self.decay_steps + 1)
        return self.floor + (1.0 - self.floor) * (1.0 - math.sqrt(min(1.0, done)))
