"""Holds a kept cost curve to what the steps of an engine take, so that a disturbed minute does not decide for ever."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from truedraft.core.sampling import SamplingParams
from truedraft.engine import Engine, StepRecord
from truedraft.theory import TargetCost

STEPS = 50
_PARTED = 0.15
_PROMPT_TOKENS = 128


def parts(ratio: float) -> bool:
    """Whether what steps take and what the curve says are too far apart: by more than 15 %, either way."""
    return not 1.0 / (1.0 + _PARTED) <= ratio <= 1.0 + _PARTED


class CurveCheck:
    """Listens to an engine's steps (`Engine.listeners`) and tells how their forwards stand to V.

    Args:
        forwards: V(rows, contexts), in seconds.
        tell: given the median of measured / V after every 50 steps without a part of a prompt.
    """

    def __init__(self, forwards: TargetCost, tell: Callable[[float], None]) -> None:
        self._forwards = forwards
        self._tell = tell
        self._ratios: list[float] = []

    def __call__(self, step: StepRecord) -> None:
        """A step was made."""
        expected_s = 0.0 if step.prefill else self._forwards(step.rows, step.contexts)
        if expected_s <= 0.0:
            return
        self._ratios.append(step.target_s / expected_s)
        if len(self._ratios) == STEPS:
            ratio = median(self._ratios)
            self._ratios.clear()
            self._tell(ratio)


def ratio_of_steps(engine: Engine, forwards: TargetCost) -> float | None:
    """The median of measured / V over 50 steps that are made for it; None where no answer is so long.

    Args:
        engine: does nothing else.
        forwards: V of its target.
    """
    told: list[float] = []
    vocab = engine.target.vocab_size
    prompt = [place * 7919 % vocab for place in range(max(1, min(_PROMPT_TOKENS, engine.target.context_length // 2)))]
    check = CurveCheck(forwards, told.append)
    engine.listeners.append(check)
    try:
        engine.generate([prompt], SamplingParams(max_tokens=STEPS + 1, ignore_eos=True))
    finally:
        engine.listeners.remove(check)
    return told[0] if told else None
