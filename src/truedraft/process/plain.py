"""Steps of the plain process without drafts: the baseline of speculation."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from truedraft.core.noise import Purpose
from truedraft.machine import wait_for
from truedraft.process.base import Process
from truedraft.process.chains import Chains, Seen
from truedraft.process.drafts import Known
from truedraft.process.noise import RoundNoise


def plain_steps(
    process: Process, chains: Chains, active: Tensor, count: int, watch: Callable[[Seen], None] | None
) -> tuple[int, float, float]:
    """Run up to `count` steps of the active chains in place, with one call of the costly function each.

    It stops before a step that fails for any of them. Each chain must have at least `count` steps left.

    Returns:
        The number of steps made; seconds of the costly function and of everything in one of them, without the first,
        which makes the noise of all.
    """
    states, at = chains.states[active], chains.at[active]
    calls = chains.calls[active] + torch.arange(count, device=at.device)[:, None]
    dtype = states.dtype if states.is_floating_point() else torch.float64
    noise = RoundNoise(chains.roots[active], at, calls, count, dtype, frozenset({Purpose.BONUS}))
    made, target_s, first = 0, 0.0, time.perf_counter()
    last: list[tuple[Tensor, Tensor, Tensor]] = []
    for number in range(count):
        here = noise.at(number)
        points = process.points(states, at, here)
        began = time.perf_counter()
        try:
            outputs = process.evaluate(points, at)
        except Exception:
            break
        wait_for(outputs.device)
        target_s += time.perf_counter() - began
        if len(outputs) != len(points):
            break
        outcomes = process.draw(states, at, outputs, here, Purpose.BONUS)
        if torch.isnan(outputs).any() or not process.sound(outcomes).all():
            break
        if watch is not None:
            watch(Seen(active, at, states, outputs, None, None, outcomes))
        last = [*last[-1:], (points, outputs, at)]
        states, at, made = process.moved(states, at, outcomes), at + 1, made + 1
        if chains.path is not None:
            chains.path[active, at] = states
        if made == 1 < count:
            target_s, first = 0.0, time.perf_counter()
    timed = max(made - 1, 1)
    seconds = target_s / timed, (time.perf_counter() - first) / timed
    if made:
        chains.states[active], chains.at[active] = states, at
        chains.calls[active] += made
        chains.rounds += made
        chains.evaluations += made * len(active)
        points, outputs, steps = (torch.stack(each) for each in zip(*last, strict=True))
        if chains.known is None:
            chains.known = Known.nothing(points[0], outputs[0], len(chains.states))
        chains.known.add(active, points, outputs, steps, torch.full_like(at, len(last)))
    return made, *seconds
