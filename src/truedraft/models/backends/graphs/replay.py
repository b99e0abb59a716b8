"""Ways to run a forward: as it is, or recorded once for each bucket and replayed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from truedraft.models.backends.graphs.batch import Bucket, Inputs, PagedBatch

Outputs: TypeAlias = tuple[Tensor, ...]
"""Logits `[wanted, ids]`, vectors before the LM head `[wanted, width]`, and what some layers give, each likewise."""

Layers: TypeAlias = tuple[int, ...]
Forward: TypeAlias = Callable[[Inputs, Layers], Outputs]
MakeInputs: TypeAlias = Callable[[Bucket], Inputs]


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
        """Record a forward. It may run meanwhile, any number of times: it writes the same whenever it runs."""

    @abstractmethod
    def forget(self) -> None:
        """All recordings made so far are gone; free what they shared."""


class Runner:
    """Runs batches through a forward, as it is or recorded.

    The forward of a bucket that shows the same layers is recorded when it comes back, and replayed from then on. Many
    shapes, such as the ends of prompts, occur once, and recording costs far more than running: so the first batch of a
    bucket runs as it is.

    Args:
        forward: what runs.
        inputs: makes the inputs of a bucket.
        recorder: makes the recordings; without one nothing is recorded.
        most: recordings that are kept; of more, the one that was used longest ago goes.

    Attributes:
        warmups: forwards so far that ran as they are, to be recorded later, or were recorded.
    """

    def __init__(self, forward: Forward, inputs: MakeInputs, recorder: Recorder | None, most: int = 256) -> None:
        self._forward = forward
        self._inputs = inputs
        self._recorder = recorder
        self._most = most
        self._seen: set[tuple[Bucket, Layers]] = set()
        self._kept: OrderedDict[tuple[Bucket, Layers], tuple[Inputs, Recording]] = OrderedDict()
        self._addresses: object = None
        self.warmups = 0

    @property
    def buckets(self) -> list[Bucket]:
        """Buckets whose recordings are kept, the one used longest ago first."""
        return [bucket for bucket, _ in self._kept]

    def run_once(self, batch: PagedBatch, layers: Layers = ()) -> Outputs:
        """Load a batch and run it as it is, operation by operation; returns what `run` does."""
        return tuple(each[: batch.wanted] for each in self._forward(self._loaded(batch), layers))

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
        if addresses != self._addresses:
            self._forget(addresses)
        shape = batch.bucket, layers
        if self._recorder is None:
            return self.run_once(batch, layers)
        if shape not in self._kept:
            self.warmups += 1
        if shape not in self._seen:
            self._seen.add(shape)
            return self.run_once(batch, layers)
        if shape in self._kept:
            self._kept.move_to_end(shape)
            inputs, recording = self._kept[shape]
            inputs.load(batch)
        else:
            recording = self._record(batch, layers, self._recorder)
        recording.replay()
        # Copies: the next replay overwrites the outputs, and a drafter may keep them for longer.
        return tuple(each[: batch.wanted].clone() for each in recording.outputs)

    def _loaded(self, batch: PagedBatch) -> Inputs:
        inputs = self._inputs(batch.bucket)
        inputs.load(batch)
        return inputs

    def _record(self, batch: PagedBatch, layers: Layers, recorder: Recorder) -> Recording:
        inputs = self._loaded(batch)
        recording = recorder.record(lambda: self._forward(inputs, layers))
        self._kept[batch.bucket, layers] = (inputs, recording)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return recording

    def _forget(self, addresses: object) -> None:
        self._addresses = addresses
        self._seen.clear()
        if self._kept and self._recorder is not None:
            self._kept.clear()
            self._recorder.forget()


class CudaGraphs(Recorder):
    """Records CUDA graphs, which share one pool of memory: one forward runs at a time.

    Args:
        device: where they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # torch names no public type for it

    def record(self, forward: Callable[[], Outputs]) -> Recording:
        with torch.cuda.device(self._device):
            aside = torch.cuda.Stream(self._device)
            aside.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(aside):
                forward()  # libraries make themselves ready at their first call, which cannot be recorded
            torch.cuda.current_stream(self._device).wait_stream(aside)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = forward()
        return Recording(outputs, graph.replay)

    def forget(self) -> None:
        self._pool = None
