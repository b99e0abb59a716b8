"""Backends: they run packed forwards by the model's own modules, or by a faster loop over the same weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from transformers import PreTrainedModel

from truedraft.core.budget import Budget
from truedraft.core.top_k import TopK
from truedraft.errors import UnsupportedModelError
from truedraft.models.attention import ForwardPlan
from truedraft.models.base import Choose, DrawnChain, ForwardOutput, HeadRun, Segment
from truedraft.models.cache import CachePool
from truedraft.models.lm_head import lm_head_width
from truedraft.models.multimodal import input_names_of


class Backend(ABC):
    """Computes packed forwards of one loaded model, one at a time. Unsupported requests raise `UnsupportedModelError`.

    Plans are padded to `least_rows` tokens and rows, because kernels treat very short products differently and a row
    must not depend on the number of other rows (docs/lossless.md, row invariance).
    """

    fast_paths: tuple[str, ...]
    least_rows: int
    any_threads: bool = False  # up to 32 rows have the same bits on any number of torch's threads
    own_threads: bool = False  # forwards run on threads that are not torch's
    note: str | None = None
    shown_layers: int = 0
    adapters: tuple[str, ...] = ()
    input_names: frozenset[str] = frozenset()
    weight_bytes: int = 0  # that a forward reads; 0 where they are the model's own
    bits: int = 0  # fewest of a linear weight; 0 where all are of the model's dtype
    failure: str | None = None
    rows_vary: bool = False  # a row's last bits may depend on the tokens after it, even if a few forwards hide it
    reads_codes: bool = False  # keys and values may be codes of 8 bits, `CodedBuffers`
    warmups: int = 0
    records_chains: bool = False
    draws_chains: bool = False

    def new_pool(self, limit: int) -> CachePool:
        """The pool for the caches of the model's requests, of up to `limit` tokens each; called once."""
        return CachePool(limit)

    def forward(self, segments: Sequence[Segment], device: torch.device, layers: Sequence[int] = ()) -> ForwardOutput:
        """Run the segments, with outputs of `layers`; logits include padded ids. Reserves room in their caches."""
        has_inputs = any(segment.inputs is not None for segment in segments)
        if has_inputs and len(segments) > 1:
            return self._forward_each(segments, device, layers)
        if has_inputs and not self.input_names:
            raise UnsupportedModelError("this forward reads only text; load the model with fast_paths=False")
        plan = ForwardPlan.of(segments, device, 1 if has_inputs else self.least_rows)
        outputs = self.run(plan, layers)
        if len(outputs[0]) != plan.requested:  # a view of all takes a microsecond, which a small model feels
            outputs = tuple(each[: plan.requested] for each in outputs)
        return ForwardOutput(outputs[0], outputs[1], outputs[2:])

    def _forward_each(self, segments: Sequence[Segment], device: torch.device, layers: Sequence[int]) -> ForwardOutput:
        numbers = range(len(segments))
        packed = [number for number in numbers if segments[number].inputs is None]
        groups = [*filter(None, [packed]), *([number] for number in numbers if number not in packed)]
        outputs = [self.forward([segments[number] for number in group], device, layers) for group in groups]
        order = [number for group in groups for number in group]
        counts = [len(segments[number].rows) for number in order]

        def in_order(parts: tuple[Tensor, ...]) -> Tensor:
            rows = dict(zip(order, torch.cat(parts).split(counts), strict=True))
            return torch.cat([rows[number] for number in numbers])

        parts = zip(*((each.logits, each.hidden, *each.layers) for each in outputs), strict=True)
        logits, hidden, *shown = map(in_order, parts)
        return ForwardOutput(logits, hidden, tuple(shown))

    def forward_chains(
        self, segments: Sequence[Segment], levels: int, choose: Choose, numbers: Sequence[Tensor], vocab: int
    ) -> tuple[Tensor, Tensor | None]:
        raise UnsupportedModelError("this forward records no chains")

    def draft_chain(
        self, segment: Segment, budget: Budget, numbers: Sequence[Sequence[float]], columns: int, vocab: int
    ) -> DrawnChain:
        """See `LanguageModel`; draws from the first `columns` logits, for distributions over `vocab` ids."""
        raise UnsupportedModelError("this forward draws no chains")

    def run(self, plan: ForwardPlan, layers: Sequence[int]) -> tuple[Tensor, ...]:
        """Run the plan, for `forward`; if its first segment has inputs in addition to tokens, it is the only one.

        Returns:
            At the plan's rows, padding included: logits `[rows, ids]` with padded ids of the embedding, the inputs
            `[rows, width]` of the LM head, and the outputs `[rows, width]` of `layers`.
        """
        raise NotImplementedError

    def shallow(self, layers: int) -> AbstractContextManager[None]:
        raise UnsupportedModelError("this forward runs all of its layers")

    def quantize(self, bits: int) -> None:
        """Quantise linear weights to 8 or 4 bits and free them; UnsupportedModelError if it cannot, or already did."""
        raise UnsupportedModelError(
            "it does not run by the native forward, which alone has products with such weights; leave --weights out"
        )

    def quantized(self, bits: int) -> Backend:
        """A copy with linear weights of 8 or 4 bits, over the same caches; only one of the two may run at a time."""
        raise UnsupportedModelError("its forward has no products with such weights")

    def narrowed(self, ids: Tensor) -> Backend:
        """A copy with logits `[rows, len(ids)]` of these ids alone, over the same caches; as `quantized`."""
        raise UnsupportedModelError("its forward computes logits of all ids")

    @abstractmethod
    def unembed(self, vectors: Tensor) -> Tensor:
        """LM head logits `[rows, ids]`, padded ids included, of vectors `[rows, up to width]`, row by row."""

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        return embedding(tokens, table)

    def likeliest(self, vectors: Tensor, count: int, vocab: int, factor: float) -> TopK:
        """The likeliest of the first `vocab` ids, `[rows, count]`, by `factor` times the logits of `unembed`."""
        return TopK.of(self.unembed(vectors)[:, :vocab].float() * factor, count)

    def shared_heads(self, blocks: Sequence[Sequence[nn.Linear]], vocab: int, factor: float) -> HeadRun | None:
        """See `LanguageModel.shared_heads`; `factor` is that by which the model multiplies its logits."""
        return None

    def _whole_rows(self, vectors: Tensor, width: int) -> Tensor:
        rows, given = vectors.shape
        return pad(vectors, (0, width - given, 0, max(0, self.least_rows - rows)))


