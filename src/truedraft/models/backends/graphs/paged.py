"""Forwards of segments with caches in pages, recorded once for each bucket of shapes and replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor

from truedraft.errors import CacheError
from truedraft.models.attention import AttentionPattern
from truedraft.models.backends.graphs.attention import attention_for, gathered_attention
from truedraft.models.backends.graphs.batch import Inputs, PagedBatch, PagedSegment, load_in_a_row
from truedraft.models.backends.graphs.replay import Layers, Outputs, Recorder, Recordings, Work
from truedraft.models.base import Segment
from truedraft.models.cache import Pages, PageTable
from truedraft.models.llama import RotaryTable

MOST_RECORDED_TOKENS = 64
"""New tokens of one request, above which a forward is not recorded: it is a chunk of a prompt, bound by arithmetic."""
MOST_RECORDINGS = 256
_MOST_RECORDED_ROWS = 1024
"""Rows of one recording; a larger batch runs in parts."""

Draft: TypeAlias = Callable[[list[Inputs], list[Tensor]], Outputs]
"""Forwards in sequence, from the inputs of each and further numbers `[requests, ...]`, padding included."""


class PagedForward:
    """Runs forwards eagerly, or recorded for each bucket that repeats; None as `recorder` records nothing.

    `rotary` grows with longer texts, and `start` is added to all positions. `vectors` `[width]` is one row of those
    that are read in addition to tokens; None where there are none.
    """

    def __init__(
        self,
        pages: Pages,
        forward: Callable[[Inputs, Layers], Outputs],
        recorder: Recorder | None,
        patterns: Sequence[AttentionPattern],
        rotary: RotaryTable,
        start: int = 0,
        vectors: Tensor | None = None,
    ) -> None:
        self.pages = pages
        self.recordings: Recordings[tuple[list[Inputs], list[Tensor]]] = Recordings(recorder, MOST_RECORDINGS)
        self._forward, self._patterns, self._vectors = forward, patterns, vectors
        self._rotary, self._start = rotary, start
        # The kernel takes segments of any lengths together without padding; otherwise long ones run by themselves.
        self._together = attention_for(pages.device, pages.width) is not gathered_attention

    def run(self, segments: Sequence[Segment], layers: Layers = (), vectors: Tensor | None = None) -> Outputs:
        """Rows of all segments in order, with outputs of `layers`; `vectors` `[total, width]`. CacheError if full."""
        with self.pages.lock, _on(self.pages.device):
            parts = self._placed(segments, 0, vectors)
            groups = _groups([part.count for part in parts], together=self._together)
            outputs = [self._run([parts[number] for number in group], layers) for group in groups]
        if len(groups) == 1:
            return outputs[0]
        rows: dict[int, Outputs] = {}  # by segment
        for group, output in zip(groups, outputs, strict=True):
            counts = [len(segments[number].rows) for number in group]
            rows.update(zip(group, zip(*(each.split(counts) for each in output), strict=True), strict=True))
        return tuple(torch.cat(each) for each in zip(*(rows[number] for number in range(len(parts))), strict=True))

    def run_levels(
        self,
        segments: Sequence[Segment],
        levels: int,
        key: Hashable,
        draft: Draft,
        numbers: Sequence[Tensor],
        beams: int = 1,
        nodes: int = 0,
        vectors: Tensor | None = None,
    ) -> Outputs:
        """Run forwards in sequence as one recording, each of which chooses the tokens of the next.

        Args:
            segments: tokens of the first forward.
            levels: number of forwards; see `PagedBatch.levels` for `beams` and `nodes`.
            key: identifies `draft` among the recordings.
            numbers: `[requests, ...]` each, passed to `draft`.
            vectors: `[total, width]`, inputs of the first forward in addition to tokens.
        """
        with self.pages.lock, _on(self.pages.device):
            parts = self._placed(segments, (levels - 1) * beams, vectors)
            rows = [min(max(part.count, beams), MOST_RECORDED_TOKENS) for part in parts]
            outputs = []
            for group in _groups(rows, together=self._together):
                own = slice(group[0], group[-1] + 1)
                batches = PagedBatch.levels(parts[own], self._patterns, levels, beams, nodes)
                work = self._work(batches, [each[own] for each in numbers], draft, len(group))
                outputs.append(self._run_recorded(batches, key, work))
        return outputs[0] if len(outputs) == 1 else tuple(map(torch.cat, zip(*outputs, strict=True)))

    def _placed(self, segments: Sequence[Segment], more: int, vectors: Tensor | None) -> list[PagedSegment]:
        inputs = [None] * len(segments) if vectors is None else vectors.split([len(each.tokens) for each in segments])
        parts = [PagedSegment(each, self._table_of(each), own) for each, own in zip(segments, inputs, strict=True)]
        for segment in segments:
            segment.cache.reserve(len(segment.shape) + more, segment.written)
        self._rotary.reach(max(part.end + part.dropped for part in parts) + more - 1 + self._start)
        return parts

    def _table_of(self, segment: Segment) -> PageTable:
        table = segment.cache.storage
        if not isinstance(table, PageTable) or table.pages is not self.pages:
            raise CacheError("this cache was made by another model; take one with this model's new_cache()")
        return table

    def _run(self, parts: Sequence[PagedSegment], layers: Layers) -> Outputs:
        is_long = max(part.count for part in parts) > MOST_RECORDED_TOKENS
        batch = (PagedBatch.exact if is_long else PagedBatch.recorded)(parts, self._patterns)
        work = self._work([batch], (), lambda inputs, _: self._forward(inputs[0], layers), batch.logit_rows)
        return work.run() if is_long else self._run_recorded([batch], layers, work)

    def _run_recorded(
        self, batches: Sequence[PagedBatch], key: Hashable, work: Work[tuple[list[Inputs], list[Tensor]]]
    ) -> Outputs:
        addresses = self.pages.generation, self._rotary.table.data_ptr()
        return self.recordings.run((*(batch.bucket for batch in batches), key), work, addresses)

    def _work(
        self, batches: Sequence[PagedBatch], numbers: Sequence[Tensor], draft: Draft, rows: int
    ) -> Work[tuple[list[Inputs], list[Tensor]]]:
        buckets = [batch.bucket for batch in batches]

        def make() -> tuple[list[Inputs], list[Tensor]]:
            inputs = Inputs.in_a_row(buckets, len(self._patterns), self.pages.device, self._vectors)
            return inputs, [each.new_zeros(buckets[0].requests, *each.shape[1:]) for each in numbers]

        def load(held: tuple[list[Inputs], list[Tensor]]) -> None:
            load_in_a_row(held[0], batches)
            for memory, given in zip(held[1], numbers, strict=True):
                memory[: len(given)].copy_(given)

        return Work(make, load, lambda held: draft(*held), rows)


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _groups(counts: Sequence[int], *, together: bool) -> list[list[int]]:
    """Indices of the segments that run together, from their numbers of new tokens; long ones by themselves.

    >>> _groups([3, 300, 1], together=False), _groups([64] * 17, together=True)[1], _groups([3, 300], together=True)
    ([[0, 2], [1]], [16], [[0, 1]])
    """
    if together and max(counts) > MOST_RECORDED_TOKENS:
        return [list(range(len(counts)))]
    groups: list[list[int]] = []
    long = [[number] for number, count in enumerate(counts) if count > MOST_RECORDED_TOKENS]
    rows = 0
    for number, count in enumerate(counts):
        if count > MOST_RECORDED_TOKENS:
            continue
        rows += count
        if not groups or rows > _MOST_RECORDED_ROWS:
            groups.append([])
            rows = count
        groups[-1].append(number)
    return groups + long
