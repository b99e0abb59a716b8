"""What a target wrote, as trees of heads are fitted to it and compared on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from truedraft.measure.replay import Trace, TraceReplay

Half = TypeVar("Half")

TREE_TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
"""At which temperature the answers are drawn that each kind of tree is counted on."""
CALIBRATED, RAW = "calibrated", "raw"
"""What trees are chosen by at each step: survival fitted to text, or the heads' own probabilities."""
BUDGETS = (8, 32)
"""Numbers of nodes that reports speak of."""


class WrittenText(Protocol):
    """What a target wrote, at several temperatures."""

    def traces(self, temperature: float) -> Sequence[Trace]:
        """The answers that were drawn at one of them."""


def cross_replayed(
    halves: Sequence[Half], ways: Callable[[Half, Half], Mapping[str, TraceReplay]], budgets: Sequence[int]
) -> dict[str, float]:
    """Tokens per target call of several ways to make trees, the mean over node budgets and both halves of a text.

    Args:
        halves: two, each with something to replay.
        ways: by name the replay of a way that was fitted to the first argument, along the second.
        budgets: numbers of nodes.
    """
    found: dict[str, float] = {}
    for fitted, other in (halves, halves[::-1]):
        for way, replay in ways(fitted, other).items():
            for nodes in budgets:
                found[way] = found.get(way, 0.0) + replay.mean_acceptance_length(nodes)
    return {way: total / (len(halves) * len(budgets)) for way, total in found.items()}


def raw_is_kept(compared: Mapping[str, float], temperature: float, *, least: float = 0.01) -> bool:
    """Whether trees are chosen by the heads' own probabilities.

    At temperature 1 heads learned the very distributions that tokens are drawn from, so there these stay unless
    calibration brings a hundredth more; at other temperatures unless it brings less.

    Args:
        compared: see `CountedTree.compared`.
        temperature: of the requests.
        least: share of what raw probabilities bring.
    """
    least = least if temperature else 0.0
    return bool(compared) and compared[CALIBRATED] < compared[RAW] * (1.0 + least)


Chunk: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Positions: their vectors `[rows, width]`, the tokens `[rows]` drawn from these, and those behind `[rows, length]`; -1
where none is drafted."""


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
            waiting.append((trace.hidden[here], trace.tokens[here], _drafted_behind(trace, places, length)))
            size += len(places)
    if waiting:
        yield _together(waiting)


def _together(parts: Sequence[Chunk]) -> Chunk:
    hidden, drawn, tokens = zip(*parts, strict=True)
    return torch.cat(hidden), torch.cat(drawn), torch.cat(tokens)


def _drafted_behind(trace: Trace, places: Tensor, length: int) -> Tensor:
    """The tokens that steps at some positions of a trace may draft: `[places, length]`; -1 where none is drafted.

    Not the last one, for the step that emits it ends the answer.
    """
    after = places[:, None] + 1 + torch.arange(length)
    return torch.where(after < trace.steps, trace.tokens.cpu()[after.clamp(max=trace.steps)], -1)
