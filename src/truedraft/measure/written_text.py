"""A target's own text, on which trees of heads are fitted and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from truedraft.measure.replay import Trace, TraceReplay

Half = TypeVar("Half")

TREE_TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
"""Temperature of the answers on which each kind of tree is fitted."""
CALIBRATED, RAW = "calibrated", "raw"
"""Probabilities by which trees are chosen at each step: survival fitted to text, or the heads' own."""
BUDGETS = (8, 32)
"""Numbers of nodes in reports."""


class WrittenText(Protocol):
    """A target's own text at several temperatures."""

    def traces(self, temperature: float) -> Sequence[Trace]:
        """The answers sampled at a temperature."""


def cross_replayed(
    halves: Sequence[Half], ways: Callable[[Half, Half], Mapping[str, TraceReplay]], budgets: Sequence[int]
) -> dict[str, float]:
    """Tokens per target call of several ways to make trees, the mean over node budgets and both halves of a text.

    Args:
        ways: replays by name of ways fitted on the first argument, along the second.
    """
    found: dict[str, float] = {}
    for fitted, other in (halves, halves[::-1]):
        for way, replay in ways(fitted, other).items():
            for nodes in budgets:
                found[way] = found.get(way, 0.0) + replay.mean_acceptance_length(nodes)
    return {way: total / (len(halves) * len(budgets)) for way, total in found.items()}


def raw_is_kept(compared: Mapping[str, float], temperature: float, *, least: float = 0.01) -> bool:
    """Whether trees are chosen by the heads' own probabilities.

    At temperature 1 heads were trained on the distributions that tokens are sampled from, so calibrated ones are used
    only if they gain a hundredth; at other temperatures they are used unless they lose.

    Args:
        least: smallest relative gain of calibration at temperature 1.
    """
    least = least if temperature else 0.0
    return bool(compared) and compared[CALIBRATED] < compared[RAW] * (1.0 + least)


Chunk: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Positions: their hidden states `[rows, width]`, the tokens `[rows]` sampled from these, and the following tokens
`[rows, length]`; -1 where none is drafted."""


def chunks_of(traces: Sequence[Trace], length: int, rows: int) -> Iterator[Chunk]:
    """Positions of all traces, at most `rows` at a time, each with the `length` tokens that a step there may draft."""
    waiting: list[Chunk] = []
    size = 0
    for trace in traces:
        for first in range(0, trace.steps, rows):
            places = torch.arange(first, min(first + rows, trace.steps))
            if size + len(places) > rows and waiting:
                yield _together(waiting)
                waiting, size = [], 0
            here = slice(first, first + len(places))
            waiting.append((trace.hidden[here], trace.tokens[here], _drafted_after(trace, places, length)))
            size += len(places)
    if waiting:
        yield _together(waiting)


def _together(parts: Sequence[Chunk]) -> Chunk:
    hidden, drawn, tokens = zip(*parts, strict=True)
    return torch.cat(hidden), torch.cat(drawn), torch.cat(tokens)


def _drafted_after(trace: Trace, places: Tensor, length: int) -> Tensor:
    """The tokens `[places, length]` that steps at some positions may draft; -1 where none is drafted.

    Without the last one, because the step that emits it ends the answer.
    """
    after = places[:, None] + 1 + torch.arange(length)
    return torch.where(after < trace.steps, trace.tokens.cpu()[after.clamp(max=trace.steps)], -1)
