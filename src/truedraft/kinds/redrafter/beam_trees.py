"""Trees of a recurrent head's beams for the requests of a step, in one recorded graph if the target is recorded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.tree import TokenTree
from truedraft.drafters.heads.acceptance import (
    AcceptanceOdds,
    OddsOfRequests,
    Scores,
    as_they_are,
    numbers_of,
    scores_for,
)
from truedraft.drafters.heads.base import trees_of
from truedraft.kinds.redrafter.beams import beam_search, merge, with_dropped
from truedraft.kinds.redrafter.module import RedrafterRunner
from truedraft.models.backends.graphs.replay import Outputs, RecordedFunction, Recorder


class BeamTrees:
    """Searches and merges beams; also runs single steps of the head, for beams that are drawn on the host.

    Recorded searches always have the same length, so that all budgets share a graph; trees are cut to their depths when
    they are merged.

    Args:
        recorder: makes the graphs; None: nothing is recorded.
    """

    def __init__(self, runner: RedrafterRunner, length: int, recorder: Recorder | None) -> None:
        self._runner = runner
        self._length = length
        self._is_recorded = recorder is not None
        self._by_numbers = RecordedFunction(self._merged_by_numbers, recorder)
        self._first = RecordedFunction(self._read_first, recorder)
        self._next = RecordedFunction(self._read_next, recorder)

    @property
    def warmups(self) -> int:
        """Number of calls so far that were slower than later ones of the same shape."""
        return sum(each.warmups for each in (self._by_numbers, self._first, self._next))

    def trees(
        self,
        hidden: Tensor,
        drawn: Tensor,
        depths: Sequence[int],
        odds: Sequence[AcceptanceOdds | None],
        beams: int,
        nodes: int,
    ) -> list[TokenTree]:
        """The tree of each request; the host waits once, for their shapes.

        Args:
            hidden: `[requests, width]`: hidden states from which the requests' last tokens were drawn.
            drawn: `[requests]`, int64: those tokens, on the target's device.
            depths: of the trees, 1 to `length`; deeper ones do not change the others.
            odds: scores of each request's paths; None: the head's probabilities.
        """
        device = hidden.device
        deep = transfers.upload(depths, device)
        if not self._is_recorded:
            return trees_of(*self._merged(hidden, drawn, deep, scores_for(odds, device), beams, max(depths), nodes))
        length = self._length
        # Numbers per request, so that all combinations of requests share a graph.
        if any(odds):
            numbers = transfers.upload(numbers_of(odds, length, beams), device)
        else:
            numbers = torch.empty(len(depths), 0, device=device)
        return trees_of(*self._by_numbers((hidden, drawn, deep, numbers), beams, length, nodes))

    def start(self, hidden: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Contexts and states `[requests, ...]` after drawn tokens, and the logits `[requests, vocab]` there."""
        context, state, logits = self._first((hidden, drawn))
        return context, state, logits

    def behind(self, context: Tensor, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """States `[rows, ...]` one token further, and the logits `[rows, vocab]` there."""
        state, logits = self._next((context, state, tokens))
        return state, logits

    def _merged_by_numbers(
        self, hidden: Tensor, drawn: Tensor, depths: Tensor, numbers: Tensor, beams: int, length: int, nodes: int
    ) -> Outputs:
        scores = OddsOfRequests(numbers) if numbers.numel() else as_they_are
        return self._merged(hidden, drawn, depths, scores, beams, length, nodes)

    def _merged(
        self, hidden: Tensor, drawn: Tensor, depths: Tensor, scores: Scores, beams: int, length: int, nodes: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        growing = beam_search(self._runner, hidden, drawn, beams, scores)
        with torch.inference_mode():
            merged = merge(with_dropped(list(itertools.islice(growing, length))), nodes, depths)
        return merged.tokens, merged.parents, merged.counts

    def _read_first(self, hidden: Tensor, drawn: Tensor) -> Outputs:
        context, state = self._runner.context(hidden), self._runner.advance(None, drawn)
        return context, state, self._runner.logits(context, state)

    def _read_next(self, context: Tensor, state: Tensor, tokens: Tensor) -> Outputs:
        state = self._runner.advance(state, tokens)
        return state, self._runner.logits(context, state)
