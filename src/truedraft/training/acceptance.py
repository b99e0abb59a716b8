"""What a drafter brings in the very engine that serves it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from truedraft.core.counters import Counters
from truedraft.core.sampling import SamplingParams
from truedraft.engine import Engine
from truedraft.errors import TrainingError

if TYPE_CHECKING:
    from truedraft.drafters.base import Drafter
    from truedraft.models.base import LanguageModel

_AT_ONCE = 4  # prompts that are answered together where there is little time
_TOKENS = 128  # of an answer, half the context at the most


def count_answers(
    target: LanguageModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    within_s: float | None = None,
) -> Counters:
    """Answer prompts with a drafter, losslessly, and count.

    Args:
        target: the drafter's.
        drafter: that was trained.
        prompts: token ids; one that leaves no room in the target's context keeps its last tokens.
        temperature: of the requests.
        within_s: seconds after which no further prompts are answered; None answers all of them.

    Raises:
        TrainingError: the engine failed.
        CompositionError: the drafter does not fit the target.
    """
    max_tokens = min(_TOKENS, target.context_length // 2)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    most = target.context_length - max_tokens
    fitting = [list(prompt)[-most:] for prompt in prompts]
    at_once = max(1, len(fitting)) if within_s is None else _AT_ONCE
    stats, engine, began = Counters(), Engine(target, drafter), time.monotonic()
    for first in range(0, len(fitting), at_once):
        if within_s is not None and first and time.monotonic() - began >= within_s:
            break
        for answer in engine.generate(fitting[first : first + at_once], params):
            if answer.error is not None or answer.warnings:
                raise TrainingError(f"an answer with what was trained failed: {answer.error or answer.warnings[0]}")
            stats = stats + answer.stats
    return stats
