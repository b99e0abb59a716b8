"""Runs forwards over pages, or other functions of tensors, eagerly, or recorded once for each shape and replayed."""

from __future__ import annotations

import gc
import logging
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from truedraft.core.inference import in_inference_mode
from truedraft.errors import CacheError
from truedraft.models.attention import AttentionPattern
from truedraft.models.backends.graphs.attention import attention_for, gathered_attention
from truedraft.models.backends.graphs.batch import Inputs, PagedBatch, PagedSegment, load_in_a_row
from truedraft.models.base import Segment
from truedraft.models.cache import Pages, PageTable
from truedraft.models.llama import RotaryTable

_log = logging.getLogger(__name__)

Outputs: TypeAlias = tuple[Tensor, ...]
"""Logits `[rows, ids]`, vectors before the LM head `[rows, width]`, and the output `[rows, width]` of some layers."""

Layers: TypeAlias = tuple[int, ...]

Held = TypeVar("Held")
"""Inputs at fixed addresses."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded forward: `replay` queues its kernels, which read its inputs and overwrite `outputs`."""

    outputs: Outputs
    replay: Callable[[], None]


class Recorder(ABC):
    """Makes recordings."""

    @abstractmethod
    def record(self, forward: Callable[[], Outputs]) -> Recording:
        """Record a forward, which may run any number of times with the same results, and no other at that time."""

    @abstractmethod
    def forget(self) -> None:
        """Free what the recordings made so far shared; they are no longer used."""


@dataclass(frozen=True, slots=True)
class Work(Generic[Held]):
    """`make` allocates inputs, `load` fills them, `forward` computes outputs of `rows` rows and padding."""

    make: Callable[[], Held]
    load: Callable[[Held], None]
    forward: Callable[[Held], Outputs]
    rows: int

    def run(self) -> Outputs:
        inputs = self.make()
        self.load(inputs)
        return tuple(each[: self.rows] for each in self.forward(inputs))


class Recordings(Generic[Held]):
    """Records work of a shape that repeats, and replays it; without a `recorder` nothing is recorded.

    Many shapes occur once, and recording costs far more than running. So the first work of a shape runs eagerly.
    `warmups` counts such runs and those that recorded. The least recently used of more than `most` is dropped.
    """

    def __init__(self, recorder: Recorder | None, most: int = 64) -> None:
        self._recorder = recorder
        self._most = most
        self._seen: set[Hashable] = set()
        self._unrecorded: set[Hashable] = set()  # because recording them failed
        self._kept: OrderedDict[Hashable, tuple[Held, Recording]] = OrderedDict()
        self._outputs: dict[Hashable, Tensor] = {}
        self._addresses: object = None
        self.warmups = 0

    @property
    def shapes(self) -> list[Hashable]:
        return list(self._kept)

    def run(self, shape: Hashable, work: Work[Held], addresses: object = None) -> Outputs:
        """Run work, and return its rows without padding, owned by the caller.

        Work of one `shape` does the same operations on inputs of the same sizes. `addresses` identify the other memory
        that it uses; recordings made with different ones are dropped.
        """
        if addresses != self._addresses:
            self._addresses = addresses
            self._forget()
        if self._recorder is None or shape in self._unrecorded:
            return work.run()
        if shape not in self._kept:
            self.warmups += 1
        if shape not in self._seen:
            self._seen.add(shape)
            return work.run()
        if shape in self._kept:
            self._kept.move_to_end(shape)
            inputs, recording = self._kept[shape]
            work.load(inputs)
        else:
            try:
                recording = self._record(shape, work, self._recorder)
            except RuntimeError as error:  # such as out of memory, because a recording keeps its memory
                _log.warning("a forward is not recorded (%s); it runs operation by operation", error)
                self._unrecorded.add(shape)
                return work.run()
        recording.replay()
        # Copies: the next replay overwrites the outputs, and a drafter may keep them for longer.
        return tuple(each[: work.rows].clone() for each in recording.outputs)

    def _record(self, shape: Hashable, work: Work[Held], recorder: Recorder) -> Recording:
        inputs = work.make()
        work.load(inputs)
        recording = recorder.record(lambda: self._copied_out(work.forward(inputs)))
        self._kept[shape] = (inputs, recording)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
            self._unrecorded.clear()  # the dropped recording freed memory
        return recording

    def _copied_out(self, outputs: Outputs) -> Outputs:
        """Copy outputs to memory that recordings share, because a recording's own memory is never freed."""
        shared = []
        for number, output in enumerate(outputs):
            key = number, output.shape, output.dtype
            if key not in self._outputs:
                self._outputs[key] = torch.empty_like(output)
            shared.append(self._outputs[key].copy_(output))
        return tuple(shared)

    def _forget(self) -> None:
        self._seen.clear()
        self._unrecorded.clear()
        self._outputs.clear()
        if self._kept and self._recorder is not None:
            self._kept.clear()
            self._recorder.forget()


class RecordedFunction:
    """A function of tensors `[rows, ...]`, recorded for each power of two of rows and each tuple of its numbers.

    Rows of padding hold values of earlier calls. The function must not wait for the device, and tensors that it makes
    must not be kept, because recordings share memory.
    """

    def __init__(self, function: Callable[..., Outputs], recorder: Recorder | None, most: int = 64) -> None:
        self._function = function
        self._is_recorded = recorder is not None
        self._recordings: Recordings[list[Tensor]] = Recordings(recorder, most)

    @property
    def warmups(self) -> int:
        return self._recordings.warmups

    @in_inference_mode
    def __call__(self, tensors: Sequence[Tensor], *numbers: int) -> Outputs:
        if not self._is_recorded:
            return self._function(*tensors, *numbers)
        rows = len(tensors[0])
        padded = 1 << (rows - 1).bit_length()
        sizes = [(padded, *each.shape[1:]) for each in tensors]

        def load(inputs: list[Tensor]) -> None:
            for memory, given in zip(inputs, tensors, strict=True):
                memory[:rows].copy_(given)

        work = Work(
            make=lambda: [each.new_zeros(size) for each, size in zip(tensors, sizes, strict=True)],
            load=load,
            forward=lambda inputs: self._function(*inputs, *numbers),
            rows=rows,
        )
        return self._recordings.run((*sizes, numbers), work)


_CAPTURING = threading.Lock()
"""CUDA allows one recording at a time in a process."""


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection, because what it frees would be recorded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CudaGraphs(Recorder):
    """Records CUDA graphs, which share one memory pool: one forward runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._aside: torch.cuda.Stream | None = None  # only one, because the allocator keeps memory for each stream
        self._pool: Any = None  # torch has no public type for it

    def record(self, forward: Callable[[], Outputs]) -> Recording:
        with _CAPTURING, _without_collections(), torch.cuda.device(self._device):
            aside = self._aside = self._aside or torch.cuda.Stream(self._device)
            current = torch.cuda.current_stream(self._device)
            aside.wait_stream(current)
            try:
                with torch.cuda.stream(aside):
                    forward()  # libraries initialise at their first call, which cannot be recorded
            finally:
                current.wait_stream(aside)  # its inputs may be freed after this
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device during it. Torch's default capture stream may be on another device.
            with torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"):
                outputs = forward()
        return Recording(outputs, graph.replay)

    def forget(self) -> None:
        self._pool = None


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

        `segments` and `vectors` `[total, width]` are inputs of the first of `levels` forwards; see `PagedBatch.levels`
        for `beams` and `nodes`. `numbers` `[requests, ...]` each are passed to `draft`, which `key` identifies among
        recordings.
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

    Worked example: of 3, 300 and 1 tokens the first and the last run together, and with `together` all do.
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
