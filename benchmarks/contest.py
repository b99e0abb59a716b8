"""Engines that answer the same requests in turns, and the ratio of their speeds with its interval.

A round is one pass over all groups of requests, by all engines, as `truedraft bench` takes turns. Rounds should lie
apart: this kind of machine changes for half a minute at a time (plain decoding of the embedded target was seen to go
from 0.9 to 1.3 ms a token while speculation stayed as it was), and turns of one moment agree with each other far better
than with the next minute. So several contests are visited in turns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from scipy import stats

from truedraft.errors import ModelError
from truedraft.measure.bench import Group, Row, System
from truedraft.measure.bench.runs import rotated, take_turn


def one_round(systems: Sequence[System], groups: Sequence[Group], number: int) -> list[Row]:
    """All groups once; the system that goes first changes from group to group and from round to round.

    Raises:
        ModelError: a request failed, or went on undrafted.
    """
    rows = []
    for first, group in enumerate(groups, start=number):
        for place, system in enumerate(rotated(systems, first)):
            rows.append(take_turn(system, group, number, place))
            if rows[-1].output.warnings:
                raise ModelError(rows[-1].output.warnings[0])
    return rows


def log_ratios(rows: Sequence[Row], of: str, over: str, *, decoding: bool = False) -> list[float]:
    """Of each round the mean over its groups of log(tokens per second by one system / by the other)."""
    speed = attrgetter("decode_tokens_per_s" if decoding else "tokens_per_s")
    logs: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        logs[row.run][row.system].append(math.log(speed(row)))
    return [float(np.mean(each[of]) - np.mean(each[over])) for each in logs.values()]


def estimate(
    rows: Sequence[Row], of: str, over: str, *, decoding: bool = False, median: bool = False
) -> dict[str, Any]:
    """How much faster one system is than another: above 1, it is.

    Args:
        rows: of whole rounds, at least one.
        of: name of the system.
        over: name of the one that it is held against.
        decoding: of the time behind the prompts.
        median: the median over rounds with a bootstrap's interval, where single rounds may be far off; else the
            geometric mean with Student's t.

    Returns:
        The ratio and its 95 % interval, "half_width" being half of it; None where there is one round.
    """
    logs = log_ratios(rows, of, over, decoding=decoding)
    middle = math.exp(np.median(logs) if median else np.mean(logs))
    if len(logs) < 2:
        return {"ratio": middle, "low": None, "high": None, "half_width": None, "rounds": len(logs)}
    if median:
        drawn = np.median(np.random.default_rng(0).choice(logs, (1_000, len(logs))), axis=1)
        low, high = np.quantile(np.exp(drawn), (0.025, 0.975)).tolist()
    else:
        half = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
        low, high = middle * math.exp(-half), middle * math.exp(half)
    values = {"ratio": middle, "low": low, "high": high, "half_width": (high - low) / 2}
    return {name: round(value, 4) for name, value in values.items()} | {"rounds": len(logs)}
