"""Trace replay: step along a target's own text as decoding would, each step starting after the tokens accepted before.

The candidates of heads are deterministic, so along a trace of the target's own samples nothing is random, and the
replayed mean acceptance length is exactly that of an engine at the temperature at which the trace was sampled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.drafters.heads.acceptance import RAW as RAW_ODDS
from truedraft.drafters.heads.acceptance import AcceptanceOdds, Odds, log_odds
from truedraft.errors import DataError

Half = TypeVar("Half")
Chunk: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Positions: their hidden states `[rows, width]`, the tokens `[rows]` sampled from these, and the following tokens
`[rows, length]`; -1 where none is drafted."""

CURVE_NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # numbers of nodes at which trees are replayed
NEVER = 1 << 40  # a number of nodes larger than any tree's
TREE_TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}  # temperature of the answers on which each kind of tree is fitted
CALIBRATED, RAW = "calibrated", "raw"
"""Probabilities by which trees are chosen at each step: survival fitted to text, or the heads' own."""
BUDGETS = (8, 32)  # numbers of nodes in reports
RANKS = 32  # guesses used to fit survival; later ones follow the same line
POSITIONS = 4000  # positions that are enough for five numbers; more are subsampled evenly
_PRIOR = 1.0  # weight of the prior, which is the estimate for depths that no text reaches
_ROUNDS = 40


@dataclass(frozen=True)
class Trace:
    """One answer of the target, as heads see it.

    At a step with last token `tokens[i]`, head k (from 0) reads `hidden[i]` and guesses `tokens[i + 1 + k]`.

    Raises DataError if there are not as many vectors as tokens.
    """

    tokens: Tensor  # `[n]`, int64: the first is the one that the prompt's forward gives
    hidden: Tensor  # `[n, width]`: inputs of the target's LM head, each the one that gave its token
    stopped: bool = False  # whether the last token ended the answer and is not a part of it

    def __post_init__(self) -> None:
        if self.tokens.dim() != 1 or self.hidden.dim() != 2 or len(self.tokens) != len(self.hidden):
            raise DataError(
                "a trace needs tokens [n] and as many vectors [n, width], got shapes "
                f"{list(self.tokens.shape)} and {list(self.hidden.shape)}"
            )

    @property
    def steps(self) -> int:
        """Most steps that decoding it can take, and its positions: one for each token but the last."""
        return max(0, len(self.tokens) - 1)


def starts_of(traces: Sequence[Trace]) -> tuple[int, ...]:
    """The first position of each trace in their concatenation; then the number of positions."""
    return tuple(itertools.accumulate((trace.steps for trace in traces), initial=0))


def tree_depths(traces: Sequence[Trace], most: int) -> NDArray[Any]:
    """Largest depth of a tree at each position `[positions]`, int64, 0 to `most`: where an answer ends at its length,
    the engine drafts only what is left.
    """
    found = [np.zeros(0, dtype=np.int64)]
    for trace in traces:
        left = np.arange(trace.steps - 1, -1, -1)
        found.append(np.full_like(left, most) if trace.stopped else left.clip(max=most))
    return np.concatenate(found)


@dataclass(frozen=True)
class TraceReplay:
    """At each position of some traces, the fewest nodes with which a drafter's tree contains the target's tokens.

    Worked example, one trace of 5 tokens and trees of one level: the fewest nodes (1), (never), (2), (never) say that
    the first node was right at position 0, none at 1, and the second at 2. A tree of one node accepts 1 token at 0, so
    the next step starts at 2; it accepts none, and neither does the one at 3. Three steps emit 4 tokens: 1.33 each.
    """

    fewest: Tensor  # `[positions, depth]`, int64, down to each depth; `NEVER` where none does, or nothing is drafted
    starts: tuple[int, ...]
    most: int

    def accepted(self, nodes: int) -> Tensor:
        return (self.fewest <= nodes).cumprod(dim=1).sum(dim=1)

    def visited(self, nodes: int) -> Tensor:
        lengths = (self.accepted(nodes) + 1).tolist()  # a step emits one more than it accepts
        found: list[int] = []
        for place, end in itertools.pairwise(self.starts):
            while place < end:
                found.append(place)
                place += lengths[place]
        return torch.tensor(found, dtype=torch.int64)

    def mean_acceptance_length(self, nodes: int) -> float:
        """Tokens per target call of decoding with trees of `nodes` nodes; NaN where no trace has two tokens."""
        return len(self.fewest) / len(self.visited(nodes)) if len(self.fewest) else math.nan

    def points(self, nodes: Iterable[int] = CURVE_NODES) -> tuple[tuple[int, float], ...]:
        """(nodes, mean acceptance length) for some numbers of nodes, without those above `most`."""
        return tuple((each, self.mean_acceptance_length(each)) for each in nodes if each <= self.most)


class WrittenText(Protocol):
    """A target's own text at several temperatures."""

    def traces(self, temperature: float) -> Sequence[Trace]: ...


