"""An unmodified Hugging Face causal language model behind our contract."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from truedraft.cache import CachePool, RequestCache
from truedraft.errors import ModelError, UnsupportedModelError
from truedraft.models.attention import attend_packed
from truedraft.models.base import ForwardOutput, LanguageModel, Segment
from truedraft.models.layouts import Attending
from truedraft.models.patterns import AttentionPattern
from truedraft.models.plan import ForwardPlan
from truedraft.models.probe import probe_patterns
from truedraft.text.tokenizer import Tokenizer

_numbers = itertools.count()
_ROPE_OF_THE_WHOLE_PACK = {"dynamic", "longrope"}


class HuggingFaceModel(LanguageModel):
    """Runs packed forwards through a model's own forward, by public doors only.

    Attention goes through the attention registry, positions and wanted rows through keyword arguments, and a
    forward pre-hook on the LM head reads its input. Nothing of the model is copied. It is switched to
    this attention and to evaluation without gradients, so run it through `forward` only.

    Args:
        model: in evaluation mode.
        tokenizer: of the model, or None.
        name: what the user called it.

    Raises:
        UnsupportedModelError: the family cannot run packed; says why.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer | None, name: str) -> None:
        self._model = model.eval().requires_grad_(False)
        self.name = name
        self.tokenizer = tokenizer
        config = model.config.get_text_config()
        head = model.get_output_embeddings()
        if head is None:
            raise UnsupportedModelError(f"{name} has no LM head; truedraft needs a causal language model")
        rows = int(head.weight.shape[0])
        self.vocab_size = min(rows, tokenizer.vocab_size) if tokenizer is not None else rows
        self.context_length = int(getattr(config, "max_position_embeddings", None) or 2**20)
        self.eos_token_ids = _eos_ids(model, tokenizer)
        self.device = model.device
        self.dtype = model.dtype
        self.pool = CachePool(self.context_length)
        _refuse_shared_positions(config, name)
        _refuse_scaled_queries(config, name)
        self._runner = _Runner(probe_patterns(model))
        self._runner.register(model)
        self._captured: list[Tensor] = []
        head.register_forward_pre_hook(lambda _, inputs: self._captured.append(inputs[0]))
        self._lock = threading.Lock()

    @property
    def module(self) -> PreTrainedModel:
        """The model itself. Run it through `forward` only: its attention needs a plan."""
        return self._model

    @property
    def least_rows(self) -> int:
        """Tokens that a forward is padded to, for row invariance; float32 rows differ by rounding anyway."""
        return 1 if self.dtype in (torch.float32, torch.float64) else 4

    def new_cache(self) -> RequestCache:
        """An empty cache for one request."""
        return self.pool.acquire()

    def release_cache(self, cache: RequestCache) -> None:
        """Take back a cache that is no longer used."""
        self.pool.release(cache)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        """One packed forward; see `LanguageModel.forward`."""
        plan = ForwardPlan.of(segments, self.device, self.least_rows)
        with self._lock, self._runner.running(plan):
            self._captured.clear()
            output = self._model(
                input_ids=plan.tokens,
                position_ids=plan.positions,
                use_cache=False,
                logits_to_keep=plan.rows,
            )
            hidden = self._captured.pop()
        return ForwardOutput(output.logits[0, : plan.wanted, : self.vocab_size], hidden[0, : plan.wanted])


class _Runner:
    """The attention function of one loaded model: a bound method, so that it knows the plan of the forward."""

    def __init__(self, patterns: Sequence[AttentionPattern]) -> None:
        self.name = f"truedraft-{next(_numbers)}"
        self._patterns = tuple(patterns)
        self._plan: ForwardPlan | None = None
        self._call = 0

    def register(self, model: PreTrainedModel) -> None:
        """Make this runner the model's attention."""
        AttentionInterface.register(self.name, self.attend)
        model.set_attn_implementation(self.name)
        if model.config._attn_implementation != self.name:
            raise UnsupportedModelError(f"{type(model).__name__} does not use transformers' attention registry")

    def running(self, plan: ForwardPlan) -> _Running:
        """A context in which forwards of the model follow `plan`."""
        return _Running(self, plan)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,  # never built: the registry's mask functions do not know our name
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """What the model's layers call instead of their own attention; batch 1, all segments packed."""
        plan = self._plan
        if plan is None:
            raise ModelError(f"{type(module).__name__} was called outside truedraft; use LanguageModel.forward")
        if self._call == len(self._patterns):
            raise ModelError(f"{type(module).__name__} made more attention calls than when it was loaded")
        pattern = self._patterns[self._call]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        how = Attending(scale, softcap, s_aux)
        mixed = attend_packed(query[0], key[0], value[0], plan, self._call, pattern, how)
        self._call += 1
        return mixed[None], None


class _Running:
    """Holds a runner's plan for the duration of one forward."""

    def __init__(self, runner: _Runner, plan: ForwardPlan) -> None:
        self._runner = runner
        self._plan = plan

    def __enter__(self) -> None:
        self._runner._plan = self._plan
        self._runner._call = 0

    def __exit__(self, *_: object) -> None:
        self._runner._plan = None


def _eos_ids(model: PreTrainedModel, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end an answer: what generation would use, else the configuration's, else the tokenizer's."""
    generation = getattr(model, "generation_config", None)
    for given in (getattr(generation, "eos_token_id", None), model.config.get_text_config().eos_token_id):
        if given is not None:
            return (given,) if isinstance(given, int) else tuple(given)
    return () if tokenizer is None else tokenizer.eos_token_ids


def _refuse_shared_positions(config: Any, name: str) -> None:
    """Rotary variants that look at the longest position of a whole pack would couple neighbours."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    groups = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for group in groups:
        kind = group.get("rope_type", group.get("type"))
        if kind in _ROPE_OF_THE_WHOLE_PACK:
            raise UnsupportedModelError(
                f"{name} scales its rotary positions by the longest request of a batch (rope type {kind!r}), so its "
                "answers would depend on their neighbours; truedraft does not run it yet"
            )


def _refuse_scaled_queries(config: Any, name: str) -> None:
    """Llama 4 scales queries of layers without rotary positions by their place in the pack, not by their position."""
    if getattr(config, "attn_temperature_tuning", False) and 0 in (getattr(config, "no_rope_layers", None) or ()):
        raise UnsupportedModelError(
            f"{name} scales its queries by their place in the batch (attn_temperature_tuning), so its answers would "
            "depend on their neighbours; truedraft does not run it yet"
        )
