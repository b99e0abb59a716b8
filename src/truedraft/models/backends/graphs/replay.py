"""Ways to run a forward, or another function of tensors: as it is, or recorded once for each shape and replayed."""

from __future__ import annotations

import gc
import logging
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from truedraft.core.inference import in_inference_mode
from truedraft.models.backends.graphs.batch import Bucket, Inputs, PagedBatch

_log = logging.getLogger(__name__)

Outputs: TypeAlias = tuple[Tensor, ...]
"""Logits `[wanted, ids]`, vectors before the LM head `[wanted, width]`, and what some layers give, each likewise."""

Layers: TypeAlias = tuple[int, ...]
Forward: TypeAlias = Callable[[Inputs, Layers], Outputs]
MakeInputs: TypeAlias = Callable[[Bucket], Inputs]

Held = TypeVar("Held")
"""Inputs in memory that stays."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A forward whose kernels are known; replaying it computes from whatever its inputs hold by then.

    Attributes:
        outputs: at fixed addresses; the next replay overwrites them.
        replay: queues all of its kernels.
    """

    outputs: Outputs
    replay: Callable[[], None]


class Recorder(ABC):
    """Makes recordings."""

    @abstractmethod
    def record(self, forward: Callable[[], Outputs]) -> Recording:
        """Record a forward. It may run meanwhile, any number of times, and runs once before anything is recorded: it
        writes the same whenever it runs. Nobody but it may run meanwhile."""

    @abstractmethod
    def forget(self) -> None:
        """All recordings made so far are gone; free what they shared."""


@dataclass(frozen=True, slots=True)
class Work(Generic[Held]):
    """What is to run.

    Attributes:
        make: makes memory for its inputs.
        load: fills it.
        forward: computes from it.
        rows: of each output; those behind are padding.
    """

    make: Callable[[], Held]
    load: Callable[[Held], None]
    forward: Callable[[Held], Outputs]
    rows: int

    def run(self) -> Outputs:
        """Run it as it is, operation by operation, from inputs of its own."""
        inputs = self.make()
        self.load(inputs)
        return tuple(each[: self.rows] for each in self.forward(inputs))


class Recordings(Generic[Held]):
    """Records what comes back in the same shape, and replays it from then on.

    Many shapes, such as the ends of prompts, occur once, and recording costs far more than running: so the first work
    of a shape runs as it is.

    Args:
        recorder: makes the recordings; without one nothing is recorded.
        most: recordings that are kept; of more, the one that was used longest ago goes.

    Attributes:
        warmups: runs so far that were as they are, to be recorded later, or were recorded.
    """

    def __init__(self, recorder: Recorder | None, most: int = 64) -> None:
        self._recorder = recorder
        self._most = most
        self._seen: set[Hashable] = set()
        self._unrecorded: set[Hashable] = set()  # for recording them failed
        self._kept: OrderedDict[Hashable, tuple[Held, Recording]] = OrderedDict()
        self._outputs: dict[Hashable, Tensor] = {}
        self.warmups = 0

    @property
    def shapes(self) -> list[Hashable]:
        """Shapes whose recordings are kept, the one used longest ago first."""
        return list(self._kept)

    def run(self, shape: Hashable, work: Work[Held]) -> Outputs:
        """Run something; work of one shape does the same operations, on inputs of the same sizes.

        Returns:
            The rows that were asked for, without padding. They belong to the caller.
        """
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
            except RuntimeError as error:  # such as for lack of memory, which what is recorded would keep
                _log.warning("a forward is not recorded (%s); it runs operation by operation", error)
                self._unrecorded.add(shape)
                return work.run()
        recording.replay()
        # Copies: the next replay overwrites the outputs, and a drafter may keep them for longer.
        return tuple(each[: work.rows].clone() for each in recording.outputs)

    def _record(self, shape: Hashable, work: Work[Held], recorder: Recorder) -> Recording:
        inputs = work.make()
        work.load(inputs)
        recording = recorder.record(lambda: self._put_away(work.forward(inputs)))
        self._kept[shape] = (inputs, recording)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
            self._unrecorded.clear()  # what was given up has left room
        return recording

    def _put_away(self, outputs: Outputs) -> Outputs:
        """Outputs in memory that all recordings with such outputs share. Whatever a recording leaves in memory of its
        own stays there for good: with large vocabularies gigabytes."""
        shared = []
        for number, output in enumerate(outputs):
            key = number, output.shape, output.dtype
            if key not in self._outputs:
                self._outputs[key] = torch.empty_like(output)
            shared.append(self._outputs[key].copy_(output))
        return tuple(shared)

    def forget(self) -> None:
        """All recordings are void."""
        self._seen.clear()
        self._unrecorded.clear()
        self._outputs.clear()
        if self._kept and self._recorder is not None:
            self._kept.clear()
            self._recorder.forget()