class ModuleBackend(Backend):
    """Runs a model's own modules; a forward pre-hook reads the input of its LM head."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.fast_paths = ()
        self.input_names = input_names_of(model)
        count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
        lists = [each for each in model.base_model.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
        self._layers: Sequence[nn.Module] = list(lists[0]) if len(lists) == 1 else ()  # otherwise unknown
        self.shown_layers = len(self._layers)
        self._captured: list[Tensor] = []
        self._head = model.get_output_embeddings()
        self._head.register_forward_pre_hook(lambda _, inputs: self._captured.append(inputs[0]))

    @contextmanager
    def _watching(self, layers: Sequence[int], show: Callable[[int, Tensor], None]) -> Iterator[None]:
        """In the context, the output of each of these layers is passed to `show`."""

        def noted(layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
            show(layer, output if isinstance(output, Tensor) else output[0])

        with ExitStack() as hooks:
            for layer in layers:
                hooks.callback(self._layers[layer].register_forward_hook(partial(noted, layer)).remove)
            yield

    def unembed(self, vectors: Tensor) -> Tensor:
        logits: Tensor = self._head(self._whole_rows(vectors, lm_head_width(self._head)))
        self._captured.clear()
        return logits[: len(vectors)]


BackendMaker: TypeAlias = Callable[[PreTrainedModel], Backend]
"""Makes a backend of a loaded model; it may change the model's modules."""
