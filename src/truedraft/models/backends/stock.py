"""The model's own modules, with our attention in them."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from truedraft.errors import ModelError, UnsupportedModelError
from truedraft.models.adapters import Adapters, LowRank
from truedraft.models.attention import AttentionPattern, ForwardPlan, Scoring
from truedraft.models.backends.base import ModuleBackend
from truedraft.models.backends.native.linear import quantized_linears
from truedraft.models.cache import CachePool
from truedraft.models.multimodal import input_names_of, noting_shift, on_device
from truedraft.models.packed_linear import multiplies_only_packed
from truedraft.models.probe import probe_patterns
from truedraft.models.recurrence import Recurrence, carrying_modules

_numbers = itertools.count()


class StockBackend(ModuleBackend):
    """Runs a packed forward through a model's own forward, by public interfaces only, with its attention replaced.

    `patterns` None detects those of each attention call; `adapters` are those of `read_adapters`, by name.

    Raises UnsupportedModelError: the family cannot run packed; names the reason.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        patterns: Sequence[AttentionPattern] | None = None,
        adapters: Mapping[str, Mapping[str, LowRank]] = MappingProxyType({}),
    ) -> None:
        self._attention = _PackedAttention(probe_patterns(model) if patterns is None else patterns)
        self._attention.register(model)
        self._adapters = Adapters(model, adapters)
        self.adapters = self._adapters.names
        carrying = carrying_modules(model)
        self._carries = bool(carrying)
        self.reads_codes = not carrying and model.device.type == "cpu"
        self._recurrence = Recurrence(carrying, model.config.get_text_config().hidden_size)
        self._gives_all_rows = "logits_to_keep" not in inspect.signature(model.forward).parameters
        super().__init__(model)
        # Stock kernels treat very short products differently. In float32 four rows cost 1.4 to 1.9 times as much as
        # one, so there rows may differ in their last bits and results are equal up to near ties (see `note`).
        self.least_rows = 1 if model.dtype in (torch.float32, torch.float64) else 4

    def new_pool(self, limit: int) -> CachePool:
        return CachePool(limit, carries=self._carries)

    def run(self, plan: ForwardPlan, layers: Sequence[int]) -> tuple[Tensor, ...]:
        seen: dict[int, Tensor] = {}
        segment = plan.segments[0].segment

        def show(layer: int, vectors: Tensor) -> None:
            seen[layer] = vectors[0].index_select(0, plan.rows)

        with self._watching(layers, show):
            if segment.inputs is None:
                with self._attention.following(plan):
                    made = self._run(plan, {"position_ids": plan.positions})
            else:
                inputs = on_device(segment.inputs, plan.tokens.device, self._model.dtype)
                with noting_shift(self._model, segment.cache), self._attention.reading(self._model, plan):
                    made = self._run(plan, {"attention_mask": torch.ones_like(plan.tokens), **inputs})
        return *made, *(seen[layer] for layer in layers)

    def _run(self, plan: ForwardPlan, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        self._captured.clear()
        with self._recurrence.following(plan), self._adapters.following(plan):
            output = self._model(input_ids=plan.tokens, use_cache=False, logits_to_keep=plan.rows, **given)
        logits, vectors = output.logits[0], self._captured.pop()[0]
        return (logits[plan.rows], vectors[plan.rows]) if self._gives_all_rows else (logits, vectors)

    def quantized(self, bits: int) -> StockBackend:
        if self._carries or self.adapters:
            raise UnsupportedModelError("its layers carry states, or its adapters are not merged")
        linears = quantized_linears(self._model, bits)
        weights = [*self._model.parameters(), *self._model.buffers()]
        instead: dict[int, Any] = {id(each): each for each in weights} | {id(was): now for was, now in linears.items()}
        twin = StockBackend(copy.deepcopy(self._model, instead), self._attention.patterns)
        twin.weight_bytes = sum(linear.weight_bytes for linear in linears.values())
        twin.fast_paths = (f"weights of {bits} bits",)
        if multiplies_only_packed(twin._model):
            twin.least_rows = 1  # a row of these products does not depend on the number of rows
        return twin


class _PackedAttention:
    """The attention function of one loaded model. The registry keeps it forever, so it holds nothing of the model."""

    def __init__(self, patterns: Sequence[AttentionPattern]) -> None:
        self.patterns = tuple(patterns)
        self._plan: ForwardPlan | None = None
        self._call = 0
        self._decoder: frozenset[int] = frozenset()  # ids of its modules, while it reads a prompt with images

    def register(self, model: PreTrainedModel) -> None:
        name = f"truedraft-{next(_numbers)}"
        AttentionInterface.register(name, self.attend)
        if input_names_of(model):
            AttentionInterface.register(f"{name}-masked", self.attend_masked)
            AttentionMaskInterface.register(f"{name}-masked", sdpa_mask)
        model.set_attn_implementation(name)
        if self.patterns and model.config._attn_implementation != name:
            raise UnsupportedModelError(f"{type(model).__name__} does not use transformers' attention registry")

    @contextmanager
    def reading(self, model: PreTrainedModel, plan: ForwardPlan) -> Iterator[None]:
        """In the context, the text decoder reads the plan's one segment under the masks that it makes itself."""
        name = model.config._attn_implementation
        self._decoder = frozenset(map(id, model.get_decoder().modules()))
        model.set_attn_implementation(f"{name}-masked")
        try:
            with self.following(plan):
                yield
        finally:
            model.set_attn_implementation(name)

    @contextmanager
    def following(self, plan: ForwardPlan) -> Iterator[None]:
        self._plan, self._call = plan, 0
        try:
            yield
        finally:
            self._plan = None

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,  # never built: the registry has no mask function of our name
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        plan, call = self._next_call(module)
        scoring = _scoring(query, scaling, softcap, s_aux)
        mixed = plan.attend(call, self.patterns[call], scoring, query[0], key[0], value[0])
        return mixed[None].contiguous(), None  # some families take views of it

    def attend_masked(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, None]:
        """`attend` for a whole prompt with images, under the mask `[1, 1, total, total]` that the model made."""
        if id(module) not in self._decoder:
            mixed, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **given)
            return mixed, None
        if key.shape[2] != query.shape[2] or (attention_mask is not None and attention_mask.shape[:2] != (1, 1)):
            raise UnsupportedModelError(
                f"{type(module).__name__} reads images separately from its text, which truedraft cannot run; give "
                "only text"
            )
        plan, call = self._next_call(module)
        scoring = _scoring(query, given.get("scaling"), given.get("softcap"), given.get("s_aux"))
        mask = None if attention_mask is None else attention_mask[0, 0]
        if mask is not None:
            seen = mask[-1] if mask.dtype == torch.bool else mask[-1] >= 0
            first = max(0, self.patterns[call].first(len(seen) - 1))
            family = plan.segments[0].segment.cache.family
            family.unshareable |= bool(seen[:first].any()) or not bool(seen[first:].all())
        return plan.attend_masked(call, mask, scoring, query[0], key[0], value[0])[None].contiguous(), None

    def _next_call(self, module: nn.Module) -> tuple[ForwardPlan, int]:
        if self._plan is None:
            raise ModelError(f"{type(module).__name__} was called outside truedraft; use LanguageModel.forward")
        if self._call == len(self.patterns):
            raise ModelError(f"{type(module).__name__} made more attention calls than when it was loaded")
        call, self._call = self._call, self._call + 1
        return self._plan, call


def _scoring(query: Tensor, scaling: float | None, softcap: float | None, sinks: Tensor | None) -> Scoring:
    return Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sinks)