class Runner:
    """Runs batches through a forward, as it is or recorded; see `Recordings`.

    The forward of a bucket that shows the same layers is recorded when it comes back.

    Args:
        forward: what runs.
        inputs: makes the inputs of a bucket.
        recorder: makes the recordings; without one nothing is recorded.
        most: recordings that are kept; of more, the one that was used longest ago goes.
    """

    def __init__(self, forward: Forward, inputs: MakeInputs, recorder: Recorder | None, most: int = 256) -> None:
        self._forward = forward
        self._inputs = inputs
        self._recordings: Recordings[Inputs] = Recordings(recorder, most)
        self._addresses: object = None

    @property
    def warmups(self) -> int:
        """Forwards so far that ran as they are, to be recorded later, or were recorded."""
        return self._recordings.warmups

    @property
    def buckets(self) -> list[Bucket]:
        """Buckets whose recordings are kept, the one used longest ago first."""
        shapes: list[Any] = self._recordings.shapes
        return [bucket for bucket, _ in shapes]

    def run_once(self, batch: PagedBatch, layers: Layers = ()) -> Outputs:
        """Load a batch and run it as it is, operation by operation; returns what `run` does."""
        return self._work(batch, layers).run()

    def run(self, batch: PagedBatch, addresses: object, layers: Layers = ()) -> Outputs:
        """Load a batch and run it.

        Args:
            batch: what is fed.
            addresses: what stands for those that the forward reads and writes besides its inputs; recordings made
                under others are void.
            layers: whose output is shown.

        Returns:
            The rows that were asked for, without padding. They belong to the caller.
        """
        return self.run_work((batch.bucket, layers), self._work(batch, layers), addresses)

    def run_work(self, shape: tuple[Bucket, Hashable], work: Work[Any], addresses: object) -> Outputs:
        """The same for work that is more than one forward, which begins in some bucket."""
        if addresses != self._addresses:
            self._addresses = addresses
            self._recordings.forget()
        return self._recordings.run(shape, work)

    def _work(self, batch: PagedBatch, layers: Layers) -> Work[Inputs]:
        return Work(
            make=lambda: self._inputs(batch.bucket),
            load=lambda inputs: inputs.load(batch),
            forward=lambda inputs: self._forward(inputs, layers),
            rows=batch.wanted,
        )


class RecordedFunction:
    """A function of tensors `[rows, ...]` whose rows depend on the same rows of its arguments alone; see `Recordings`.

    It is recorded for each number of rows, a power of two, and for all that its arguments do not hold. Rows of padding
    hold what earlier calls left there. Nothing in it may wait for the device, and no tensor that it makes may be kept:
    a recording's memory is shared.

    Args:
        function: is given tensors, and behind them the numbers that it was called with; gives tensors `[rows, ...]`.
        recorder: makes the recordings; without one the function is called with the very arguments.
        most: recordings that are kept; of more, the one that was used longest ago goes.
    """

    def __init__(self, function: Callable[..., Outputs], recorder: Recorder | None, most: int = 64) -> None:
        self._function = function
        self._is_recorded = recorder is not None
        self._recordings: Recordings[list[Tensor]] = Recordings(recorder, most)

    @property
    def warmups(self) -> int:
        """Calls so far that took longer than others of their shape will."""
        return self._recordings.warmups

    @in_inference_mode
    def __call__(self, tensors: Sequence[Tensor], *numbers: int) -> Outputs:
        """What the function gives for tensors of equally many rows, at least one, all on its device."""
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
"""CUDA lets one recording of a process be under way at a time."""


@contextmanager
def _without_collections() -> Iterator[None]:
    """Python collects no garbage meanwhile: what an engine that is gone frees would be recorded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CudaGraphs(Recorder):
    """Records CUDA graphs, which share one pool of memory: one forward runs at a time.

    Args:
        device: where they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._aside: torch.cuda.Stream | None = None  # one, for the allocator keeps memory for each
        self._pool: Any = None  # torch names no public type for it

    def record(self, forward: Callable[[], Outputs]) -> Recording:
        with _CAPTURING, _without_collections(), torch.cuda.device(self._device):
            aside = self._aside = self._aside or torch.cuda.Stream(self._device)
            current = torch.cuda.current_stream(self._device)
            aside.wait_stream(current)
            try:
                with torch.cuda.stream(aside):
                    forward()  # libraries make themselves ready at their first call, which cannot be recorded
            finally:
                current.wait_stream(aside)  # its inputs may be freed behind this
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile. Torch's own stream for this may be another device's.
            with torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"):
                outputs = forward()
        return Recording(outputs, graph.replay)

    def forget(self) -> None:
        self._pool = None
