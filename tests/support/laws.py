"""Distributions of whole answers by definition, and answers of an engine held to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from support.chi_square import p_value
from truedraft import Engine, SamplingParams

Law = Mapping[tuple[int, ...], float]


def law_of(probs_after: Callable[[tuple[int, ...]], Sequence[float]], length: int, ends: Collection[int] = ()) -> Law:
    """The distribution of answers of `length` tokens, or fewer where one of `ends` comes, from that of a next token."""
    ended: dict[tuple[int, ...], float] = {}
    going = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for answer, mass in going.items():
            for token, chance in enumerate(probs_after(answer)):
                if chance > 0.0 and token in ends:
                    ended[answer] = ended.get(answer, 0.0) + mass * chance
                elif chance > 0.0:
                    longer[*answer, token] = mass * chance
        going = longer
    return ended | going


def p_value_of_answers(
    engine: Engine, prompt: list[int], params: SamplingParams, law: Law, answers: int, together: int = 64
) -> float:
    """How likely counts as far from the law are, of answers that follow it; 0 where one is impossible."""
    counts = dict.fromkeys(law, 0)
    for _ in range(0, answers, together):
        for answer in engine.generate([prompt] * together, params):
            for one in (answer, *answer.others):
                if (tokens := tuple(one.token_ids)) not in counts:
                    return 0.0
                counts[tokens] += 1
    return p_value(np.array(list(counts.values())), np.array(list(law.values())))