def cross_replayed(
    halves: Sequence[Half], ways: Callable[[Half, Half], Mapping[str, TraceReplay]], budgets: Sequence[int]
) -> dict[str, float]:
    """Tokens per target call of several ways to make trees, the mean over node budgets and both halves of a text.
    `ways` are replays by name, fitted on the first argument, along the second.
    """
    found: dict[str, float] = {}
    for fitted, other in (halves, halves[::-1]):
        for way, replay in ways(fitted, other).items():
            for nodes in budgets:
                found[way] = found.get(way, 0.0) + replay.mean_acceptance_length(nodes)
    return {way: total / (len(halves) * len(budgets)) for way, total in found.items()}


def raw_is_kept(compared: Mapping[str, float], temperature: float, *, least: float = 0.01) -> bool:
    """Whether trees are chosen by the heads' own probabilities.

    At temperature 1 calibrated ones are used only if they gain a hundredth; at others unless they lose.
    """
    least = least if temperature else 0.0
    return bool(compared) and compared[CALIBRATED] < compared[RAW] * (1.0 + least)


def chunks_of(traces: Sequence[Trace], length: int, rows: int) -> Iterator[Chunk]:
    """Positions of all traces, at most `rows` at a time, each with the `length` tokens that a step there may draft."""
    waiting: list[Chunk] = []
    for trace in traces:
        for first in range(0, trace.steps, rows):
            places = torch.arange(first, min(first + rows, trace.steps))
            if waiting and sum(len(drawn) for _, drawn, _ in waiting) + len(places) > rows:
                yield _joined(waiting)
                waiting = []
            after = places[:, None] + 1 + torch.arange(length)  # an answer's last token is not drafted
            drafted = torch.where(after < trace.steps, trace.tokens.cpu()[after.clamp(max=trace.steps)], -1)
            here = slice(first, first + len(places))
            waiting.append((trace.hidden[here], trace.tokens[here], drafted))
    if waiting:
        yield _joined(waiting)


def _joined(parts: Sequence[Chunk]) -> Chunk:
    hidden, drawn, tokens = map(torch.cat, zip(*parts, strict=True))
    return hidden, drawn, tokens


def fit_survival(log_probs: Tensor, ranks: Tensor) -> AcceptanceOdds:
    """The most likely odds of acceptance at each depth, from positions at which the text followed the guesses above it.

    Args:
        log_probs: `[depth, positions, guesses]`: log probabilities of the heads' guesses, falling.
        ranks: `[positions, depth]`, int64, of the true tokens; the number of guesses or more where none was right;
            below 0 where no token is drafted.
    """
    found = []
    followed = torch.ones(len(ranks), dtype=torch.bool)
    for own, of_true in zip(log_probs, ranks.T, strict=True):
        rows = (followed & (of_true >= 0)).nonzero()[:, 0]
        found.append(_fit(own[rows], of_true[rows]))
        followed = followed & (of_true >= 0) & (of_true < own.shape[-1])
    return AcceptanceOdds(tuple(found))


def _fit(log_probs: Tensor, ranks: Tensor) -> Odds:
    every = max(1, -(-len(ranks) // POSITIONS))
    own, ranks = log_odds(log_probs[::every, :RANKS].double()), ranks[::every]
    number = torch.arange(own.shape[1])
    first = (number == 0).double().expand_as(own)
    columns = [first, 1.0 - first, number.clamp(min=1).double().log().expand_as(own), own, (1.0 - first) * own[:, :1]]
    known = torch.stack(columns, dim=-1).flatten(0, 1)  # [guesses, 5]
    right = (ranks[:, None] == number).double().flatten()
    free = list(range(5))
    while True:
        odds = _logistic(known, right, free)
        wrong = [name for name, sign in ((2, -1.0), (3, 1.0)) if odds[name] * sign < 0.0]
        if not wrong:
            return Odds(*odds)
        free = [name for name in free if name not in wrong]


def _logistic(known: Tensor, right: Tensor, free: list[int]) -> list[float]:
    """Newton's method with a weak prior at the raw odds; coefficients not in `free` are 0."""
    prior = torch.tensor(RAW_ODDS, dtype=torch.float64)[free]
    x, found = known[:, free], prior.clone()
    for _ in range(_ROUNDS):
        chance = (x @ found).sigmoid()
        slope = x.T @ (chance - right) + _PRIOR * (found - prior)
        bend = (x * (chance * (1.0 - chance))[:, None]).T @ x + _PRIOR * torch.eye(len(free), dtype=torch.float64)
        step = torch.linalg.solve(bend, slope)
        step = step * min(1.0, 4.0 / max(float(step.abs().max()), 1e-9))  # far off, a whole step may lead astray
        found = found - step
        if float(step.abs().max()) < 1e-8:
            break
    odds = torch.zeros(5, dtype=torch.float64)
    odds[free] = found
    return [float(each) for each in odds]
