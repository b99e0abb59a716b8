"""One backend each, for tests that want that one rather than the fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from truedraft.models.attention import AttentionPattern
from truedraft.models.backends.fused import FusedBackend
from truedraft.models.backends.graphs import GraphBackend
from truedraft.models.backends.graphs.replay import Outputs, Recorder, Recording
from truedraft.models.backends.native import NativeBackend
from truedraft.models.backends.native.build import built
from truedraft.models.backends.native.linear import NativeLmHead
from truedraft.models.backends.native.memory import UNIT, CLinear, CModel, Scratch, Weights
from truedraft.models.llama import Llama
from truedraft.models.probe import probe_patterns


def llama_of(model: PreTrainedModel, patterns: Sequence[AttentionPattern] | None = None) -> Llama:
    llama = Llama.of(model, probe_patterns(model) if patterns is None else patterns)
    assert llama is not None, f"{type(model).__name__} is not one of those that are known"
    return llama


def fused_backend(model: PreTrainedModel) -> FusedBackend:
    return FusedBackend(llama_of(model))


def native_backend(model: PreTrainedModel) -> NativeBackend:
    return NativeBackend(llama_of(model))


def graph_backend(model: PreTrainedModel, recorder: Recorder | None = None) -> GraphBackend:
    return GraphBackend(llama_of(model), recorder)


def library_for(dtype: torch.dtype) -> Any:
    """That of the native forward; skips the test where there is none."""
    library = built(dtype).library
    if library is None:
        pytest.skip(f"no native forward: {built(dtype).reason}")
    return library


def as_function(library: Any, weights: Weights, linear: CLinear, dtype: torch.dtype) -> NativeLmHead:
    """A layer alone, whose weights are kept with it."""
    model = CModel()
    model.lm_head, model.stride = linear, -(-max(linear.outputs, linear.inputs) // UNIT) * UNIT
    head = NativeLmHead(library, model, dtype, Scratch(library, dtype, model.stride))
    head.kept = weights  # type: ignore[attr-defined]
    return head


class OnTheHost:
    """Runs the forward again, into outputs that stay where they are, as a CUDA graph does."""

    def __init__(self, forward: Callable[[], Outputs]) -> None:
        self._forward = forward
        self.outputs = forward()
        for each in self.outputs:
            each.fill_(torch.nan if each.is_floating_point() else -1)
        self.replays = 0
        self.recording = Recording(self.outputs, self.replay)

    def replay(self) -> None:
        self.replays += 1
        assert all(kept is new for kept, new in zip(self.outputs, self._forward(), strict=True))


class HostRecorder(Recorder):
    """Stands for CUDA graphs on the CPU; keeps its recordings for the test to look at."""

    def __init__(self) -> None:
        self.made: list[OnTheHost] = []
        self.forgotten = 0

    def record(self, forward: Callable[[], Outputs]) -> Recording:
        self.made.append(OnTheHost(forward))
        return self.made[-1].recording

    def forget(self) -> None:
        self.forgotten += 1
