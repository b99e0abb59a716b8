"""One backend each, for tests that want that one rather than the fastest."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from truedraft.models.attention import AttentionPattern
from truedraft.models.backends.fused import FusedBackend
from truedraft.models.backends.graphs import GraphBackend
from truedraft.models.backends.graphs.replay import Recorder
from truedraft.models.backends.native import NativeBackend
from truedraft.models.llama import Llama


def llama_of(model: PreTrainedModel, patterns: Sequence[AttentionPattern]) -> Llama:
    llama = Llama.of(model, patterns)
    assert llama is not None, f"{type(model).__name__} is not one of those that are known"
    return llama


def fused_backend(model: PreTrainedModel, patterns: Sequence[AttentionPattern]) -> FusedBackend:
    return FusedBackend(llama_of(model, patterns))


def native_backend(model: PreTrainedModel, patterns: Sequence[AttentionPattern]) -> NativeBackend:
    return NativeBackend(llama_of(model, patterns))


def graph_backend(
    model: PreTrainedModel, patterns: Sequence[AttentionPattern], recorder: Recorder | None = None
) -> GraphBackend:
    return GraphBackend(llama_of(model, patterns), recorder)
