"""Answers by noise that hangs on key and prompt, not on the order in which requests come."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from truedraft import Engine, SamplingParams
from truedraft.engine import Answer


def answers_of(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams], key: int = 0
) -> list[Answer]:
    """Answers to prompts that are asked together; without a seed each draws by its own prompt's noise."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    requests = []
    for prompt, own in zip(prompts, each, strict=True):
        request = engine.prepare(prompt, own)
        if own.seed is None:
            request.noise_seed = zlib.crc32(repr((key, prompt)).encode())
        engine.enqueue(request)
        requests.append(request)
    while engine.step():
        pass
    return [request.pieces[-1].answer for request in requests]  # type: ignore[misc]
